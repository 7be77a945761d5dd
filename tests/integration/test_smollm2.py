"""Real weights: the same text from a sharded cache as from the plain model."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from cplayers.cache import InterleavedLayout
from cplayers.hf import parallelize
from cplayers.mesh import CPMesh, Topology

NEW = 64
QUESTION = "What year did the lighthouse first use an electric lamp?"
OPTIONS = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
BLOCK = 16


def prompt(folder: Path) -> torch.Tensor:
    document = (Path(__file__).parents[2] / "examples" / "document.txt").read_text()
    chat = [{"role": "user", "content": f"{document}\n\n{QUESTION}"}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]


def load(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder).eval()


@lru_cache(maxsize=1)
def plain(folder: Path) -> torch.Tensor:
    return load(folder).generate(prompt(folder), **OPTIONS)


def generate(folder: Path, topology: Topology):
    model = parallelize(load(folder), CPMesh(topology))
    used = []
    model.model.norm.register_forward_hook(lambda *_: used.append(model.cp.cache.used_bytes))
    tokens = model.generate(prompt(folder), **OPTIONS)
    token_bytes = model.cp.cache.token_bytes
    return tokens, max(used), token_bytes, model.cp.report()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "topology",
    [
        Topology(pcp=2, dcp=2),
        pytest.param(Topology(tp=3, pcp=2, dcp=2), marks=pytest.mark.slow),
        pytest.param(Topology(tp=9, dcp=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_64_tokens_after_a_long_document_equal_the_plain_model(ranks, smollm2, topology) -> None:
    expected = plain(smollm2)
    assert 1850 < expected.shape[1] - NEW < 2050
    size = topology.world_size
    for tokens, used, token_bytes, report in ranks(size).run(
        generate, smollm2, topology, timeout=800
    ):
        assert torch.equal(tokens, expected)
        # 3 KV heads over tp: 3, 1 and 1 of them on a rank
        heads = max(1, 3 // topology.tp)
        assert token_bytes == 30 * 2 * heads * 64 * 4
        share = -(-(expected.shape[1] - 1) // topology.dcp)
        assert used <= (share + BLOCK) * token_bytes
        layout = InterleavedLayout(topology.dcp, BLOCK, BLOCK)
        assert used <= layout.blocks(expected.shape[1] - 1) * BLOCK * token_bytes
        if topology.tp == 9:
            assert "intermediate size 1536 is not divisible by tp=9" in report
            assert "vocabulary size 49152 is not divisible by tp=9" in report


def look_up(folder: Path, topology: Topology, chunk_size: int | None):
    model = parallelize(load(folder), CPMesh(topology), chunk_size=chunk_size)
    forwards: list[int] = []
    model.model.norm.register_forward_hook(lambda *_: forwards.append(1))
    tokens = model.generate(prompt(folder), prompt_lookup_num_tokens=8, **OPTIONS)
    return tokens, len(forwards)


@pytest.mark.timeout(900)
def test_drafts_from_the_prompt_give_the_tokens_of_the_plain_model(ranks, smollm2) -> None:
    expected, size = plain(smollm2), 512
    chunks = -(-(expected.shape[1] - NEW) // size)
    args = smollm2, Topology(pcp=2, dcp=2), size
    for tokens, forwards in ranks(2).run(look_up, *args, timeout=800):
        assert torch.equal(tokens, expected)
        assert forwards < chunks + NEW - 1, "no draft was accepted"

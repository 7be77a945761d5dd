"""transformers models behind a server: replicas of one or several ranks, GQA and MLA."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from parity import HEAD_DIM, Tiny
from parity_mla import TinyMLA

from cplayers import ConfigError, CPMesh, Topology
from cplayers.hf import parallelize, serving_step
from cplayers.serving import Request, ServedModel, Server, ServingConfig

CONFIG = ServingConfig(
    num_blocks=40,
    block_size=4,
    interleave_size=2,
    sizes=(1, 2),
    crossovers={2: 24},
    chunk_tokens=8,
    steps=4,
    headroom=6,
    share=1.0,
    stretch=1,  # so that no clock decides who moves
)
FLOAT64 = 8
LLAMA, DEEPSEEK = Tiny("llama", 8, 2), TinyMLA("deepseek_v3", 8, 1)


def given() -> list[Request]:
    rng = random.Random(2)
    return [
        Request(
            f"r{i}",
            tuple(rng.randrange(1, 96) for _ in range(rng.choice([1, 5, 14, 20, 40]))),
            rng.choice([1, 3, 14]),
        )
        for i in range(10)
    ]


@torch.no_grad()
def alone(tiny: Tiny | TinyMLA) -> list[list[int]]:
    """By transformers' own model in one process, without a cache."""
    model, results = tiny.build().double(), []
    for request in given():
        tokens = list(request.prompt)
        for _ in range(request.max_new_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        results.append(tokens[len(request.prompt) :])
    return results


def serve(tiny: Tiny | TinyMLA, config: ServingConfig, replicas: int, tp: int, dcp: int) -> Any:
    mesh = CPMesh(Topology(tp=tp, dcp=dcp, dp=replicas))
    model = parallelize(tiny.build().double(), mesh)
    server = Server(
        ServedModel(model, serving_step(model)),
        config,
        num_replicas=replicas,
        ranks_per_replica=tp,
        dcp_per_replica=dcp,
    )
    done = server.run(given())
    assert all(runner.cache.pool.num_used == 0 for runner in server.runners.values())
    moved = sum(line["event"] == "migrate" for line in server.trace)
    return [p.new for p in done], moved, server.kv_bytes


@pytest.mark.parametrize(
    ("tiny", "replicas", "tp", "dcp"),
    [
        pytest.param(LLAMA, 2, 1, 1, marks=pytest.mark.slow),
        pytest.param(LLAMA, 2, 2, 1, marks=pytest.mark.slow),
        (DEEPSEEK, 2, 2, 2),
    ],
    ids=["llama, 2 replicas", "llama, 2 replicas of tp 2", "mla, 2 replicas of tp 2 dcp 2"],
)
def test_tokens_are_those_of_transformers(ranks, tiny, replicas, tp, dcp) -> None:
    results = ranks(4).run(serve, tiny, CONFIG, replicas, tp, dcp, n=replicas * tp)
    new, moved, nbytes = results[0]
    assert new == alone(tiny)
    assert moved >= 1
    assert all(result == results[0] for result in results)
    config = tiny.build().config  # of two layers
    values = 2 * config.num_key_value_heads // tp * HEAD_DIM
    if isinstance(tiny, TinyMLA):
        values = config.kv_lora_rank + config.qk_rope_head_dim
    assert nbytes == CONFIG.num_blocks * CONFIG.block_size * 2 * values * FLOAT64


def test_a_module_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="swap the attention of every layer first"):
        ServedModel(torch.nn.Linear(2, 2), lambda *_: torch.empty(0))

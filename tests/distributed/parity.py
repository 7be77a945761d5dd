"""Parallelized tiny models on the ranks, against results of transformers' own from the parent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from cplayers.cache import CacheConfig
from cplayers.errors import ConfigError
from cplayers.hf import parallelize
from cplayers.mesh import CPMesh, Topology, validate

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
PROMPTS = (1, 2, 3, 5, 17, 64)
STEPS = 12
HEAD_DIM = 16  # so that decoding looks up block tables


@dataclass(frozen=True)
class Tiny:
    """A tiny random model: family, query heads, KV heads."""

    family: str
    heads: int
    kv_heads: int

    def build(self) -> PreTrainedModel:
        """The same weights in every process."""
        config = CONFIGS[self.family](
            vocab_size=96,  # divided by every TP degree up to 8 but 5 and 7
            hidden_size=48,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            max_position_embeddings=128,
            attention_bias=self.family == "llama",
            tie_word_embeddings=self.family == "qwen2",
            sliding_window=None,
        )
        torch.manual_seed(self.heads * 16 + self.kv_heads)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    p.normal_(1.0 if "norm" in name else 0.0, 0.3)
                else:
                    p.normal_(0.0, 0.25)  # peaked attention, so that a wrong merge is seen
        return model


@dataclass(frozen=True)
class Expected:
    """Per prompt: its tokens with 12 greedy ones after them, and all their logits."""

    tokens: list[Tensor]
    logits: list[Tensor]


@lru_cache(maxsize=1)
def build_cached(tiny: Tiny) -> PreTrainedModel:
    return tiny.build()


@lru_cache(maxsize=4)
def expect(tiny: Tiny) -> Expected:
    """By transformers' own model in one process, every prompt alone, in float64."""
    model = tiny.build().double()
    generator = torch.Generator().manual_seed(5)
    tokens, logits = [], []
    with torch.no_grad():
        for length in PROMPTS:
            ids = torch.randint(1, 96, (1, length), generator=generator)
            for _ in range(STEPS):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
            tokens.append(ids[0])
            logits.append(model(ids).logits[0])
    return Expected(tokens, logits)


@dataclass(frozen=True)
class Layout:
    """One way to run: degrees, cache and options."""

    tp: int
    dcp: int
    pcp: int
    interleave_size: int = 16
    block_size: int = 16
    combine: str = "a2a"
    q_proj: str = "gather"

    @property
    def topology(self) -> Topology:
        return Topology(tp=self.tp, dcp=self.dcp, pcp=self.pcp)

    @property
    def ranks(self) -> int:
        return self.tp * self.pcp

    def parallelize(self, model: PreTrainedModel, **options: Any) -> Any:
        return parallelize(
            model,
            CPMesh(self.topology),
            cache=CacheConfig(
                self.block_size, self.interleave_size, options.pop("num_blocks", None)
            ),
            combine=self.combine,  # type: ignore[arg-type]
            q_proj=self.q_proj,  # type: ignore[arg-type]
            **options,
        )


def degrees(heads: int, kv_heads: int, q_proj: str, most: int = 8) -> list[tuple[int, int, int]]:
    """Every valid (tp, dcp, pcp) on up to ``most`` ranks."""
    found = []
    for tp in range(1, most + 1):
        for pcp in range(1, most // tp + 1):
            for dcp in range(1, tp * pcp + 1):
                topology = Topology(tp=tp, dcp=dcp, pcp=pcp)
                try:
                    validate(
                        topology,
                        num_heads=heads,
                        num_kv_heads=kv_heads,
                        block_size=1,
                        interleave_size=1,
                        replicate_q=q_proj == "tpa",
                    )
                except ConfigError:
                    continue
                found.append((tp, dcp, pcp))
    return found


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts as one left-padded batch [B, S] and its attention mask."""
    width = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max())


def compare(tiny: Tiny, layouts: list[Layout], expected: Expected) -> list[tuple[float, int]]:
    """For each layout the largest relative error of any logits, and how many greedy tokens differ.

    All prompts run as one left-padded batch: prefill, then 12 decode steps fed with the expected
    tokens.
    """
    return [_compare_one(tiny, layout, expected) for layout in layouts]


def _compare_one(tiny: Tiny, layout: Layout, expected: Expected) -> tuple[float, int]:
    model = layout.parallelize(tiny.build())
    prompts = [t[:-STEPS] for t in expected.tokens]
    ids, mask = left_padded(prompts)
    errors, wrong = [], 0
    out = model(ids, attention_mask=mask)
    for row, (prompt, logits) in enumerate(zip(prompts, expected.logits, strict=True)):
        errors.append(relative_error(out.logits[row, -len(prompt) :], logits[: len(prompt)]))
    for step in range(STEPS):
        at = [len(p) + step for p in prompts]
        new = torch.stack([t[i] for t, i in zip(expected.tokens, at, strict=True)])
        wrong += int((out.logits[:, -1].argmax(-1) != new).sum())
        mask = torch.cat([mask, torch.ones(len(at), 1, dtype=torch.long)], dim=1)
        out = model(new[:, None], attention_mask=mask, cache=out.cache)
        wanted = torch.stack([x[i] for x, i in zip(expected.logits, at, strict=True)])
        errors.append(relative_error(out.logits[:, -1], wanted))
    return max(errors), wrong

"""A tiny layer with the heads of a model, run through a few steps: on a layout, or in one process.

Sizes that do not matter for a layout (widths of heads and of the model) are small; the numbers of
heads, degrees, block and interleave are the user's. Weights and tokens come from a seed, so that
all ranks and the process that they are compared with have the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cplayers import (
    CPMesh,
    DCPGQAAttention,
    DCPMLAAttention,
    InterleavedLayout,
    PagedKVCache,
    PCPPrefillAttention,
    Topology,
)
from cplayers.attention import gather_rows, take_rows

HIDDEN, HEAD_DIM = 16, 8
Q_RANK, LATENT, NOPE, ROPE, VALUE = 12, 10, 6, 4, 5
DTYPE = torch.float64
PEAK = 4.0
"""Factor of the queries: with flat attention a wrong merge could hide."""

Requests = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Trial:
    """What is run.

    Attributes:
        topology: The ranks.
        num_heads: Query heads.
        num_kv_heads: KV heads, ``None`` for latent attention.
        windows: One layer each: its sliding window, or ``None``.
        q_proj: ``"gather"`` or ``"tpa"``.
        combine: How partial results are combined.
        prefill: Strategy of prompts.
        block: Tokens in a block.
        interleave: Tokens before the next rank has its turn.
        tokens: Of the longest prompt.
        seed: Of weights and tokens.
    """

    topology: Topology
    num_heads: int
    num_kv_heads: int | None
    windows: tuple[int | None, ...]
    q_proj: str
    combine: str
    prefill: str
    block: int
    interleave: int
    tokens: int
    seed: int

    @property
    def steps(self) -> tuple[tuple[str, Requests], ...]:
        """What happens, and the new tokens of each request."""
        return (
            ("three prompts", (("a", self.tokens), ("b", 5), ("c", 1))),
            ("decode", (("a", 1), ("b", 1), ("c", 1))),
            ("drafts of several tokens", (("a", 3), ("b", 2))),
            ("a chunk of a prompt, and decode", (("a", self.tokens), ("c", 1))),
            ("decode", (("a", 1), ("b", 1), ("c", 1))),
        )


class Step(NamedTuple):
    """What came of a step.

    Attributes:
        out: Packed rows of all layers, `[layers, tokens, hidden]`.
        sent: Bytes that this rank sent.
    """

    out: Tensor
    sent: int


def run(trial: Trial) -> list[Step]:
    """Run the steps on the ranks of ``trial.topology``; called on each of them.

    Args:
        trial: What is run.
    """
    mesh = CPMesh(trial.topology)
    layers = [_layer(trial, mesh, index) for index in range(len(trial.windows))]
    layout = InterleavedLayout(mesh.size("dcp"), trial.interleave, trial.block)
    total = sum(new for _, requests in trial.steps for _, new in requests)
    cache = PagedKVCache(
        layers[0].cache_spec,
        layout,
        len(layers),
        layout.blocks(total) + 3,
        mesh.rank("dcp"),
        DTYPE,
        pcp_rank=mesh.rank("pcp"),
        pcp_size=mesh.size("pcp"),
    )
    done = []
    for name in "abc":
        cache.add(name)
    for number, (_, requests) in enumerate(trial.steps):
        plan = cache.plan(requests)
        x = _draw(trial, 100 + number, plan.num_tokens, HIDDEN)
        angles = _angles(plan.positions, HEAD_DIM if trial.num_kv_heads else ROPE)
        with torch.no_grad(), mesh.guard(), mesh.traffic.capture() as log:
            rows = [layer(take_rows(x, plan), angles, cache, plan) for layer in layers]
            cache.commit(plan)
            sent = log.bytes()
            out = torch.stack([gather_rows(row, plan, mesh) for row in rows])
        done.append(Step(out, sent))
    return done


def _layer(trial: Trial, mesh: CPMesh, index: int) -> DCPGQAAttention | DCPMLAAttention:
    def linear(number: int, in_features: int, out_features: int, gain: float = 1.0) -> nn.Linear:
        made = nn.Linear(in_features, out_features, bias=False, dtype=DTYPE)
        weight = _draw(trial, 10 * index + number, out_features, in_features)
        made.weight.data = weight * gain * in_features**-0.5
        return made

    heads, common = trial.num_heads, _common(trial, mesh, index)
    if trial.num_kv_heads is None:
        norms = [nn.RMSNorm(dim, eps=1e-6, dtype=DTYPE) for dim in (Q_RANK, LATENT)]
        return DCPMLAAttention.from_full(
            q_a_proj=linear(1, HIDDEN, Q_RANK),
            q_a_layernorm=norms[0],
            q_b_proj=linear(2, Q_RANK, heads * (NOPE + ROPE), PEAK),
            kv_a_proj_with_mqa=linear(3, HIDDEN, LATENT + ROPE),
            kv_a_layernorm=norms[1],
            kv_b_proj=linear(4, LATENT, heads * (NOPE + VALUE)),
            o_proj=linear(5, heads * VALUE, HIDDEN),
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            decode="replicate_q" if trial.q_proj == "tpa" else "auto",
            **common,
        )
    kv = trial.num_kv_heads * HEAD_DIM
    return DCPGQAAttention.from_full(
        q_proj=linear(1, HIDDEN, heads * HEAD_DIM, PEAK),
        k_proj=linear(2, HIDDEN, kv),
        v_proj=linear(3, HIDDEN, kv),
        o_proj=linear(4, heads * HEAD_DIM, HIDDEN),
        head_dim=HEAD_DIM,
        mode="tpa" if trial.q_proj == "tpa" else "gather",
        window=trial.windows[index],
        **common,
    )


def _common(trial: Trial, mesh: CPMesh, index: int) -> dict[str, Any]:
    # a small workspace, so that gathered keys come in several pieces
    prefill = PCPPrefillAttention(trial.prefill, workspace_tokens=16, mesh=mesh)
    return {"layer_idx": index, "combine": trial.combine, "prefill": prefill, "mesh": mesh}


def _draw(trial: Trial, number: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * trial.seed + number)
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


def _angles(positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    rates = 100.0 ** -(torch.arange(0, dim, 2, dtype=DTYPE) / dim)
    angles = (positions[:, None] * rates).repeat(1, 2)
    return angles.cos(), angles.sin()

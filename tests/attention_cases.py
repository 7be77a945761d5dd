"""Attention layers under test: what runs on the ranks, and a dense reference that shares no code.

A case is a ``Setup`` (a layer and how it is spread) and a script, a sequence of operations on one
cache:

    ("step", (("a", 5), ("b", 1)))   new tokens per sequence; a new name starts a sequence
    ("fork", "a", "c")   ("truncate", "a", 3)   ("free", "a")   ("forget", "a", 3)

Everything is drawn from seeds, so that the ranks and the parent have the same weights and tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cplayers.attention import DCPGQAAttention, PCPPrefillAttention, gather_rows, take_rows
from cplayers.cache import InterleavedLayout, PagedKVCache, StepPlan
from cplayers.mesh import CPMesh, Topology

Script = tuple[tuple[Any, ...], ...]
QK_NORM_EPS = 1e-6
NUM_LAYERS = 2
NUM_BLOCKS = 400


@dataclass(frozen=True)
class Setup:
    """A layer, its ranks and its cache."""

    topology: Topology = field(default_factory=Topology)
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 6
    hidden: int = 10
    q_proj: str = "gather"
    combine: str = "a2a"
    overlap: bool = False
    interleave: int = 1
    block: int = 4
    bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    prefill: str = "auto"
    workspace_tokens: int = 16384
    max_decode_tokens: int = 16
    num_blocks: int = NUM_BLOCKS
    layer_idx: int = 0
    seed: int = 0
    dtype: torch.dtype = torch.float32


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(setup: Setup) -> dict[str, Tensor]:
    """Unsharded weights in fp64, representable in fp32; logits have a deviation of about 4."""
    s, rows = 100 * setup.seed, setup.num_heads * setup.head_dim
    kv_rows, hidden = setup.num_kv_heads * setup.head_dim, setup.hidden
    w = {
        "q.weight": _normal(s + 1, rows, hidden) * 4 * hidden**-0.5,
        "k.weight": _normal(s + 2, kv_rows, hidden) * hidden**-0.5,
        "v.weight": _normal(s + 3, kv_rows, hidden) * hidden**-0.5,
        "o.weight": _normal(s + 4, hidden, rows) * rows**-0.5,
    }
    if setup.bias:
        w["q.bias"] = _normal(s + 5, rows)
        w["k.bias"], w["v.bias"] = _normal(s + 6, kv_rows), _normal(s + 7, kv_rows)
    if setup.o_bias:
        w["o.bias"] = _normal(s + 8, hidden)
    if setup.qk_norm:
        w["q_norm.weight"] = 4 * (1 + 0.3 * _normal(s + 9, setup.head_dim))
        w["k_norm.weight"] = 1 + 0.3 * _normal(s + 10, setup.head_dim)
    if setup.sinks:
        w["sinks"] = 3 * _normal(s + 11, setup.num_heads)
    return {name: value.float().double() for name, value in w.items()}


def new_tokens(setup: Setup, step: int, count: int) -> Tensor:
    """Hidden states of the packed tokens of a step, fp64, representable in fp32."""
    return _normal(7919 * setup.seed + 31 * step + 17, count, setup.hidden).float().double()


def rope_tables(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin `[T, H]`, fp64."""
    rates = 100.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = positions.double()[:, None] * torch.cat([rates, rates])
    return angles.cos(), angles.sin()


# The reference: one process, fp64, every sequence recomputed whole.


class Dense:
    """Plain causal attention layer that remembers the hidden states of every sequence."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.w = setup, weights(setup)
        self.seen: dict[str, Tensor] = {}
        self.steps = 0

    def run(self, script: Script) -> list[Tensor]:
        """The packed output of each step."""
        outputs = []
        for name, *args in script:
            if name == "step":
                outputs.append(self._step(*args))
            elif name == "fork":
                self.seen[args[1]] = self.seen[args[0]]
            elif name == "truncate":
                self.seen[args[0]] = self.seen[args[0]][: args[1]]
            elif name == "forget":  # what no window reaches: nothing changes
                pass
            else:
                del self.seen[args[0]]
        return outputs

    def _step(self, requests: tuple[tuple[str, int], ...]) -> Tensor:
        x = new_tokens(self.setup, self.steps, sum(new for _, new in requests))
        self.steps += 1
        outs = [x[:0]]
        for (seq, new), rows in zip(requests, x.split([n for _, n in requests]), strict=True):
            self.seen[seq] = torch.cat([self.seen.get(seq, x[:0]), rows])
            outs.append(self._attend(self.seen[seq])[len(self.seen[seq]) - new :])
        return torch.cat(outs)

    def _attend(self, x: Tensor) -> Tensor:
        s, length = self.setup, len(x)
        q, k = self._project(x, "q"), self._project(x, "k")
        v = x @ self.w["v.weight"].T + self.w.get("v.bias", 0.0)
        v = v.unflatten(-1, (s.num_kv_heads, s.head_dim))
        repeat = s.num_heads // s.num_kv_heads
        k = torch.stack([k[:, n // repeat] for n in range(s.num_heads)], 1)
        v = torch.stack([v[:, n // repeat] for n in range(s.num_heads)], 1)
        logits = torch.einsum("qnh,knh->nqk", q, k) / math.sqrt(s.head_dim)
        if s.softcap is not None:
            logits = s.softcap * torch.tanh(logits / s.softcap)
        positions = torch.arange(length)
        behind = positions[:, None] - positions[None, :]
        hidden = behind < 0 if s.window is None else (behind < 0) | (behind >= s.window)
        logits = logits.masked_fill(hidden, -math.inf)
        if s.sinks:  # a key without a value
            sinks = self.w["sinks"][:, None, None].expand(-1, length, 1)
            logits = torch.cat([logits, sinks], dim=-1)
            v = torch.cat([v, torch.zeros_like(v[:1])])
        out = torch.einsum("nqk,knh->qnh", logits.softmax(-1), v).flatten(1)
        return out @ self.w["o.weight"].T + self.w.get("o.bias", 0.0)

    def _project(self, x: Tensor, which: str) -> Tensor:
        y = x @ self.w[f"{which}.weight"].T + self.w.get(f"{which}.bias", 0.0)
        y = y.unflatten(-1, (y.shape[-1] // self.setup.head_dim, self.setup.head_dim))
        if self.setup.qk_norm:
            rms = (y.square().mean(-1, keepdim=True) + QK_NORM_EPS).sqrt()
            y = y / rms * self.w[f"{which}_norm.weight"]
        cos, sin = rope_tables(torch.arange(len(x)), self.setup.head_dim)
        first, second = y.chunk(2, -1)
        rotated = torch.cat([-second, first], -1)
        return y * cos[:, None] + rotated * sin[:, None]


def check_close(got: Tensor, exact: Tensor, largest: Tensor | None = None) -> None:
    """Finite, and within 1e-5 of the largest exact value (or of ``largest``)."""
    assert got.shape == exact.shape
    if exact.numel():
        largest = exact.abs().max() if largest is None else largest
        error = (got.double() - exact).abs().max()
        assert error <= 1e-5 * largest, f"error {error:.2e} at values up to {largest:.2e}"


# On the ranks.


@dataclass
class Live:
    """This rank's layer and cache, and the steps that they have run."""

    setup: Setup
    mesh: CPMesh
    layer: DCPGQAAttention
    cache: PagedKVCache
    steps: int = 0

    def inputs(self, plan: StepPlan) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Hidden states and position embeddings of this rank's rows."""
        dtype = self.setup.dtype
        x = take_rows(new_tokens(self.setup, self.steps, plan.num_tokens), plan)
        cos, sin = rope_tables(plan.positions, self.setup.head_dim)
        return x.to(dtype), (cos.to(dtype), sin.to(dtype))

    def forward(self, plan: StepPlan) -> Tensor:
        """This rank's rows of the step, not committed."""
        with torch.no_grad():
            return self.layer(*self.inputs(plan), self.cache, plan)

    def plan(self, requests: tuple[tuple[str, int], ...]) -> StepPlan:
        """Plan a step; unknown sequences are started."""
        for seq, _ in requests:
            if seq not in self.cache.seqs:
                self.cache.add(seq)
        return self.cache.plan(requests, max_decode_tokens=self.setup.max_decode_tokens)

    def step(self, requests: tuple[tuple[str, int], ...]) -> tuple[Tensor, Tensor]:
        """All packed rows of a whole step, and those decode rows that this rank computed itself."""
        plan = self.plan(requests)
        rows = self.forward(plan)
        self.cache.commit(plan)
        self.steps += 1
        return gather_rows(rows, plan, self.mesh), rows[: plan.num_decode]


def build_layer(setup: Setup, mesh: CPMesh) -> DCPGQAAttention:
    """The layer through ``from_full``."""
    w = {name: value.to(setup.dtype) for name, value in weights(setup).items()}

    def linear(name: str) -> nn.Linear:
        out_features, in_features = w[f"{name}.weight"].shape
        module = nn.Linear(in_features, out_features, bias=f"{name}.bias" in w, dtype=setup.dtype)
        module.load_state_dict(
            {key.removeprefix(f"{name}."): w[key] for key in w if key.startswith(f"{name}.")}
        )
        return module

    def norm(name: str) -> nn.RMSNorm | None:
        if not setup.qk_norm:
            return None
        module = nn.RMSNorm(setup.head_dim, eps=QK_NORM_EPS, dtype=setup.dtype)
        module.load_state_dict({"weight": w[f"{name}.weight"]})
        return module

    return DCPGQAAttention.from_full(
        q_proj=linear("q"),
        k_proj=linear("k"),
        v_proj=linear("v"),
        o_proj=linear("o"),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        head_dim=setup.head_dim,
        mode=setup.q_proj,
        combine=setup.combine,
        overlap=setup.overlap,
        window=setup.window,
        softcap=setup.softcap,
        sinks=nn.Parameter(w["sinks"]) if setup.sinks else None,
        prefill=PCPPrefillAttention(
            setup.prefill, workspace_tokens=setup.workspace_tokens, mesh=mesh
        ),
        layer_idx=setup.layer_idx,
        mesh=mesh,
    )


def build(setup: Setup) -> Live:
    """Layer and cache of this rank."""
    mesh = CPMesh(setup.topology)
    layer = build_layer(setup, mesh)
    layout = InterleavedLayout(setup.topology.dcp, setup.interleave, setup.block)
    cache = PagedKVCache(
        layer.cache_spec,
        layout,
        NUM_LAYERS,
        setup.num_blocks,
        mesh.rank("dcp"),
        setup.dtype,
        pcp_rank=mesh.rank("pcp"),
        pcp_size=mesh.size("pcp"),
    )
    return Live(setup, mesh, layer, cache)


def run_script(setup: Setup, script: Script) -> list[tuple[Tensor, Tensor]]:
    """`Live.step` of each step of the script."""
    live = build(setup)
    results = []
    for name, *args in script:
        if name == "step":
            results.append(live.step(*args))
        else:
            getattr(live.cache, name)(*args)
    return results


def check_script(ranks: Any, setup: Setup, script: Script) -> list[Tensor]:
    """Run a script on the ranks and against the reference; returns the outputs of its steps."""
    answers = ranks(9).run(run_script, setup, script, n=setup.topology.world_size)
    exact = Dense(setup).run(script)
    first = [out for out, _ in answers[0]]
    for outputs in answers:
        assert len(outputs) == len(exact)
        for (out, decode), (same_out, same_decode) in zip(outputs, answers[0], strict=True):
            assert out.equal(same_out)
            # Every PCP rank computes these; beside prompts of unequal shares, to rounding only.
            if len(decode):
                check_close(decode, same_decode.double(), same_out.abs().max())
    for got, want in zip(first, exact, strict=True):
        check_close(got, want)
    return first

"""Latent attention under test: what runs on the ranks, and a dense reference that shares no code.

The scripts are those of `attention_cases`: steps, forks, cuts and sequences that leave. A step
decodes the requests with cached context and at most ``max_decode_tokens`` new tokens; all others
are prompts or chunks of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

import attention_cases as plain
import torch
from attention_cases import Script, check_close
from torch import Tensor, nn

from cplayers.attention import DCPMLAAttention, PCPPrefillAttention, take_rows
from cplayers.cache import InterleavedLayout, PagedKVCache, StepPlan
from cplayers.mesh import CPMesh, Topology

EPS = 1e-6
PREFILLS = ("auto", "gather_q", "gather_kv", "ring")
DECODES = ("gather_q", "replicate_q", "gather_kv", "auto")
COMBINES = ("a2a", "ag_rs", "ar")


@dataclass(frozen=True)
class Setup:
    """A layer, its ranks and its cache."""

    topology: Topology = field(default_factory=Topology)
    num_heads: int = 3
    q_lora_rank: int | None = None
    kv_lora_rank: int = 6
    nope_dim: int = 5
    rope_dim: int = 4
    value_dim: int = 3
    hidden: int = 11
    decode: str = "gather_q"
    combine: str = "a2a"
    overlap: bool = False
    interleave: int = 1
    block: int = 4
    num_blocks: int = 400
    prefill: str = "auto"
    workspace_tokens: int = 16384
    max_decode_tokens: int = 16
    rope_interleave: bool = True
    bias: bool = False
    softcap: float | None = None
    yarn: tuple[float, float] | None = None  # factor, mscale_all_dim
    layer_idx: int = 0
    seed: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def model(self) -> Setup:
        """The same layer, spread over nothing: all that the reference depends on."""
        default = Setup()
        names = (
            *("topology", "decode", "combine", "overlap", "interleave", "block", "num_blocks"),
            *("prefill", "workspace_tokens", "max_decode_tokens", "layer_idx", "dtype"),
        )
        return replace(self, **{name: getattr(default, name) for name in names})


def weights(setup: Setup) -> dict[str, Tensor]:
    """Unsharded weights in fp64, representable in fp32; logits have a deviation of about 4."""
    hidden, latent, rope, heads = setup.hidden, setup.kv_lora_rank, setup.rope_dim, setup.num_heads
    q_rows, kv_rows = heads * (setup.nope_dim + rope), heads * (setup.nope_dim + setup.value_dim)
    shapes: dict[str, tuple[int, int]] = {
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_b_proj": (kv_rows, latent),
        "o_proj": (hidden, heads * setup.value_dim),
    }
    norms = {"kv_a_layernorm": latent}
    if setup.q_lora_rank is None:
        shapes["q_proj"] = (q_rows, hidden)
    else:
        shapes |= {"q_a_proj": (setup.q_lora_rank, hidden), "q_b_proj": (q_rows, setup.q_lora_rank)}
        norms["q_a_layernorm"] = setup.q_lora_rank
    seed, w = 100 * setup.seed, {}
    for i, (name, (rows, columns)) in enumerate(sorted(shapes.items())):
        peak = 4 if name in ("q_proj", "q_b_proj") else 1
        w[f"{name}.weight"] = plain._normal(seed + 20 + i, rows, columns) * peak * columns**-0.5
        if setup.bias and name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            w[f"{name}.bias"] = plain._normal(seed + 40 + i, rows)
    for i, (name, size) in enumerate(sorted(norms.items())):
        w[f"{name}.weight"] = 1 + 0.3 * plain._normal(seed + 60 + i, size)
    return {name: value.float().double() for name, value in w.items()}


# The reference: one process, fp64, every head's keys and values expanded, sequences recomputed.


class Dense(plain.Dense):
    """Plain causal latent attention that remembers the hidden states of every sequence."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.w = setup, weights(setup)
        self.seen: dict[str, Tensor] = {}
        self.steps = 0

    def _attend(self, x: Tensor) -> Tensor:
        s, length = self.setup, len(x)
        q = self._queries(x).unflatten(-1, (s.num_heads, s.nope_dim + s.rope_dim))
        latent = self._linear(x, "kv_a_proj_with_mqa")
        normed = self._norm(latent[:, : s.kv_lora_rank], "kv_a_layernorm")
        heads = self._linear(normed, "kv_b_proj")
        heads = heads.unflatten(-1, (s.num_heads, s.nope_dim + s.value_dim))
        k_rope = self._rope(latent[:, None, s.kv_lora_rank :]).expand(-1, s.num_heads, -1)
        k = torch.cat([heads[..., : s.nope_dim], k_rope], -1)
        v = heads[..., s.nope_dim :]
        q = torch.cat([q[..., : s.nope_dim], self._rope(q[..., s.nope_dim :])], -1)
        scale = 1 / math.sqrt(s.nope_dim + s.rope_dim)
        if s.yarn is not None:  # arXiv:2309.00071, on queries and on keys
            scale *= (1 + 0.1 * s.yarn[1] * math.log(s.yarn[0])) ** 2
        positions = torch.arange(length)
        outs = [x.new_zeros(0, s.num_heads, s.value_dim)]
        for rows in positions.split(256):  # or the logits of a long context fill the memory
            logits = scale * torch.einsum("qnh,knh->nqk", q[rows], k)
            if s.softcap is not None:
                logits = s.softcap * torch.tanh(logits / s.softcap)
            logits = logits.masked_fill(positions[None, :] > rows[:, None], -math.inf)
            outs.append(torch.einsum("nqk,knv->qnv", logits.softmax(-1), v))
        return self._linear(torch.cat(outs).flatten(1), "o_proj")

    def _queries(self, x: Tensor) -> Tensor:
        if self.setup.q_lora_rank is None:
            return self._linear(x, "q_proj")
        return self._linear(self._norm(self._linear(x, "q_a_proj"), "q_a_layernorm"), "q_b_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.w[f"{name}.weight"]

    def _rope(self, x: Tensor) -> Tensor:
        """Turn the pairs of x `[S, N, R]`, row i being position i, as complex numbers."""
        angles = plain.rope_tables(torch.arange(len(x)), x.shape[-1])
        turn = torch.complex(*(t.chunk(2, -1)[0] for t in angles))[:, None]
        if self.setup.rope_interleave:
            return torch.view_as_real(torch.complex(x[..., 0::2], x[..., 1::2]) * turn).flatten(-2)
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)


@lru_cache(maxsize=64)
def _exact(model: Setup, script: Script) -> tuple[Tensor, ...]:
    return tuple(Dense(model).run(script))


def exact(setup: Setup, script: Script) -> tuple[Tensor, ...]:
    """The reference's packed output of each step."""
    return _exact(setup.model, script)


# On the ranks.


@dataclass
class Live(plain.Live):
    """This rank's layer and cache, and the steps that they have run."""

    setup: Setup
    layer: DCPMLAAttention

    def inputs(self, plan: StepPlan) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Hidden states and position embeddings of this rank's rows."""
        x = take_rows(plain.new_tokens(self.setup, self.steps, plan.num_tokens), plan)
        cos, sin = plain.rope_tables(plan.positions, self.setup.rope_dim)
        dtype = self.setup.dtype
        return x.to(dtype), (cos.to(dtype), sin.to(dtype))

    def plan(self, requests: tuple[tuple[str, int], ...]) -> StepPlan:
        """Plan a step; unknown sequences are started."""
        for seq, _ in requests:
            if seq not in self.cache.seqs:
                self.cache.add(seq)
        return self.cache.plan(requests, max_decode_tokens=self.setup.max_decode_tokens)


def modules(setup: Setup) -> dict[str, nn.Module]:
    """The plain layer's projections and norms, by name."""
    made: dict[str, nn.Module] = {}
    state: dict[str, dict[str, Tensor]] = {}
    for key, value in weights(setup).items():
        name, _, parameter = key.partition(".")
        state.setdefault(name, {})[parameter] = value.to(setup.dtype)
    for name, tensors in state.items():
        shape = tensors["weight"].shape
        if len(shape) == 1:
            made[name] = nn.RMSNorm(shape[0], eps=EPS, dtype=setup.dtype)
        else:
            bias = "bias" in tensors
            made[name] = nn.Linear(shape[1], shape[0], bias=bias, dtype=setup.dtype)
        made[name].load_state_dict(tensors)
    return made


def options(setup: Setup, mesh: CPMesh) -> dict[str, Any]:
    """Keyword arguments that the constructor and ``from_full`` share."""
    factor, mscale = setup.yarn or (1.0, 0.0)
    return {
        "layer_idx": setup.layer_idx,
        "decode": setup.decode,
        "combine": setup.combine,
        "overlap": setup.overlap,
        "prefill": PCPPrefillAttention(
            setup.prefill, workspace_tokens=setup.workspace_tokens, mesh=mesh
        ),
        "softcap": setup.softcap,
        "yarn_factor": factor,
        "yarn_mscale_all_dim": mscale,
        "rope_interleave": setup.rope_interleave,
        "mesh": mesh,
    }


def build_layer(setup: Setup, mesh: CPMesh) -> DCPMLAAttention:
    """The layer through ``from_full``."""
    return DCPMLAAttention.from_full(
        **modules(setup),
        qk_nope_head_dim=setup.nope_dim,
        qk_rope_head_dim=setup.rope_dim,
        **options(setup, mesh),
    )


def build(setup: Setup) -> Live:
    """Layer and cache of this rank."""
    mesh = CPMesh(setup.topology)
    layer = build_layer(setup, mesh)
    cache = PagedKVCache(
        layer.cache_spec,
        InterleavedLayout(setup.topology.dcp, setup.interleave, setup.block),
        plain.NUM_LAYERS,
        setup.num_blocks,
        mesh.rank("dcp"),
        setup.dtype,
        pcp_rank=mesh.rank("pcp"),
        pcp_size=mesh.size("pcp"),
    )
    return poisoned(Live(setup, mesh, layer, cache))


L = TypeVar("L", bound=plain.Live)


def poisoned(live: L) -> L:
    """With NaN in every slot, so that reading one that nobody has written is seen."""
    for layer in range(live.cache.num_layers):
        slots = live.cache.pool.num_blocks * live.cache.layout.block_size
        for plane in live.cache.view(layer, 0, slots):
            plane.fill_(math.nan)
    return live


def play(live: plain.Live, script: Script) -> list[tuple[Tensor, Tensor]]:
    """`Live.step` of each step of the script."""
    results = []
    for name, *args in script:
        if name == "step":
            results.append(live.step(*args))
        else:
            getattr(live.cache, name)(*args)
    return results


def run_scripts(setups: tuple[Setup, ...], script: Script) -> list[list[tuple[Tensor, Tensor]]]:
    """One script on several layers, one after another."""
    return [play(build(setup), script) for setup in setups]


def check_scripts(ranks: Any, setups: tuple[Setup, ...], script: Script) -> list[list[Tensor]]:
    """Run a script on layers over equally many ranks, and against the reference.

    Returns the outputs of the steps, by layer.
    """
    (size,) = {setup.topology.world_size for setup in setups}
    answers = ranks(8).run(run_scripts, setups, script, n=size)
    return [
        compare([answer[i] for answer in answers], exact(setup, script), setup)
        for i, setup in enumerate(setups)
    ]


def compare(
    answers: list[list[tuple[Tensor, Tensor]]], wanted: Sequence[Tensor], what: object
) -> list[Tensor]:
    """Check `Live.step` of each step, by rank, against the exact outputs; returns the outputs."""
    for results in answers:
        assert len(results) == len(wanted)
        for (out, decode), (same_out, same_decode) in zip(results, answers[0], strict=True):
            assert out.equal(same_out), f"ranks differ: {what}"
            # Every PCP rank computes these; beside prompts of unequal shares, to rounding only.
            if len(decode):
                check_close(decode, same_decode.double(), same_out.abs().max())
    for number, ((got, _), want) in enumerate(zip(answers[0], wanted, strict=True)):
        try:
            check_close(got, want)
        except AssertionError as error:
            raise AssertionError(f"step {number} of {what}: {error}") from None
    return [out for out, _ in answers[0]]


def check_script(ranks: Any, setup: Setup, script: Script) -> list[Tensor]:
    """`check_scripts` of one layer."""
    return check_scripts(ranks, (setup,), script)[0]


def step(*requests: tuple[Hashable, int]) -> tuple[str, tuple[tuple[Hashable, int], ...]]:
    """A step of a script."""
    return "step", requests


def prompts(*lengths: int) -> tuple[str, tuple[tuple[Hashable, int], ...]]:
    """A step of the sequences a, b, c, ..."""
    return step(*zip("abcdefghijklm", lengths, strict=False))

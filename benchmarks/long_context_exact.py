"""What `long_context.py` is given, drawn from seeds, and what its layer must answer.

Any rank can draw its own part of the context, and the reference draws it again chunk by chunk. The
reference is float64, in one process, and shares no code with the library: queries go into the
latent, and the softmax runs over chunks of keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cplayers import ConfigError

HIDDEN, Q_RANK, LATENT, ROPE, NOPE, VALUE = 2048, 512, 512, 64, 128, 128
WIDTH = LATENT + ROPE
SCALE = (NOPE + ROPE) ** -0.5
EPS = 1e-6
PEAK = 4.0
"""Deviation of the logits."""
GRAIN = 128
"""Cached tokens that one seed draws, so that any part of the context can be drawn alone."""
FILL, CHUNK = 65_536, 16_384
"""Tokens of a step of filling, and keys at a time in the reference: multiples of GRAIN."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """What is run; see the help texts in `long_context.parse`."""

    tokens: int = 1_024_000
    new: int = 1
    ranks: int = 16
    interleave: int = 128
    block: int = 128
    heads: int = 16
    dtype: str = "bfloat16"
    decode: tuple[str, ...] = ("gather_q", "replicate_q")
    combine: tuple[str, ...] = ("a2a", "ag_rs")
    steps: int = 5
    seed: int = 0
    fill: int = FILL
    progress: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "new", "interleave", "block", "heads", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}", "at least 1", "pass more")
        fitting = [n for n in range(2, self.heads + 1) if self.heads % n == 0]
        if self.ranks not in fitting:
            raise ConfigError(
                f"ranks={self.ranks}, heads={self.heads}",
                "every one of at least 2 ranks projects as many heads",
                f"take ranks from {fitting}, or other heads",
            )
        if self.fill < GRAIN or self.fill % GRAIN:
            raise ConfigError(
                f"fill={self.fill}", f"a multiple of {GRAIN}", f"pass {FILL} or the like"
            )

    @property
    def variants(self) -> list[tuple[str, str]]:
        """Ways of decoding and combining."""
        return [(decode, combine) for decode in self.decode for combine in self.combine]


# What is given: weights, the new tokens, the cached latents. Alike on all ranks.


@lru_cache(maxsize=1)  # every variant has the same, and a layer cuts copies
def weights(settings: Settings) -> dict[str, Tensor]:
    """The unsharded layer's, by transformers' names."""
    generator = torch.Generator().manual_seed(settings.seed)
    shapes = {
        "q_a_proj": (Q_RANK, HIDDEN),
        "q_b_proj": (settings.heads * (NOPE + ROPE), Q_RANK),
        "kv_a_proj_with_mqa": (WIDTH, HIDDEN),
        "kv_b_proj": (settings.heads * (NOPE + VALUE), LATENT),
        "o_proj": (HIDDEN, settings.heads * VALUE),
    }
    made = {n: torch.randn(s, generator=generator) * s[1] ** -0.5 for n, s in shapes.items()}
    made["q_b_proj"] *= PEAK
    for name, size in (("q_a_layernorm", Q_RANK), ("kv_a_layernorm", LATENT)):
        made[name] = 1 + 0.1 * torch.randn(size, generator=generator)
    return {name: weight.to(DTYPES[settings.dtype]) for name, weight in made.items()}


def inputs(settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states `[T, hidden]` of the new tokens, cos and sin `[T, R]` of their positions."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    x = torch.randn(settings.new, HIDDEN, generator=generator)
    positions = settings.tokens + torch.arange(settings.new, dtype=torch.float64)
    frequencies = 10_000.0 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
    angles = (positions[:, None] * frequencies).repeat(1, 2)
    dtype = DTYPES[settings.dtype]
    return x.to(dtype), angles.cos().to(dtype), angles.sin().to(dtype)


def grain(settings: Settings, index: int) -> Tensor:
    """Cached rows of the positions from ``index * GRAIN`` on, `[GRAIN, L + R]`."""
    generator = torch.Generator().manual_seed((settings.seed + 1) * 1_000_003 + index)
    return torch.randn(GRAIN, WIDTH, generator=generator).to(DTYPES[settings.dtype])


# The reference.


def cached_chunks(settings: Settings) -> Iterator[tuple[int, Tensor]]:
    """The cached rows in fp64, `[CHUNK, L + R]` at a time in one buffer, and their first position.

    One buffer, because fresh pages cost more than the arithmetic.
    """
    buffer = torch.empty(CHUNK, WIDTH, dtype=torch.float64)
    for first in range(0, settings.tokens, CHUNK):
        rows = buffer[: settings.tokens - first]
        for part, index in zip(rows.split(GRAIN), itertools.count(first // GRAIN)):
            part.copy_(grain(settings, index)[: len(part)])
        yield first, rows


class Answer(NamedTuple):
    """What attention gives, `[T, N * V]`, and the layer's output after o_proj, `[T, hidden]`."""

    attention: Tensor
    layer: Tensor


def exact(settings: Settings) -> tuple[Answer, Answer]:
    """The answer, and what it would be if the ranks' results were merged with equal weights."""
    w = {name: weight.double() for name, weight in weights(settings).items()}
    x, cos, sin = (t.double() for t in inputs(settings))
    turn = torch.complex(cos, sin)[:, None, : ROPE // 2]

    def norm(t: Tensor, name: str) -> Tensor:
        return t / (t.square().mean(-1, keepdim=True) + EPS).sqrt() * w[name]

    def rotate(t: Tensor) -> Tensor:
        pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn).flatten(-2)

    stored = x @ w["kv_a_proj_with_mqa"].T
    latent, rope = norm(stored[:, :LATENT], "kv_a_layernorm"), rotate(stored[:, None, LATENT:])
    new = torch.cat([latent, rope[:, 0]], -1)
    q = norm(x @ w["q_a_proj"].T, "q_a_layernorm") @ w["q_b_proj"].T
    q = q.unflatten(-1, (settings.heads, NOPE + ROPE))
    up = w["kv_b_proj"].unflatten(0, (settings.heads, NOPE + VALUE))
    inside = torch.einsum("tnp,npl->tnl", q[..., :NOPE], up[:, :NOPE])
    q = SCALE * torch.cat([inside, rotate(q[..., NOPE:].contiguous())], -1)

    # Of every rank's keys apart: largest logit, denominator, weighted sum.
    top = torch.full((settings.ranks, settings.new, settings.heads), -1e300, dtype=torch.float64)
    total, out = torch.zeros_like(top), top.new_zeros(*top.shape, LATENT)
    last = settings.tokens + torch.arange(settings.new)
    buffer = new.new_empty(CHUNK, WIDTH)
    for first, rows in itertools.chain(cached_chunks(settings), [(settings.tokens, new)]):
        positions = first + torch.arange(len(rows))
        owner, order = (positions // settings.interleave % settings.ranks).sort(stable=True)
        keys = torch.index_select(rows, 0, order, out=buffer[: len(rows)])
        logits = (keys @ q.flatten(0, 1).T).T.unflatten(0, q.shape[:2])
        logits = logits.masked_fill(positions[order] > last[:, None, None], -torch.inf)
        counts = owner.bincount(minlength=settings.ranks).tolist()
        shards = zip(logits.split(counts, -1), keys[:, :LATENT].split(counts), strict=True)
        for rank, (part, latents) in enumerate(shards):
            if len(latents):
                before = top[rank].clone()
                top[rank] = torch.maximum(before, part.amax(-1))
                shrink, weight = (before - top[rank]).exp(), (part - top[rank].unsqueeze(-1)).exp()
                total[rank] = total[rank] * shrink + weight.sum(-1)
                out[rank] = out[rank] * shrink.unsqueeze(-1) + weight @ latents
    shares = (top + total.log()).softmax(0)
    outs = (out / total.unsqueeze(-1)).nan_to_num()

    def finish(shares: Tensor) -> Answer:
        merged = torch.einsum("rtn,rtnl->tnl", shares, outs)
        attention = torch.einsum("tnl,nvl->tnv", merged, up[:, NOPE:]).flatten(1)
        return Answer(attention, attention @ w["o_proj"].T)

    return finish(shares), finish(torch.full_like(shares, 1 / settings.ranks))

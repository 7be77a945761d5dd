"""Strategy ``gather_kv``: keys travel to the queries, and every rank finishes its own.

What travels is what the cache stores per token, the *planes*: keys and values, or the one latent of
MLA. ``expand`` turns them into the keys and values that the queries read.

    new tokens       all-gather over PCP, every rank's rows padded to the longest     1 collective
                     for each rank's shard:  attend(q, expand(shard), its spans)   -> Partial
    cached context   for each piece of bounded size:                                  1 collective
                         all-gather the ranks' rows of it over DCP
                         put them in position order, which drops the padding
                         attend(q, expand(keys), their spans)                      -> Partial

Partials merge in any order. New shards are attended to where they arrive: a zigzag shard is in
increasing position, so a causal query sees a prefix of it.

N DCP ranks, p PCP ranks, W elements of all planes per token (2*K*H, or L + R), e bytes each:

| axis | operation  | sent per rank, bytes                                                    |
|------|------------|-------------------------------------------------------------------------|
| pcp  | all_gather | (p - 1) * width * W * e, width the largest share of the new tokens      |
| dcp  | all_gather | per piece (N - 1) * width * W * e; the widths of all pieces sum to the  |
|      |            | first rank's share of the context, the largest                          |

For a context of C tokens that is (N - 1)/N * C * W * e, and less than (N - 1) * I * W * e on top
for the padding of each request, I the interleave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cplayers.cache import PagedKVCache, StepPlan
from cplayers.cache.context import Context, Piece
from cplayers.cache.plan import Prefill
from cplayers.mesh import CPMesh
from cplayers.ops import Partial, attend

Planes = Sequence[Tensor]
Expand = Callable[[Planes], tuple[Tensor, Tensor]]


class CachedLayer(NamedTuple):
    """One layer of a cache during a step.

    Attributes:
        cache: This rank's cache.
        plan: The step.
        layer: Layer index in the cache.
    """

    cache: PagedKVCache
    plan: StepPlan
    layer: int


class Logits(NamedTuple):
    """How logits are made, and by which backend.

    Attributes:
        scale: Factor on the logits.
        softcap: Soft cap on them, or ``None``.
        backend: See `cplayers.ops.attend`.
    """

    scale: float
    softcap: float | None = None
    backend: str = "auto"


def gather_new(planes: Planes, prefill: Prefill, mesh: CPMesh) -> list[Planes]:
    """Every PCP rank's new rows in one all-gather: per rank one `[width, heads, dim]` a plane.

    Args:
        planes: This rank's rows, `[T, heads, dim]` each.
        prefill: ``plan.prefill``.
        mesh: The ranks.
    """
    if mesh.size("pcp") == 1:
        return [planes]
    payload = planes[0].new_zeros(prefill.width * _elements(planes))
    for target, plane in zip(_split(payload, planes, prefill.width), planes, strict=True):
        target[: len(plane)] = plane
    return [_split(piece, planes, prefill.width) for piece in mesh.all_gather(payload, "pcp")]


def attend_new(
    q: Tensor, shards: Sequence[Planes], prefill: Prefill, expand: Expand, logits: Logits
) -> Iterator[Partial]:
    """Attention of this rank's prefill rows to the new tokens, one partial per PCP rank seen.

    Args:
        q: Own queries `[T, N, H]`.
        shards: From `gather_new`.
        prefill: ``plan.prefill``.
        expand: Planes to keys `[S, K, H]` and values `[S, K, V]`.
        logits: How logits are made.
    """
    for planes, shard in zip(shards, prefill.shards, strict=True):
        if shard.tiles:
            keys, values = expand(planes)
            yield attend(q, keys, values, shard.lo, shard.hi, **logits._asdict(), tiles=shard.tiles)


def attend_context(
    q: Tensor,
    cached: CachedLayer,
    context: Context,
    expand: Expand,
    logits: Logits,
    mesh: CPMesh,
    workspace_tokens: int,
) -> Iterator[Partial]:
    """Attention to cached keys of all ranks, one partial per piece that is seen.

    Called on all ranks of the DCP group alike, rows or not: every piece is a collective.

    Args:
        q: Own queries `[T, N, H]` of the rows that ``context`` knows.
        cached: The layer, after the step's rows were written to it.
        context: ``plan.prefill.context`` or ``plan.decode_context``.
        expand: Planes to keys `[S, K, H]` and values `[S, K, V]`.
        logits: How logits are made.
        mesh: The ranks.
        workspace_tokens: Most rows of all ranks in a piece.
    """
    for piece in context.pieces(workspace_tokens):
        planes = _gather_piece(cached, piece, mesh)
        if piece.tiles:
            keys, values = expand(planes)
            yield attend(q, keys, values, piece.lo, piece.hi, **logits._asdict(), tiles=piece.tiles)


def _gather_piece(cached: CachedLayer, piece: Piece, mesh: CPMesh) -> Planes:
    """The keys of a piece in position order, `[S, heads, dim]` a plane."""
    cache, _, layer = cached
    alone = mesh.size("dcp") == 1
    if alone and len(piece.reads) == 1:
        slot, length, _ = piece.reads[0]
        return cache.view(layer, slot, length)
    like = cache.view(layer, 0, 0)
    rows = like[0].new_zeros(piece.width, _elements(like))
    targets = _columns(rows, like)
    for slot, length, row in piece.reads:
        for target, plane in zip(targets, cache.view(layer, slot, length), strict=True):
            target[row : row + length] = plane
    if alone:
        return targets
    return _columns(mesh.all_gather(rows, "dcp").flatten(0, 1)[piece.order], like)


def _elements(planes: Planes) -> int:
    """Elements of a token over all planes."""
    return sum(plane.shape[1] * plane.shape[2] for plane in planes)


def _columns(rows: Tensor, like: Planes) -> Planes:
    """Token-major rows `[S, elements]` as one `[S, heads, dim]` per plane."""
    parts = torch.split(rows, [plane.shape[1] * plane.shape[2] for plane in like], dim=1)
    return [part.view(-1, *plane.shape[1:]) for part, plane in zip(parts, like, strict=True)]


def _split(flat: Tensor, like: Planes, width: int) -> Planes:
    """Plane after plane, each head-major as in the cache, as one `[width, heads, dim]` a plane."""
    parts = torch.split(flat, [width * plane.shape[1] * plane.shape[2] for plane in like])
    return [
        part.view(plane.shape[1], width, plane.shape[2]).transpose(0, 1)
        for part, plane in zip(parts, like, strict=True)
    ]

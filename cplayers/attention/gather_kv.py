"""Strategy ``gather_kv``: keys travel to the queries, and every rank finishes its own.

What travels is what the cache stores per token (`cplayers.attention.planes`); ``expand`` turns it
into the keys and values that the queries read.

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

from collections.abc import Iterator

from torch import Tensor

from cplayers.attention.planes import (
    CachedLayer,
    Expand,
    Planes,
    blocks,
    columns,
    elements,
    head_major,
)
from cplayers.attention.scoring import Scoring
from cplayers.cache.context import Context, Piece
from cplayers.cache.prefill import Prefill
from cplayers.mesh import CPMesh
from cplayers.ops import Partial


def attend_new(
    q: Tensor,
    planes: Planes,
    prefill: Prefill,
    cached: CachedLayer | None,
    expand: Expand,
    scoring: Scoring,
    mesh: CPMesh,
) -> Iterator[Partial]:
    """Attention of this rank's prefill rows to the new tokens, one partial per PCP rank seen.

    Args:
        q: Own queries `[T, N, H]`.
        planes: New rows of this rank, `[T, heads, dim]` each.
        prefill: ``plan.prefill``.
        cached: The layer, to which the new tokens of all ranks are written first, or ``None``.
        expand: Planes to keys `[S, K, H]` and values `[S, K, V]`.
        scoring: How keys are scored.
        mesh: The ranks.
    """
    shards = [planes]
    if mesh.size("pcp") > 1:
        gathered = mesh.all_gather(head_major(planes, prefill.width), "pcp")
        shards = [blocks(piece, planes, prefill.width) for piece in gathered]
    if cached is not None:
        for rank, shard in enumerate(shards):
            write_shard(cached, rank, shard)
    for shard, seen in zip(shards, prefill.shards_of(scoring.window), strict=True):
        if seen.tiles:
            yield scoring.attend(q, *expand(shard), seen)


def attend_context(
    q: Tensor,
    cached: CachedLayer,
    context: Context,
    expand: Expand,
    scoring: Scoring,
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
        scoring: How keys are scored.
        mesh: The ranks.
        workspace_tokens: Most rows of all ranks in a piece.
    """
    for piece in context.pieces(workspace_tokens, scoring.window):
        planes = _gather_piece(cached, piece, mesh)
        partial = scoring.attend(q, *expand(planes), piece) if piece.tiles else None
        del planes  # before the next piece is gathered
        if partial is not None:
            yield partial


def write_shard(cached: CachedLayer, pcp_rank: int, planes: Planes) -> None:
    """Store what this rank owns of the new tokens of one PCP rank.

    Args:
        cached: The layer.
        pcp_rank: Whose tokens they are.
        planes: Their rows.
    """
    cache, plan, layer = cached
    cache.write(plan, layer, plan.prefill_writes[pcp_rank], *planes)


def own_rows(cached: CachedLayer, piece: Piece) -> Tensor:
    """This rank's rows of a piece, token-major and padded: `[width, elements]`.

    Args:
        cached: The layer.
        piece: Of the context.
    """
    cache, _, layer = cached
    like = cache.view(layer, 0, 0)
    rows = like[0].new_zeros(piece.width, elements(like))
    targets = columns(rows, like)
    for slot, length, row in piece.reads:
        for target, plane in zip(targets, cache.view(layer, slot, length), strict=True):
            target[row : row + length] = plane
    return rows


def _gather_piece(cached: CachedLayer, piece: Piece, mesh: CPMesh) -> Planes:
    """The keys of a piece in position order, `[S, heads, dim]` a plane."""
    alone = mesh.size("dcp") == 1
    if alone and len(piece.reads) == 1:
        slot, length, _ = piece.reads[0]
        return cached.cache.view(cached.layer, slot, length)
    rows = own_rows(cached, piece)
    if not alone:
        rows = mesh.all_gather(rows, "dcp").flatten(0, 1)[piece.order]
    return columns(rows, cached.cache.view(cached.layer, 0, 0))

"""Strategy ``ring``: keys go round the ranks, one hop at a time and behind compute.

    new tokens      this rank's rows; then p - 1 times: pass them on over PCP, and meanwhile attend
                    to them; every rank writes what it owns of those that come by
    cached context  for each piece: the same over DCP with this rank's rows of it

The bytes are those of ``gather_kv``, in p - 1 or N - 1 messages instead of one collective, and two
shards are held at a time instead of all. Partials merge in any order, so that it does not matter
with which shard a rank begins (Liu et al. 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from cplayers.attention.gather_kv import own_rows, write_shard
from cplayers.attention.planes import CachedLayer, Expand, Planes, blocks, columns, head_major
from cplayers.attention.scoring import Scoring
from cplayers.cache.context import Context
from cplayers.cache.prefill import Prefill
from cplayers.mesh import CPMesh, Ring
from cplayers.ops import Partial


def ring_new(
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
        cached: The layer, to which new tokens are written as they come by, or ``None``.
        expand: Planes to keys `[S, K, H]` and values `[S, K, V]`.
        scoring: How keys are scored.
        mesh: The ranks.
    """
    seen = prefill.shards_of(scoring.window)
    for rank, flat in _go_round(head_major(planes, prefill.width), mesh, "pcp"):
        shard = blocks(flat, planes, prefill.width)
        if cached is not None:
            write_shard(cached, rank, shard)
        partial = scoring.attend(q, *expand(shard), seen[rank]) if seen[rank].tiles else None
        del flat, shard  # before the next hop: two shards are held, here and under way
        if partial is not None:
            yield partial


def ring_context(
    q: Tensor,
    cached: CachedLayer,
    context: Context,
    expand: Expand,
    scoring: Scoring,
    mesh: CPMesh,
    workspace_tokens: int,
) -> Iterator[Partial]:
    """Attention to cached keys of all ranks, one partial per piece and DCP rank seen.

    Called on all ranks of the DCP group alike, rows or not.

    Args:
        q: Own queries `[T, N, H]` of the rows that ``context`` knows.
        cached: The layer, after the step's rows were written to it.
        context: ``plan.prefill.context``.
        expand: Planes to keys `[S, K, H]` and values `[S, K, V]`.
        scoring: How keys are scored.
        mesh: The ranks.
        workspace_tokens: Most rows of a piece that are held at a time, here and under way.
    """
    like = cached.cache.view(cached.layer, 0, 0)
    # two of N shards are held at a time, so a piece may have N / 2 times as many rows
    most = workspace_tokens * mesh.size("dcp") // 2
    for piece in context.pieces(most, scoring.window):
        for rank, rows in _go_round(own_rows(cached, piece), mesh, "dcp"):
            seen = piece.shards[rank]
            partial = scoring.attend(q, *expand(columns(rows, like)), seen) if seen.tiles else None
            del rows
            if partial is not None:
                yield partial


def _go_round(rows: Tensor, mesh: CPMesh, axis: str) -> Iterator[tuple[int, Tensor]]:
    """Each rank of the axis and its rows, own ones first; the next are under way meanwhile."""
    ring = Ring(mesh, axis)
    for hop in range(ring.hops):
        ring.send_recv(rows)
        ring.commit()
        yield ring.source(hop), rows
        (rows,) = ring.wait()
    yield ring.source(ring.hops), rows

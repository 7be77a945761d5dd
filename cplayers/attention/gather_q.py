"""Strategy ``gather_q``: queries travel to the keys, and the partial results are combined.

Every rank attends with the queries of the group's heads to the keys that it owns, in place.

    new keys       decode rows: every rank has them and writes its own
                   chunks under PCP: each to its owner                   all-to-all over PCP
    q_own          [T, n, H] --all-gather over the group's TP neighbours-->  [T, kn, H]
                   chunks under PCP: over the whole group, rows and heads    [F, kn, H]
    attend(q, keys in place, lo, hi), all requests at once or run by run        -> Partial
    combine over the group                                                      -> [T, n, V]

Members of a group that differ only in their PCP rank hold the same decode rows; of chunks each has
its own share. A query projection that is replicated in the group (TPA) gives kn heads at once: then
nothing is gathered for decode rows, and rows over PCP alone for chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from cplayers.attention.combine import Combine, start_combine
from cplayers.attention.planes import CachedLayer, Planes, columns, elements, token_major
from cplayers.attention.scoring import Scoring
from cplayers.cache import StepPlan
from cplayers.cache.prefill import Prefill
from cplayers.cache.reads import Read
from cplayers.mesh import CPMesh
from cplayers.ops import Partial, empty, merge


class Visit(NamedTuple):
    """How queries travel and results come back.

    Attributes:
        combine: How partial outputs are combined.
        replicated: Whether queries are those of the group's heads already (TPA).
        before: Applied to partial outputs `[T, kn, V]` before they are combined, or ``None``.
        halves: Whether decode rows are attended to in two parts, the results of the first being
            combined by ``"a2a"`` while the second is attended to (Helix, arXiv:2507.07120).
    """

    combine: Combine = "a2a"
    replicated: bool = False
    before: Callable[[Tensor], Tensor] | None = None
    halves: bool = False


def visit(
    q: Tensor,
    planes: Callable[[], Planes],
    cached: CachedLayer,
    scoring: Scoring,
    how: Visit,
    mesh: CPMesh,
    prefill: Prefill | None = None,
) -> Partial:
    """Write rows to the cache and attend to all keys that they see.

    Args:
        q: Queries of own rows `[T, n, H]`, or `[T, kn, H]` where they are replicated.
        planes: Gives what the cache stores of the rows; called once queries are on their way.
        cached: The layer.
        scoring: How keys are scored.
        how: How queries travel and results come back.
        mesh: The ranks.
        prefill: ``plan.prefill`` where the rows are its rows; ``None`` for decode rows.

    Returns:
        Own rows and heads: out `[T, n, V]`, lse `[T, n]`.
    """
    cache, plan, layer = cached
    queries = send_queries(q, mesh, prefill, replicated=how.replicated)
    if prefill is None:
        cache.write(plan, layer, plan.decode_writes, *planes())
    elif mesh.size("pcp") == 1:
        cache.write(plan, layer, plan.prefill_writes[0], *planes())
    else:
        arrived = _exchange(planes(), prefill, mesh)
        cache.write(plan, layer, prefill.exchange.writes, *arrived)
    q = queries()
    results = []
    for rows in _parts(plan, mesh, how) if prefill is None else (None,):
        out, lse = attend_cached(q, cached, scoring, prefill, rows)
        if how.before is not None:
            out = how.before(out)
        results.append(start_combine(Partial(out, lse), mesh, how.combine, prefill))
    parts = [result() for result in results]
    if len(parts) == 1:
        return parts[0]
    return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _parts(plan: StepPlan, mesh: CPMesh, how: Visit) -> tuple[slice | None, ...]:
    """Decode rows in two parts that take about as long, or ``None``, all of them.

    The same on all ranks of the group: it depends on lengths over all ranks alone.
    """
    if not how.halves or how.combine != "a2a" or mesh.size("dcp") == 1:
        return (None,)
    middle = plan.middle
    return (None,) if middle is None else (slice(middle), slice(middle, plan.num_decode))


def send_queries(
    q: Tensor, mesh: CPMesh, prefill: Prefill | None, *, replicated: bool = False
) -> Callable[[], Tensor]:
    """Queries of own rows and heads to those with which every rank of the group attends.

    They are on their way when this returns; the result waits for them.

    Args:
        q: `[T, n, H]`, or `[T, kn, H]` where they are replicated.
        mesh: The ranks.
        prefill: ``plan.prefill`` for its rows, ``None`` for decode rows.
        replicated: Whether q has the group's heads already.

    Returns:
        Gives `[T, kn, H]` for decode rows, all packed tokens `[F, kn, H]` for prefill.
    """
    if prefill is None or mesh.size("pcp") == 1:
        axis = "dcp" if mesh.size("pcp") == 1 else "dcp_tp"
        if replicated or mesh.size(axis) == 1:
            return lambda: q
        hop = mesh.start_all_gather(q, axis)
        return lambda: rearrange(hop.wait(), "k t n h -> t (k n) h")
    padded = q.new_zeros(prefill.width, *q.shape[1:])
    padded[: len(q)] = q
    hop = mesh.start_all_gather(padded, "pcp" if replicated else "dcp")
    # members are tp-major, pcp-minor (`Topology.groups`)
    p, place = mesh.size("pcp"), prefill.place
    return lambda: rearrange(hop.wait(), "(k p) w n h -> (p w) (k n) h", p=p)[place]


def attend_cached(
    q: Tensor,
    cached: CachedLayer,
    scoring: Scoring,
    prefill: Prefill | None = None,
    rows: slice | None = None,
) -> Partial:
    """Partial attention of rows to the keys on this rank.

    In one call where the backend looks up block tables, else in one for each of the rows' `Read`s.

    Args:
        q: The group's heads of the rows, `[T, N, H]`.
        cached: The layer, which holds this step's keys already.
        scoring: How keys are scored.
        prefill: ``plan.prefill`` where the rows are its packed tokens; ``None`` for decode rows.
        rows: Of decode rows only some, those of whole requests; ``None``: all.

    Returns:
        out `[T, N, V]`, lse `[T, N]`; (0, -inf) for rows whose keys are all on other ranks.
    """
    cache, plan, layer = cached
    part = plan if prefill is None else prefill
    stores = cache.spec.keys_values(cache.storage.stores(layer))
    window, wanted = scoring.window, q if rows is None else q[rows]
    keys = plan.paged(window, rows) if prefill is None else prefill.paged(window)
    partial = scoring.attend_paged(wanted, *stores, keys)
    if partial is not None:
        return partial
    reads = part.reads(scoring.window)
    if rows is not None:  # they are those of whole requests
        reads = tuple([read for read in reads if (rows.start or 0) <= read.row0 < rows.stop])
    first = 0 if rows is None else rows.start or 0
    return _read_by_read(wanted, cached, scoring, reads, first)


def _read_by_read(
    q: Tensor,
    cached: CachedLayer,
    scoring: Scoring,
    reads: Sequence[Read],
    first: int,
) -> Partial:
    """Rows from ``first`` on."""
    cache, _, layer = cached
    spec, storage, block_size = cache.spec, cache.storage, cache.layout.block_size
    rows: list[Partial] = []
    done, i = 0, 0
    while i < len(reads):
        row0, row1 = reads[i].row0 - first, reads[i].row1 - first
        if done < row0:
            rows.append(_nothing(q[done:row0], cached))
        part = q if row0 == 0 and row1 == len(q) else q[row0:row1]
        parts = []
        while i < len(reads) and reads[i].row0 - first == row0:
            read = reads[i]
            keys, values = spec.keys_values(storage.read(layer, read, block_size))
            parts.append(scoring.attend(part, keys, values, read))
            i += 1
        rows.append(parts[0] if len(parts) == 1 else merge(parts))
        done = row1
    if done < len(q):
        rows.append(_nothing(q[done:], cached))
    if len(rows) == 1:
        return rows[0]
    return Partial(torch.cat([row.out for row in rows]), torch.cat([row.lse for row in rows]))


def _exchange(planes: Planes, prefill: Prefill, mesh: CPMesh) -> Planes:
    """New rows of all PCP ranks that this rank owns, `[p * count, heads, dim]` a plane."""
    send = prefill.exchange.send
    rows = token_major(planes)
    if len(rows) == 0:  # nothing to index: only padding goes out
        sent = rows.new_zeros(*send.shape, elements(planes))
    else:
        sent = rows[send]
    return columns(mesh.all_to_all(sent, "pcp").flatten(0, 1), planes)


def _nothing(q: Tensor, cached: CachedLayer) -> Partial:
    value_dim = cached.cache.spec.value_dim
    return empty(q.shape[0], q.shape[1], value_dim, dtype=q.dtype, device=q.device)

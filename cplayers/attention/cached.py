"""Attention of rows to this rank's shard of the cache: strategy ``gather_q``.

The queries of the group's heads visit the keys: every rank attends with all of them to the keys
that it holds, and the group combines the partial outputs.

    q_own  [T, n, H]  --all-gather over the group's TP neighbours-->  q [T, N, H]
    for each run of consecutive blocks:   attend(q, keys in place, lo, hi)      -> Partial
    merge the runs of a row                                                     -> Partial
    combine over the group                                                      -> [T, n, V]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from cplayers.cache import PagedKVCache
from cplayers.cache.reads import Read
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh, Topology
from cplayers.ops import Partial, attend, empty, merge


def require_spread(cache: PagedKVCache, mesh: CPMesh) -> None:
    """Raise ConfigError unless ``cache`` is spread over the ranks of ``mesh``."""
    view, rank, size = cache.view_of_rank, mesh.rank, mesh.size
    has = (view.cp_rank, view.layout.cp_size, view.pcp_rank, view.pcp_size)
    wanted = (rank("dcp"), size("dcp"), rank("pcp"), size("pcp"))
    if has != wanted:
        raise ConfigError(
            f"a cache with cp_rank, cp_size, pcp_rank, pcp_size = {has}",
            f"this rank of {mesh} has {wanted}: it would miss keys, or count them twice",
            "build the cache from mesh.rank and mesh.size of 'dcp' and 'pcp'",
        )


def gather_heads(q: Tensor, mesh: CPMesh) -> Tensor:
    """Own heads `[T, n, H]` to the group's heads `[T, N, H]`.

    Members that differ only in their PCP rank hold the same decode rows, so the gather runs over
    the TP neighbours alone; without PCP these are the DCP group itself.
    """
    axis = "dcp" if mesh.size("pcp") == 1 else "dcp_tp"
    if mesh.size(axis) == 1:
        return q
    return rearrange(mesh.all_gather(q, axis), "k t n h -> t (k n) h")


def gather_heads_bytes(
    topology: Topology, *, rows: int, own_heads: int, head_dim: int, itemsize: int
) -> int:
    """Bytes that `gather_heads` sends per rank.

    Args:
        topology: The ranks.
        rows: T.
        own_heads: n.
        head_dim: H.
        itemsize: Bytes per element.
    """
    return (topology.dcp_tp - 1) * rows * own_heads * head_dim * itemsize


def attend_cached(
    q: Tensor,
    cache: PagedKVCache,
    reads: Sequence[Read],
    layer: int,
    *,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> Partial:
    """Partial attention of rows to the keys on this rank.

    Args:
        q: The group's heads of the rows, `[T, N, H]`.
        cache: Holds this step's keys already.
        reads: ``plan.reads()`` for decode rows, ``plan.prefill_reads()`` for prefill rows.
        layer: Layer index in the cache.
        scale: Factor on the logits.
        softcap: Soft cap on the logits, or ``None``.
        backend: See `cplayers.ops.attend`.

    Returns:
        out `[T, N, V]`, lse `[T, N]`; (0, -inf) for rows whose keys are all on other ranks.
    """
    rows: list[Partial] = []
    done, i = 0, 0
    while i < len(reads):
        row0, row1 = reads[i].row0, reads[i].row1
        if done < row0:
            rows.append(_nothing(q[done:row0], cache))
        parts = []
        while i < len(reads) and reads[i].row0 == row0:
            read = reads[i]
            keys, values = cache.spec.keys_values(cache.view(layer, read.slot, read.length))
            parts.append(
                attend(
                    q if row0 == 0 and row1 == len(q) else q[row0:row1],
                    keys,
                    values,
                    read.lo,
                    read.hi,
                    scale=scale,
                    softcap=softcap,
                    backend=backend,
                    tiles=read.tiles,
                )
            )
            i += 1
        rows.append(parts[0] if len(parts) == 1 else merge(parts))
        done = row1
    if done < len(q):
        rows.append(_nothing(q[done:], cache))
    if len(rows) == 1:
        return rows[0]
    return Partial(torch.cat([row.out for row in rows]), torch.cat([row.lse for row in rows]))


def _nothing(q: Tensor, cache: PagedKVCache) -> Partial:
    return empty(q.shape[0], q.shape[1], cache.spec.value_dim, dtype=q.dtype, device=q.device)

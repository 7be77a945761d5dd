"""Which heads a rank projects, attends with and stores. Plain ints.

Worked example, 8 query heads, 2 KV heads, TP 4, DCP 2 (no PCP): rank 1 owns query heads 2..3, its
DCP group (ranks 0 and 1) attends with heads 0..3, and both store KV head 0.
"""

from __future__ import annotations

from typing import NamedTuple

from cplayers.mesh import Topology


class HeadShard(NamedTuple):
    """Half-open ranges of global head indices.

    Attributes:
        own: Query heads that this rank hands to its slice of o_proj.
        group: Query heads of its DCP group, with which it attends to its part of the cache.
        kv: KV heads that it projects and stores.
    """

    own: tuple[int, int]
    group: tuple[int, int]
    kv: tuple[int, int]

    @property
    def num_own(self) -> int:
        """Query heads of this rank."""
        return self.own[1] - self.own[0]

    @property
    def num_group(self) -> int:
        """Query heads of its DCP group."""
        return self.group[1] - self.group[0]

    @property
    def num_kv(self) -> int:
        """KV heads of this rank."""
        return self.kv[1] - self.kv[0]

    def kv_of_own(self) -> tuple[int, ...]:
        """Local KV head that each own query head reads, when K/V are those of the whole group."""
        per_kv = self.num_group // self.num_kv
        return tuple((head - self.group[0]) // per_kv for head in range(*self.own))

    def kv_read_by_own(self) -> slice | list[int] | None:
        """Local KV heads to attend to with own queries alone: all, a run, or one per query head.

        ``None`` and a run need no copy. One per head is for own heads that are spread unevenly over
        KV heads, such as 3 heads that read KV heads 0, 1, 1.
        """
        if self.num_own == self.num_group:
            return None
        reads = self.kv_of_own()
        first, last = reads[0], reads[-1]
        each = len(reads) // (last - first + 1)
        if reads == tuple(first + i // each for i in range(len(reads))):
            return slice(first, last + 1)
        return list(reads)


def head_shard(
    topology: Topology, tp_rank: int, num_heads: int, num_kv_heads: int, *, replicate_q: bool
) -> HeadShard:
    """Heads of the rank at ``tp_rank``, for a configuration that `cplayers.mesh.validate` accepts.

    Args:
        topology: The ranks.
        tp_rank: Index on the TP axis.
        num_heads: Query heads of the model.
        num_kv_heads: KV heads of the model.
        replicate_q: Whether heads are split over TPA instead of TP (`TPAQProj`).
    """
    own = num_heads // topology.tp
    neighbours = topology.dcp_tp
    first = tp_rank // neighbours * neighbours
    width, index = (topology.tpa, tp_rank // neighbours) if replicate_q else (topology.tp, tp_rank)
    if num_kv_heads >= width:
        each = num_kv_heads // width
        kv = (index * each, (index + 1) * each)
    else:
        head = index * num_kv_heads // width
        kv = (head, head + 1)
    return HeadShard(
        own=(tp_rank * own, (tp_rank + 1) * own),
        group=(first * own, (first + neighbours) * own),
        kv=kv,
    )

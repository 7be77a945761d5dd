"""Bytes that a rank sends under each strategy: the formulas, and the choice between them.

T decode rows, or F packed tokens of chunks in pieces of at most ``width`` rows a PCP rank; n own
heads, k TP neighbours and p PCP ranks in a DCP group of g, so that the group attends with kn heads;
D the dimension of a query and V of what is combined; W elements stored per token; e bytes each.

    gather_q    queries    (k-1) * T*n*D*e             decode rows, or chunks without PCP (T = F)
                           (g-1) * width*n*D*e         chunks under PCP; replicated (TPA):
                           (p-1) * width*kn*D*e        none for the former, this for the latter
                new keys   (p-1) * exchanged*W*e       chunks under PCP: to their owners
                results    a2a    (g-1) * own*n*(V*e + 4)           own: T, or width for chunks
                           ag_rs  (g-1) * (rows*kn*4 + own*n*V*4)   rows: T, or F
                           ar     (g-1) * rows*kn*4 + 2*(g-1)/g * rows*kn*V*4
    gather_kv   new keys   (p-1) * width*W*e
    and ring    context    (g-1) * (first rank's share of the context)*W*e

For T new tokens over P cached ones, gather_q sends less where T / (T + P) is below about
W*e / (N*(D*e + V*e + 4)), N the heads of the model whose K/V heads are W: 25 % for Llama-3-8B,
0.4 % for DeepSeek's latents.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cplayers.mesh import Topology


class Chunks(Protocol):
    """What of a step's prompts decides bytes: ``plan.prefill``, or numbers alone."""

    @property
    def num_tokens(self) -> int:
        """F."""
        ...

    @property
    def width(self) -> int:
        """Rows of the PCP rank that has most."""
        ...

    @property
    def max_exchanged(self) -> int:
        """Rows that travel to their owners between each two PCP ranks."""
        ...


def combine_bytes(
    how: str,
    topology: Topology,
    *,
    rows: int,
    own_rows: int,
    own_heads: int,
    value_dim: int,
    itemsize: int,
) -> int:
    """Bytes that `cplayers.attention.combine` sends per rank.

    Args:
        how: The way of combining.
        topology: The ranks.
        rows: Rows that every member of the group has partial results of.
        own_rows: Rows that a member gets back.
        own_heads: n.
        value_dim: V.
        itemsize: Bytes per element of the results, e.
    """
    others, heads = topology.dcp - 1, own_heads * topology.dcp_tp
    if how == "a2a":
        return others * own_rows * own_heads * (value_dim * itemsize + 4)
    wide = max(4, itemsize)
    lse = others * rows * heads * 4
    if how == "ag_rs":
        return lse + others * own_rows * own_heads * value_dim * wide
    return lse - (-2 * others * rows * heads * value_dim * wide // topology.dcp)


class Sizes(NamedTuple):
    """What a layer moves per token; its methods give bytes sent per rank.

    Attributes:
        own_heads: n.
        query_dim: D.
        value_dim: V.
        stored: W.
        itemsize: e.
        combine: How partial results are combined.
        replicated: Whether a rank projects the queries of its whole group (TPA).
    """

    own_heads: int
    query_dim: int
    value_dim: int
    stored: int
    itemsize: int
    combine: str
    replicated: bool

    def visit(self, topology: Topology, rows: int) -> int:
        """Decode rows under gather_q.

        Args:
            topology: The ranks.
            rows: T.
        """
        neighbours = 0 if self.replicated else topology.dcp_tp - 1
        queries = neighbours * rows * self.own_heads * self.query_dim * self.itemsize
        return queries + self._combine(topology, rows, rows)

    def chunks_visit(self, topology: Topology, prefill: Chunks) -> int:
        """Chunks of prompts under gather_q.

        Args:
            topology: The ranks, with dcp above 1 where pcp is.
            prefill: ``plan.prefill``.
        """
        if topology.pcp == 1:
            return self.visit(topology, prefill.num_tokens)
        others, heads = topology.dcp - 1, self.own_heads
        if self.replicated:
            others, heads = topology.pcp - 1, self.own_heads * topology.dcp_tp
        queries = others * prefill.width * heads * self.query_dim * self.itemsize
        keys = (topology.pcp - 1) * prefill.max_exchanged * self.stored * self.itemsize
        return queries + keys + self._combine(topology, prefill.num_tokens, prefill.width)

    def fetch(self, topology: Topology, *, new: int, cached: int) -> int:
        """Keys that come to the rows, under gather_kv or ring.

        Args:
            topology: The ranks.
            new: New rows of every PCP rank, padding included.
            cached: Cached rows of every DCP rank, padding included.
        """
        rows = (topology.pcp - 1) * new + (topology.dcp - 1) * cached
        return rows * self.stored * self.itemsize

    def _combine(self, topology: Topology, rows: int, own_rows: int) -> int:
        return combine_bytes(
            self.combine,
            topology,
            rows=rows,
            own_rows=own_rows,
            own_heads=self.own_heads,
            value_dim=self.value_dim,
            itemsize=self.itemsize,
        )

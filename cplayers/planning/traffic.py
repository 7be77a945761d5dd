"""The collectives of a layer under each strategy: which, over which axis, how many bytes.

Bytes are those of `cplayers.attention.costs`, split by operation with its own formulas: what a term
adds is the whole less the whole without it.
"""

from __future__ import annotations

from typing import NamedTuple

from cplayers.attention.costs import Sizes, combine_bytes
from cplayers.mesh import Topology
from cplayers.mesh.traffic import sent_bytes
from cplayers.planning.speeds import Call


class Chunk(NamedTuple):
    """New tokens of one prompt in a step, as `cplayers.cache.prefill.Prefill` would count them.

    Attributes:
        num_tokens: New tokens (F).
        width: Rows of the PCP rank that has most.
        max_exchanged: Rows that travel to their owners between each two PCP ranks.
    """

    num_tokens: int
    width: int
    max_exchanged: int

    @classmethod
    def of(cls, topology: Topology, tokens: int) -> Chunk:
        """Split evenly, which zigzag and interleave do up to their grain.

        Args:
            topology: The ranks.
            tokens: F.
        """
        width = -(-tokens // topology.pcp)
        return cls(tokens, width, -(-width // topology.dcp))


def combine_calls(sizes: Sizes, topology: Topology, rows: int, own_rows: int) -> list[Call]:
    """Collectives of `cplayers.attention.combine`.

    Args:
        sizes: What the layer moves.
        topology: The ranks.
        rows: Rows that every member of the group has partial results of.
        own_rows: Rows that a member gets back.
    """
    if topology.dcp == 1:
        return []

    def sent(value_dim: int) -> int:
        return combine_bytes(
            sizes.combine,
            topology,
            rows=rows,
            own_rows=own_rows,
            own_heads=sizes.own_heads,
            value_dim=value_dim,
            itemsize=sizes.itemsize,
        )

    total = sent(sizes.value_dim)
    if sizes.combine == "a2a":
        return [Call("dcp", "all_to_all", total, combine="a2a")]
    reduce = "reduce_scatter" if sizes.combine == "ag_rs" else "all_reduce"
    lse, how = sent(0), sizes.combine
    return [
        Call("dcp", "all_gather", lse, combine=how),
        Call("dcp", reduce, total - lse, combine=how),
    ]


def decode_calls(sizes: Sizes, topology: Topology, rows: int) -> list[Call]:
    """Collectives of decode rows under gather_q, before o_proj.

    Args:
        sizes: What the layer moves.
        topology: The ranks.
        rows: T.
    """
    combine = combine_calls(sizes, topology, rows, rows)
    queries = sizes.visit(topology, rows) - sum(call.bytes for call in combine)
    axis = "dcp" if topology.pcp == 1 else "dcp_tp"
    return ([Call(axis, "all_gather", queries)] if queries else []) + combine


def visit_calls(sizes: Sizes, topology: Topology, chunk: Chunk) -> list[Call]:
    """Collectives of a chunk of a prompt under gather_q, with dcp above 1 where pcp is.

    Args:
        sizes: What the layer moves.
        topology: The ranks.
        chunk: New tokens.
    """
    if topology.pcp == 1:
        return decode_calls(sizes, topology, chunk.num_tokens)
    combine = combine_calls(sizes, topology, chunk.num_tokens, chunk.width)
    total = sizes.chunks_visit(topology, chunk)
    keys = total - sizes._replace(stored=0).chunks_visit(topology, chunk)
    queries = total - keys - sum(call.bytes for call in combine)
    axis = "pcp" if sizes.replicated else "dcp"
    return [Call("pcp", "all_to_all", keys), Call(axis, "all_gather", queries), *combine]


def fetch_calls(
    sizes: Sizes, topology: Topology, chunk: Chunk, cached: int, workspace_tokens: int
) -> list[Call]:
    """Collectives of a chunk of a prompt under gather_kv.

    Args:
        sizes: What the layer moves.
        topology: The ranks.
        chunk: New tokens.
        cached: Tokens before them, on all DCP ranks together.
        workspace_tokens: Most cached tokens that are gathered at a time.
    """
    new = sizes.fetch(topology, new=chunk.width, cached=0)
    context = sizes.fetch(topology, new=0, cached=-(-cached // topology.dcp))
    calls = []
    if new:
        calls.append(Call("pcp", "all_gather", new))
    if context:
        calls.append(Call("dcp", "all_gather", context, -(-cached // workspace_tokens)))
    return calls


def all_reduce_calls(topology: Topology, rows: int, hidden: int, itemsize: int) -> list[Call]:
    """The sum over TP after a row-parallel projection.

    Args:
        topology: The ranks.
        rows: Rows of this rank.
        hidden: Model width.
        itemsize: Bytes per element.
    """
    if topology.tp == 1:
        return []
    return [
        Call("tp", "all_reduce", sent_bytes("all_reduce", rows * hidden * itemsize, topology.tp))
    ]


def sent(calls: list[Call]) -> int:
    """Bytes of some calls.

    Args:
        calls: What is sent.
    """
    return sum(call.bytes for call in calls)

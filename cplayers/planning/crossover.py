"""From which size one choice beats another, by the time model.

    dcp        decode: a group's context from which DCP n is faster than DCP 1 on the same ranks
    gather_q   a chunk of a prompt: cached tokens from which queries should travel, not keys
    a2a        rows that decode from which combining by a2a is faster than by ag_rs

A crossover may not exist: ``None`` says that the choice wins nowhere below `LIMIT`, and 1 that it
wins everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from cplayers.errors import ConfigError
from cplayers.mesh import Topology
from cplayers.planning.shape import ModelShape
from cplayers.planning.speeds import Speeds
from cplayers.planning.times import TimeModel
from cplayers.planning.traffic import combine_calls

LIMIT = 1 << 30


class Crossovers(NamedTuple):
    """Sizes at which a choice turns.

    Attributes:
        dcp: Context in tokens from which this DCP degree beats DCP 1 when decoding.
        gather_q: Cached tokens from which gather_q beats gather_kv for a chunk of ``chunk`` tokens.
        a2a: Decode rows from which a2a beats ag_rs.
        chunk: New tokens of the chunk.
    """

    dcp: int | None
    gather_q: int | None
    a2a: int | None
    chunk: int


def crossovers(
    shape: ModelShape,
    topology: Topology,
    speeds: Speeds,
    *,
    chunk: int = 64,
    rows: int = 1,
    **options: object,
) -> Crossovers:
    """Crossovers of one layer of a model on a layout.

    Args:
        shape: The model.
        topology: The ranks, with dcp above 1.
        speeds: How fast they are.
        chunk: New tokens of a chunk.
        rows: Sequences that decode at a time.
        **options: Further arguments of `TimeModel`.

    Raises:
        ConfigError: If dcp is 1.
    """
    if topology.dcp == 1:
        raise ConfigError(
            f"crossovers of {topology}",
            "they compare a DCP degree with DCP 1",
            "pass a topology with dcp above 1",
        )
    spread = TimeModel(shape, topology, speeds, **options)  # type: ignore[arg-type]
    alone = TimeModel(shape, replace(topology, dcp=1), speeds, **options)  # type: ignore[arg-type]

    def dcp_wins(context: int) -> bool:
        return (
            spread.decode_attention(context, rows).total
            < alone.decode_attention(context, rows).total
        )

    def gather_q_wins(cached: int) -> bool:
        queries = spread.prompt_attention(chunk, cached, strategy="gather_q")
        return queries.total < spread.prompt_attention(chunk, cached, strategy="gather_kv").total

    def a2a_wins(rows: int) -> bool:
        a2a, ag_rs = (
            speeds.talk(combine_calls(spread.sizes._replace(combine=how), topology, rows, rows))
            for how in ("a2a", "ag_rs")
        )
        return a2a < ag_rs

    return Crossovers(first(dcp_wins), first(gather_q_wins), first(a2a_wins), chunk)


def first(wins: Callable[[int], bool], limit: int = LIMIT) -> int | None:
    """The smallest size of at least 1 that wins, if what wins goes on winning.

    Args:
        wins: Of a size.
        limit: Largest size that is looked at.
    """
    high = 1
    while not wins(high):
        high *= 2
        if high > limit:
            return None
    low = high // 2  # does not win, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high

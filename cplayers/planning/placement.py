"""Where each token of a request lives, and who computes what of its prompt, from the layouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cplayers.cache import InterleavedLayout, ZigzagLayout


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one rank and one block.

    Attributes:
        first: Position of the first.
        last: Position of the last.
        rank: Rank of the DCP group that holds them.
        block: Index in the sequence's block table, whose id is a cache's own.
        slot: Slot of the first within the block.
    """

    first: int
    last: int
    rank: int
    block: int
    slot: int


@dataclass(frozen=True)
class Share:
    """What one rank of a PCP group computes of a prompt.

    Attributes:
        rank: Of the PCP group.
        early: First and last position of its early chunk, ``None`` where that is empty.
        late: Likewise of its late chunk.
        tokens: Of both.
        work: Query-key pairs of causal attention.
    """

    rank: int
    early: tuple[int, int] | None
    late: tuple[int, int] | None
    tokens: int
    work: int


def runs(layout: InterleavedLayout, length: int) -> list[Run]:
    """Where the tokens of a sequence live, in order of position.

    Args:
        layout: Of the cache.
        length: Tokens.
    """
    pos = torch.arange(length)
    rank, local = layout.owner(pos), layout.local_index(pos)
    block = local // layout.block_size
    starts = torch.ones(length, dtype=torch.bool)
    starts[1:] = (rank[1:] != rank[:-1]) | (block[1:] != block[:-1])
    first = starts.nonzero().flatten()
    last = torch.cat([first[1:], torch.tensor([length])]) - 1
    columns = (first, last, rank[first], block[first], local[first] % layout.block_size)
    return [Run(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def shares(prompt: ZigzagLayout) -> list[Share]:
    """Who computes what of a prompt.

    Args:
        prompt: How it is split.
    """
    found = []
    for rank in range(prompt.cp_size):
        early = _chunk(prompt, rank)
        late = _chunk(prompt, 2 * prompt.cp_size - 1 - rank)
        tokens = prompt.count_before(prompt.length, rank)
        found.append(Share(rank, early, late, tokens, prompt.causal_work(rank)))
    return found


def _chunk(prompt: ZigzagLayout, index: int) -> tuple[int, int] | None:
    first = index * prompt.chunk
    last = min(first + prompt.chunk, prompt.length) - 1
    return (first, last) if first <= last else None

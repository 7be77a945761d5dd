"""Where the tokens of one sequence live: which rank owns a position, and at which local index.

Two layouts behind one protocol. Both keep the local tokens of a rank in increasing global position,
which is what turns every causal or windowed mask into two integers per query row
(`cplayers.ops.spans`).

Worked example, ``InterleavedLayout(cp_size=2, interleave_size=2, block_size=4)``:

    position        0 1 2 3 4 5 6 7 8
    owner           0 0 1 1 0 0 1 1 0
    local index     0 1 0 1 2 3 2 3 4
    count_before(9, rank 0) = 5,  count_before(9, rank 1) = 4

All methods are arithmetic on their arguments: ints give ints, integer tensors give tensors of the
same shape, ranks broadcast against positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from cplayers.errors import ConfigError

IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


class Layout(Protocol):
    """How the positions 0, 1, 2, ... of a sequence are spread over ``cp_size`` ranks."""

    @property
    def cp_size(self) -> int:
        """Number of ranks that share the sequence."""
        ...

    def owner(self, pos: IntOrTensor) -> IntOrTensor:
        """Rank that holds position ``pos``."""
        ...

    def local_index(self, pos: IntOrTensor) -> IntOrTensor:
        """Index of position ``pos`` among the tokens of its owner."""
        ...

    def count_before(self, n: IntOrTensor, rank: int) -> IntOrTensor:
        """How many of the positions 0..n-1 ``rank`` holds."""
        ...

    def positions(self, rank: int, length: int) -> Tensor:
        """The positions below ``length`` that ``rank`` holds, increasing, int64."""
        ...


@dataclass(frozen=True)
class InterleavedLayout:
    """Runs of ``interleave_size`` tokens dealt to the ranks in turn: the layout of the KV cache.

    Args:
        cp_size: Ranks that share a sequence (N).
        interleave_size: Tokens per run (I >= 1; it need not divide ``block_size`` nor be below it).
        block_size: Tokens per cache block on one rank (B).

    Raises:
        ConfigError: If one of them is below 1.
    """

    cp_size: int
    interleave_size: int
    block_size: int

    def __post_init__(self) -> None:
        for name in ("cp_size", "interleave_size", "block_size"):
            require_positive(name, getattr(self, name))

    def owner(self, pos: IntOrTensor) -> IntOrTensor:
        """``(pos // I) % N``."""
        return (pos // self.interleave_size) % self.cp_size

    def local_index(self, pos: IntOrTensor) -> IntOrTensor:
        """``(pos // (I*N)) * I + pos % I``."""
        run = self.interleave_size
        return (pos // (run * self.cp_size)) * run + pos % run

    def count_before(self, n: IntOrTensor, rank: int) -> IntOrTensor:
        """Whole rounds of ``I`` tokens each, plus what the partial round gives to ``rank``."""
        run = self.interleave_size
        turn = run * self.cp_size
        return (n // turn) * run + clamp(n % turn - rank * run, run)

    def position(self, index: Tensor, rank: int | Tensor) -> Tensor:
        """The inverse of ``local_index`` on ``rank``."""
        run = self.interleave_size
        return (index // run) * (run * self.cp_size) + rank * run + index % run

    def positions(self, rank: int, length: int) -> Tensor:
        """`position` of every local index on ``rank`` of a sequence of ``length`` tokens."""
        return self.position(torch.arange(self.count_before(length, rank)), rank)

    def blocks(self, length: int) -> int:
        """Virtual blocks that ``length`` tokens need: rank 0 always holds the largest share."""
        rounds, rest = divmod(length, self.interleave_size * self.cp_size)
        run = self.interleave_size
        return -(-(rounds * run + min(rest, run)) // self.block_size)

    def full_blocks(self, length: int) -> int:
        """Of these, how many are full on every rank: the last rank holds the smallest share."""
        rounds, rest = divmod(length, self.interleave_size * self.cp_size)
        run = self.interleave_size
        return (rounds * run + max(rest - (self.cp_size - 1) * run, 0)) // self.block_size

    def room(self, blocks: int) -> int:
        """The longest sequence that ``blocks`` virtual blocks hold; the inverse of `blocks`."""
        rounds, rest = divmod(blocks * self.block_size, self.interleave_size)
        return rounds * self.interleave_size * self.cp_size + rest

    def filled(self, blocks: int) -> int:
        """The shortest sequence with so many full ones; the inverse of `full_blocks`."""
        rounds, rest = divmod(blocks * self.block_size, self.interleave_size)
        span = self.interleave_size * self.cp_size
        return rounds * span + (rest and span - self.interleave_size + rest)

    @property
    def unit_blocks(self) -> int:
        """Virtual blocks after which the blocks of all ranks end at the same position.

        1 where the interleave divides the block; otherwise ``lcm(B, I) / B``.
        """
        return math.lcm(self.block_size, self.interleave_size) // self.block_size

    @property
    def unit_tokens(self) -> int:
        """Tokens of all ranks in ``unit_blocks`` virtual blocks: the grain of prefix reuse."""
        return self.unit_blocks * self.block_size * self.cp_size

    def slots(
        self, pos: Tensor, block_table: Tensor, rank: int, start: Tensor | None = None
    ) -> Tensor:
        """Cache slot of each position on ``rank``, -1 where another rank owns it.

        Args:
            pos: Positions `[T]`.
            block_table: Block ids of one sequence, or of several end to end, `[B]`.
            rank: Rank inside the group.
            start: Where block 0 of each position's sequence would be in ``block_table``, `[T]`;
                0 by default.

        Returns:
            ``block_table[local_index // B] * B + local_index % B``, int64 `[T]`.
        """
        local = self.local_index(pos)
        block = local // self.block_size
        ids = block_table[block if start is None else block + start].long()
        slot = ids * self.block_size + local % self.block_size
        return torch.where(self.owner(pos) == rank, slot, -1)


@dataclass(frozen=True)
class ZigzagLayout:
    """Chunk r and chunk 2N-1-r to rank r: equal causal work in prefill.

    The prompt is cut into ``2 * cp_size`` chunks of ``ceil(length / (2 * cp_size))`` tokens; the
    last ones may be short or empty. Where ``2 * cp_size`` divides the length, the causal work of
    all ranks is the same.

    Args:
        cp_size: Ranks that share the prompt (N).
        length: Tokens of the prompt, 0 allowed.
    """

    cp_size: int
    length: int

    def __post_init__(self) -> None:
        require_positive("cp_size", self.cp_size)
        if self.length < 0:
            raise ConfigError(f"length={self.length}", "a length is at least 0", "pass length >= 0")

    @property
    def chunk(self) -> int:
        """Tokens per chunk, at least 1."""
        return max(1, -(-self.length // (2 * self.cp_size)))

    def owner(self, pos: IntOrTensor) -> IntOrTensor:
        """The smaller of the chunk's index and its mirror image."""
        return mirrored(pos // self.chunk, self.cp_size)

    def local_index(self, pos: IntOrTensor) -> IntOrTensor:
        """Offset in the chunk; a rank's second chunk follows its first, which is then whole."""
        late = (pos // self.chunk) // self.cp_size  # 0 in the first half of the chunks, else 1
        return pos % self.chunk + late * self.chunk

    def count_before(self, n: IntOrTensor, rank: int) -> IntOrTensor:
        """What the first n positions, and never more than ``length``, give to ``rank``."""
        return zigzag_count(clamp(n, self.length), self.chunk, rank, self.cp_size)

    def positions(self, rank: int, length: int | None = None) -> Tensor:
        """The positions that ``rank`` holds, below ``length`` if given."""
        size = self.chunk
        early, late = rank * size, (2 * self.cp_size - 1 - rank) * size
        pos = torch.cat([torch.arange(early, early + size), torch.arange(late, late + size)])
        return pos[pos < (self.length if length is None else min(length, self.length))]

    def restore(self) -> Tensor:
        """Where each position sits in the concatenation of the ranks' tokens, int64 `[length]`."""
        counts = [self.count_before(self.length, rank) for rank in range(self.cp_size)]
        starts = torch.tensor([0, *counts[:-1]]).cumsum(0)
        pos = torch.arange(self.length)
        return starts[self.owner(pos)] + self.local_index(pos)

    def causal_work(self, rank: int) -> int:
        """Query-key pairs that ``rank`` computes in causal attention over the prompt."""
        return int((self.positions(rank) + 1).sum())


def mirrored(chunk: IntOrTensor, cp_size: int) -> IntOrTensor:
    """Zigzag rank of a chunk's index: chunk r and chunk 2N-1-r go to rank r."""
    mirror = 2 * cp_size - 1 - chunk
    if isinstance(chunk, int):
        return min(chunk, mirror)
    return torch.minimum(chunk, mirror)


def zigzag_count(n: IntOrTensor, chunk: int | IntOrTensor, rank: int, cp_size: int) -> IntOrTensor:
    """How many of the first n positions the two chunks of ``rank``, ``chunk`` tokens each, hold."""
    early, late = rank * chunk, (2 * cp_size - 1 - rank) * chunk
    return clamp(n - early, chunk) + clamp(n - late, chunk)


def clamp(x: IntOrTensor, high: int | IntOrTensor) -> IntOrTensor:
    """``x`` limited to 0..high, for ints or tensors."""
    if isinstance(x, int):
        return min(max(x, 0), high)
    return x.clamp(min=0).clamp(max=high)


def require_positive(name: str, value: int) -> None:
    """Raise ConfigError unless ``value`` is an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{name}={value!r}", f"{name} is an int of at least 1", f"pass {name} >= 1"
        )

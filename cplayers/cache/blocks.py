"""The block pool: who owns which virtual block. Plain Python, no torch, no communication.

A *virtual block* is one block id that is valid on every rank of the group: the same id names
``block_size`` slots on each of them. All ranks run the same pool on the same requests, so they take
the same decisions without talking.

An allocation is first tried (`BlockPool.trial`) and only then applied (`BlockPool.apply`): a step
that fails in between has changed nothing.

Blocks are handed out in runs of consecutive ids, because a run is attended to in place while a
scattered table has to be gathered or visited block by block. A new run is put in the middle of the
largest gap, so that its neighbour in front of it keeps room to grow.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice

from cplayers.errors import CacheFullError, StateError

FREE, USED, REUSABLE, AWAY = 0, 1, 2, 3
"""State of a block: never written or forgotten; referenced; unreferenced, content still known; not
lent to this pool."""

_GAP = re.compile(b"\x00+")
_TAKE_BACK = bytes.maketrans(bytes([FREE]), bytes([AWAY]))
_DIGITS = bytes.maketrans(bytes([FREE, USED, REUSABLE, AWAY]), b"0100")


def chain_hash(previous: bytes, tokens: Iterable[int]) -> bytes:
    """Hash of a whole unit of tokens that follows the prefix hashed in ``previous``."""
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass
class PoolStats:
    """Counters since the pool was made, in blocks."""

    allocated: int = 0
    released: int = 0
    evicted: int = 0
    hits: int = 0
    queries: int = 0


class Trial:
    """A tentative allocation: what `BlockPool.apply` would take, in order.

    Args:
        pool: The pool, which must not change before the trial is applied.

    Attributes:
        taken: Blocks chosen so far.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.taken: list[int] = []
        self._pool = pool
        self._num_free = pool.num_available - len(pool._reusable)
        self._state = bytearray()  # copies of the pool's state and its gaps, made when needed
        self._gaps: list[tuple[int, int]] | None = None

    def pick(self, count: int, after: int | None = None) -> list[int]:
        """Choose ``count`` blocks, continuing the run that ends at block ``after`` if possible.

        Raises:
            CacheFullError: If fewer are left. The pool is as before.
        """
        if count == 0:
            return []
        left = self._pool.num_available - len(self.taken)
        if count > left:
            raise CacheFullError(
                f"{count} more blocks are needed and {left} of {self._pool.num_blocks} are left: "
                f"free or truncate sequences, or build the cache with more blocks"
            )
        if not self._state:
            self._state = bytearray(self._pool._state)
        if count > self._num_free:
            self._evict(count - self._num_free)
        state, picked = self._state, list[int]()
        following = None if after is None else after + 1
        while len(picked) < count:
            if following is None or following >= len(state) or state[following] != FREE:
                following = self._new_run(count - len(picked))
            state[following] = USED
            picked.append(following)
            following += 1
        self._num_free -= count
        self.taken += picked
        return picked

    def _evict(self, count: int) -> None:
        """Count the ``count`` blocks that were unused for longest as free, their content as lost.

        All at once, before any is chosen, so that they can be taken in runs.
        """
        unused = (block for block in self._pool._reusable if self._state[block] == REUSABLE)
        for block in list(islice(unused, count)):
            self._state[block] = FREE
        self._num_free += count
        self._gaps = None

    def _new_run(self, wanted: int) -> int:
        """First block of a new run: in the largest gap, its slack shared with the run before it."""
        state = self._state
        if self._gaps is None:
            self._gaps = [
                (match.start() - match.end(), match.start()) for match in _GAP.finditer(state)
            ]
            heapify(self._gaps)
        while True:
            size, start = heappop(self._gaps)
            stop = start - size  # sizes are negative: the largest gap comes first
            taken = start
            while taken < stop and state[taken] != FREE:  # by the run before it, since
                taken += 1
            if taken == start:
                break
            if taken < stop:
                heappush(self._gaps, (taken - stop, taken))
        slack = max(0, stop - start - wanted)
        first = start + slack // 2 if start else start
        if start < first:
            heappush(self._gaps, (start - first, start))
        if first + wanted < stop:
            heappush(self._gaps, (first + wanted - stop, first + wanted))
        return first


class BlockPool:
    """Reference-counted virtual blocks with prefix reuse and LRU eviction.

    Args:
        num_blocks: Virtual blocks in the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._state = bytearray(num_blocks)
        self._refs = [0] * num_blocks
        self._reusable: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._units: dict[bytes, tuple[int, ...]] = {}
        self._hash_of: dict[int, bytes] = {}
        self._num_used = self._num_away = 0
        self.stats = PoolStats()

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._state)

    @property
    def num_used(self) -> int:
        """Blocks that at least one sequence refers to."""
        return self._num_used

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated, those with reusable content included."""
        return self.num_blocks - self._num_used - self._num_away

    @property
    def used_mask(self) -> int:
        """Bit b says whether a sequence refers to block b."""
        return int(self._state.translate(_DIGITS)[::-1], 2)

    def refs(self, block: int) -> int:
        """How many sequences refer to ``block``."""
        return self._refs[block]

    def is_hashed(self, block: int) -> bool:
        """Whether the content of ``block`` is registered for reuse."""
        return block in self._hash_of

    def is_private(self, blocks: Sequence[int]) -> bool:
        """Whether one sequence alone refers to each block, and none is registered for reuse."""
        for block in blocks:  # noqa: SIM110 - a generator would double the cost of a request
            if self._refs[block] != 1 or block in self._hash_of:
                return False
        return True

    def grow(self, num_blocks: int) -> None:
        """Enlarge the pool to ``num_blocks``; ids stay valid."""
        extra = num_blocks - self.num_blocks
        if extra > 0:
            self._state.extend(bytes(extra))
            self._refs.extend([0] * extra)

    def lend(self, blocks: Iterable[int]) -> None:
        """From now on take no blocks but those that are referred to here, and ``blocks``.

        For pools that share their blocks: nobody else takes ``blocks`` until they are lent anew.
        Content that is kept for reuse is forgotten.

        Args:
            blocks: Ids; those in use here may be among them.
        """
        for block in list(self._reusable):
            self.forget(block)
        self._state = self._state.translate(_TAKE_BACK)
        for block in blocks:
            if self._state[block] == AWAY:
                self._state[block] = FREE
        self._num_away = self._state.count(AWAY)

    def trial(self) -> Trial:
        """Begin a tentative allocation against the pool as it is now."""
        return Trial(self)

    def apply(self, trial: Trial) -> None:
        """Take the blocks of ``trial``, each with one reference."""
        for block in trial.taken:
            if self._state[block] in (USED, AWAY):
                raise StateError(f"block {block} was taken since the trial: plan the step again")
        for block in trial.taken:
            if self._state[block] == REUSABLE:
                self.forget(block)
            self._state[block] = USED
            self._refs[block] = 1
        self._num_used += len(trial.taken)
        self.stats.allocated += len(trial.taken)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Pick and take ``count`` blocks at once.

        Raises:
            CacheFullError: If fewer are left. The pool is as before.
        """
        trial = self.trial()
        blocks = trial.pick(count, after)
        self.apply(trial)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block: a fork, or a prefix that was found."""
        for block in blocks:
            if self._refs[block] == 0:
                if self._state[block] != REUSABLE:
                    raise StateError(f"block {block} is free: only live blocks can be shared")
                del self._reusable[block]
                self._state[block] = USED
                self._num_used += 1
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block. Later blocks become the first to be evicted."""
        for block in reversed(blocks):
            if self._refs[block] == 0:
                raise StateError(f"block {block} is released more often than it was taken")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            self._num_used -= 1
            self.stats.released += 1
            if block in self._hash_of:
                self._state[block] = REUSABLE
                self._reusable[block] = None
            else:
                self._state[block] = FREE

    def register(self, unit_hash: bytes, blocks: Sequence[int]) -> None:
        """Make the content of a whole unit of blocks findable. The first registration wins."""
        if unit_hash in self._units or any(block in self._hash_of for block in blocks):
            return
        self._units[unit_hash] = tuple(blocks)
        for block in blocks:
            self._hash_of[block] = unit_hash

    def forget(self, block: int) -> None:
        """Drop the registration of the unit that ``block`` belongs to: it will be overwritten."""
        unit_hash = self._hash_of.get(block)
        if unit_hash is None:
            return
        for member in self._units.pop(unit_hash):
            del self._hash_of[member]
            if self._state[member] == REUSABLE:
                del self._reusable[member]
                self._state[member] = FREE
                self.stats.evicted += 1

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest registered prefix of ``hashes``; takes no reference."""
        found: list[int] = []
        for unit_hash in hashes:
            self.stats.queries += 1
            blocks = self._units.get(unit_hash)
            if blocks is None:
                break
            self.stats.hits += 1
            found += blocks
        return found

"""Which sequences there are, which blocks they have, and what a step will take. Plain Python.

Every decision of the paged cache is taken here, from plain numbers that are the same on all ranks,
so all ranks take the same ones. Nothing here knows a rank, a tensor or a device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from cplayers.cache.blocks import BlockPool, Trial, chain_hash
from cplayers.cache.layouts import InterleavedLayout
from cplayers.cache.tables import BlockTable, Request, TableView
from cplayers.errors import ConfigError


@dataclass
class SequenceState:
    """Committed state of a sequence.

    Attributes:
        length: Tokens, all ranks together.
        table: Its blocks, exactly as many as ``length`` needs.
        hashes: Of the whole units of its known tokens; beyond ``length`` they are still to come.
        oldest: Tokens before this position are out of every window, and may be gone.
        dropped: Blocks at the front of the table that were given back.
        begin: Tokens before this position were never here: the sequence came without them.
        full: Lengths from and to which as many blocks are full as now, and how many these are:
            kept, since most steps ask the same again.
        room: For how many blocks the room was computed, and the longest sequence they hold.
    """

    length: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    hashes: list[bytes] = field(default_factory=list)
    oldest: int = 0
    dropped: int = 0
    begin: int = 0
    full: tuple[int, int, int] = (0, 0, 0)
    room: tuple[int, int] = (0, 0)

    @property
    def held(self) -> list[int]:
        """The blocks that it refers to."""
        return self.table.ids[self.dropped :]


@dataclass(frozen=True)
class Draft:
    """What a step will take, decided and not yet taken.

    Attributes:
        requests: The sequences in the step, with the blocks that they will have.
        trial: The blocks that will be taken from the pool.
        copies: Copy-on-write, (source block, target block).
        overwritten: Own blocks that are registered for reuse and into which the step may write.
    """

    requests: tuple[Request, ...]
    trial: Trial
    copies: tuple[tuple[int, int], ...]
    overwritten: tuple[int, ...]


class SequenceTable:
    """The sequences of a cache over its block pool.

    Args:
        layout: How a sequence is spread over the group.
        pool: The blocks.
    """

    def __init__(self, layout: InterleavedLayout, pool: BlockPool) -> None:
        self.layout, self.pool = layout, pool
        self._states: dict[Hashable, SequenceState] = {}

    @property
    def names(self) -> tuple[Hashable, ...]:
        """The sequences, in order of their addition."""
        return tuple(self._states)

    def get(self, seq: Hashable) -> SequenceState:
        """State of ``seq``.

        Raises:
            ConfigError: If there is no such sequence.
        """
        try:
            return self._states[seq]
        except KeyError:
            raise ConfigError(
                f"seq={seq!r}",
                "a sequence is added before it is used",
                f"add it; known: {self.names}",
            ) from None

    def add(self, seq: Hashable, tokens: Sequence[int] | None) -> int:
        """Start a sequence on the longest reusable prefix of ``tokens``; returns its length."""
        self.require_new(seq)
        state = SequenceState()
        if tokens is not None:
            state.hashes = self.hash_units(tokens)
            whole = max(0, len(tokens) - 1) // self.layout.unit_tokens
            blocks = self.pool.lookup(state.hashes[:whole])
            self.pool.share(blocks)
            state.table = BlockTable(blocks)
            state.length = len(blocks) // self.layout.unit_blocks * self.layout.unit_tokens
        self._states[seq] = state
        return state.length

    def fork(self, seq: Hashable, new: Hashable) -> None:
        """Start ``new`` with the committed content of ``seq``, its blocks shared."""
        source = self.get(seq)
        self.require_new(new)
        self.pool.share(source.held)
        # The fork goes its own way: what `seq` announced beyond its length is not known of it.
        known = source.hashes[: source.length // self.layout.unit_tokens]
        table = BlockTable(source.table.ids)
        self._states[new] = SequenceState(
            source.length, table, known, source.oldest, source.dropped, source.begin
        )

    def free(self, seq: Hashable) -> None:
        """Forget a sequence and release its blocks."""
        self.pool.release(self.get(seq).held)
        del self._states[seq]

    def truncate(self, seq: Hashable, length: int) -> None:
        """Cut ``seq`` to ``length`` tokens.

        Raises:
            ConfigError: If ``length`` is negative or above the present length.
        """
        state = self.get(seq)
        if not 0 <= length <= state.length:
            raise ConfigError(
                f"length={length}",
                f"{seq!r} holds {state.length} tokens and can only be cut",
                f"pass 0 <= length <= {state.length}",
            )
        if length < state.oldest:
            raise ConfigError(
                f"length={length}",
                f"the tokens of {seq!r} before position {state.oldest} were forgotten",
                f"pass a length of at least {state.oldest}",
            )
        if length == state.length:
            return  # nothing is cut: the tokens announced beyond it are still the ones to come
        ids, keep = state.table.ids, self.layout.blocks(length)
        self.pool.release(ids[keep:])
        state.table = BlockTable(ids[:keep])
        del state.hashes[length // self.layout.unit_tokens :]
        state.length = length

    def forget(self, seq: Hashable, position: int) -> None:
        """Give back the blocks of ``seq`` that hold no token from ``position`` on, on any rank."""
        state = self.get(seq)
        position = min(position, state.length)
        if position <= state.oldest:
            return
        state.oldest, whole = position, self.layout.full_blocks(position)
        self.pool.release(state.table.ids[state.dropped : whole])
        state.dropped = whole

    def draft(self, requests: Sequence[tuple[Hashable, int]]) -> Draft:
        """Decide a step of ``(sequence, new tokens)``. Nothing is changed.

        Raises:
            ConfigError: On an unknown or repeated sequence or a negative number of tokens.
            CacheFullError: If the pool cannot hold the step.
        """
        names = [seq for seq, _ in requests]
        if len(set(names)) != len(names):
            raise ConfigError(f"seqs={names}", "a step names a sequence once", "merge the entries")
        trial, layout = self.pool.trial(), self.layout
        copies: list[tuple[int, int]] = []
        overwritten: list[int] = []
        parts: list[Request] = []
        for seq, new in requests:
            state = self.get(seq)
            if not isinstance(new, int) or new < 0:
                raise ConfigError(
                    f"new tokens of {seq!r}={new!r}", "at least 0", "pass an int >= 0"
                )
            length, ids = state.length, state.table.ids
            start, stop, first = state.full
            if not start <= length < stop:
                first = layout.full_blocks(length)
                state.full = layout.filled(first), layout.filled(first + 1), first
            keep, tail = len(ids), list[int]()
            if new and not self.pool.is_private(ids[first:]):
                keep, tail = self._own_end(ids, first, trial, copies, overwritten)
            if state.room[0] != len(ids):
                state.room = len(ids), layout.room(len(ids))
            if length + new > state.room[1]:
                last = tail[-1] if tail else ids[keep - 1] if keep else None
                tail += trial.pick(layout.blocks(length + new) - len(ids), after=last)
            view = TableView(state.table, keep, tuple(tail))
            parts.append(Request(seq, length, new, view, first, state.oldest, state.dropped))
        return Draft(tuple(parts), trial, tuple(copies), tuple(overwritten))

    def _own_end(
        self,
        ids: list[int],
        first: int,
        trial: Trial,
        copies: list[tuple[int, int]],
        overwritten: list[int],
    ) -> tuple[int, list[int]]:
        """How many blocks stay, and what replaces the rest, so that no block written is shared."""
        end = ids[first:]
        overwritten += [b for b in end if self.pool.refs(b) == 1 and self.pool.is_hashed(b)]
        shared = next((i for i, block in enumerate(end) if self.pool.refs(block) > 1), len(end))
        keep, tail = first + shared, list[int]()
        for block in end[shared:]:
            if self.pool.refs(block) > 1:
                last = tail[-1] if tail else ids[keep - 1] if keep else None
                (fresh,) = trial.pick(1, after=last)
                copies.append((block, fresh))
                block = fresh
            tail.append(block)
        return keep, tail

    def blocks_for(self, seq: Hashable, new: int) -> int:
        """Blocks that ``new`` more tokens of ``seq`` would take, copy-on-write included."""
        state = self.get(seq)
        if new == 0:
            return 0
        end = state.table.ids[self.layout.full_blocks(state.length) :]
        shared = sum(self.pool.refs(block) > 1 for block in end)
        return shared + self.layout.blocks(state.length + new) - len(state.table)

    def apply(self, draft: Draft) -> None:
        """Make the step count: take its blocks, let lengths grow, register whole prompt units."""
        self.pool.apply(draft.trial)
        self.pool.release([source for source, _ in draft.copies])
        for request in draft.requests:
            state, view = self._states[request.seq], request.blocks
            if view.keep < len(state.table):
                state.table = BlockTable(state.table.ids[: view.keep])
            state.table.extend(view.tail)
            state.length = request.cached + request.new
            if state.hashes:
                self._register_units(state, request.cached)

    def expect(
        self, seq: Hashable, length: int, oldest: int, hashes: Sequence[bytes], trial: Trial
    ) -> SequenceState:
        """The state of a sequence that comes from another cache. Nothing is changed.

        Args:
            seq: A new name.
            length: Its tokens.
            oldest: Tokens before this position do not come.
            hashes: Of the units of its known tokens, or none.
            trial: Where its blocks are chosen.

        Raises:
            ConfigError: If the name is taken.
            CacheFullError: If the pool cannot hold it.
        """
        self.require_new(seq)
        dropped = self.layout.full_blocks(oldest)
        blocks = trial.pick(self.layout.blocks(length) - dropped)
        table = BlockTable(range(dropped))  # any ids: nobody reads them
        table.extend(blocks)
        return SequenceState(length, table, list(hashes), oldest, dropped, oldest)

    def settle(self, seq: Hashable, state: SequenceState) -> None:
        """Make an expected sequence count, once its blocks are taken and written."""
        self._states[seq] = state
        if state.hashes:
            self._register_units(state, 0)

    def hash_units(self, tokens: Sequence[int]) -> list[bytes]:
        """Hash of each whole unit of ``tokens``, chained to those before it."""
        size, result = self.layout.unit_tokens, [b""]
        for start in range(0, len(tokens) - size + 1, size):
            result.append(chain_hash(result[-1], tokens[start : start + size]))
        return result[1:]

    def _register_units(self, state: SequenceState, before: int) -> None:
        tokens, blocks = self.layout.unit_tokens, self.layout.unit_blocks
        done = min(state.length // tokens, len(state.hashes))
        # a unit of several blocks may have lost its first ones, and one may have come in part
        whole = max(-(-state.dropped // blocks), -(-state.begin // tokens))
        for unit in range(max(before // tokens, whole), done):
            ids = state.table.ids[unit * blocks : (unit + 1) * blocks]
            self.pool.register(state.hashes[unit], ids)

    def require_new(self, seq: Hashable, others: Sequence[Hashable] = ()) -> None:
        """Raise ConfigError if ``seq`` is the name of a sequence here, or among ``others``."""
        if seq in self._states or seq in others:
            raise ConfigError(
                f"seq={seq!r}",
                "the name of a sequence is unique",
                "free it first, or choose another",
            )

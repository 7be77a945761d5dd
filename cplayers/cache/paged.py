"""The paged cache of one rank: storage, sequences, and the plan / commit cycle.

    cache.add("a")
    plan = cache.plan([("a", 13)])      # decides everything, changes nothing
    ... every layer: cache.write(plan, layer, k, v); attention over cache.view(...) ...
    cache.commit(plan)                  # the step counts from here on

A step that raises before ``commit`` leaves every length and block table as it was. What it wrote lies
beyond the lengths, in blocks that are free; reusable content that it overwrote is forgotten at the
first write, not before.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cplayers.cache.blocks import BlockPool, Trial, chain_hash
from cplayers.cache.build import RankView, Request, build_plan
from cplayers.cache.layouts import InterleavedLayout, require_positive
from cplayers.cache.plan import StepPlan, Writes
from cplayers.cache.spec import CacheSpec, bytes_per_token
from cplayers.cache.storage import Storage
from cplayers.errors import ConfigError, StateError


@dataclass
class _Sequence:
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of the whole units of its known tokens


@dataclass
class _Pending:
    """What `commit` will apply, and what the first write has to do before."""

    plan: StepPlan
    trial: Trial
    blocks: dict[Hashable, list[int]]
    copies: list[tuple[int, int]]  # copy-on-write: (source block, destination block)
    overwritten: list[int]
    started: bool = False


class PagedKVCache:
    """Paged KV cache of one rank of a context-parallel group.

    Args:
        spec: What a token stores on this rank.
        layout: How a sequence is spread over the group.
        num_layers: Attention layers.
        num_blocks: Virtual blocks in the pool.
        cp_rank: This rank's place in the group that shares the KV cache (DCP).
        dtype: Storage type.
        device: Storage device.
        pcp_rank: This rank's place in the group that shares prompts (PCP).
        pcp_size: Size of that group.

    Raises:
        ConfigError: On a rank outside its group or a size below 1, before anything is allocated.
    """

    def __init__(
        self,
        spec: CacheSpec,
        layout: InterleavedLayout,
        num_layers: int,
        num_blocks: int,
        cp_rank: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        pcp_rank: int = 0,
        pcp_size: int = 1,
    ) -> None:
        require_positive("num_layers", num_layers)
        require_positive("num_blocks", num_blocks)
        require_positive("pcp_size", pcp_size)
        for name, rank, size in (
            ("cp_rank", cp_rank, layout.cp_size),
            ("pcp_rank", pcp_rank, pcp_size),
        ):
            if not 0 <= rank < size:
                raise ConfigError(
                    f"{name}={rank}", f"a rank of a group of {size} is 0..{size - 1}", "pass one"
                )
        self.spec, self.layout, self.dtype = spec, layout, dtype
        self.num_layers = num_layers
        self.view_of_rank = RankView(layout, cp_rank, pcp_rank, pcp_size, torch.device(device))
        self.pool = BlockPool(num_blocks)
        self._sequences: dict[Hashable, _Sequence] = {}
        self._version = 0
        self._pending: _Pending | None = None
        self._storage = Storage(
            spec, num_layers, num_blocks * layout.block_size, dtype, self.view_of_rank.device
        )

    # Sequences

    @property
    def seqs(self) -> tuple[Hashable, ...]:
        """The sequences in the cache, in order of their addition."""
        return tuple(self._sequences)

    def length(self, seq: Hashable) -> int:
        """Committed tokens of ``seq``, all ranks together."""
        return self._get(seq).length

    def block_table(self, seq: Hashable) -> tuple[int, ...]:
        """Block ids of ``seq``."""
        return tuple(self._get(seq).blocks)

    def add(self, seq: Hashable, tokens: Sequence[int] | None = None) -> int:
        """Start a sequence; with its prompt's ``tokens``, reuse a cached prefix of whole units.

        Args:
            seq: A new name.
            tokens: Token ids of the prompt. At least one of them is always left to compute.

        Returns:
            Tokens that the cache holds already: the step computes ``tokens[matched:]``.

        Raises:
            ConfigError: If the name is taken.
        """
        if seq in self._sequences:
            raise ConfigError(
                f"seq={seq!r}", "the name of a sequence is unique", "free it first, or choose another"
            )
        entry = _Sequence()
        if tokens is not None:
            entry.hashes = self._hash_units(tokens)
            whole = max(0, len(tokens) - 1) // self.layout.unit_tokens
            entry.blocks = self.pool.lookup(entry.hashes[:whole])
            self.pool.share(entry.blocks)
            units = len(entry.blocks) // self.layout.unit_blocks
            entry.length = units * self.layout.unit_tokens
            self._invalidate()
        self._sequences[seq] = entry
        return entry.length

    def fork(self, seq: Hashable, new: Hashable) -> None:
        """Start ``new`` with the content of ``seq``; blocks are shared until one of them writes."""
        source = self._get(seq)
        self.add(new)
        self.pool.share(source.blocks)
        self._sequences[new] = _Sequence(source.length, list(source.blocks), list(source.hashes))
        self._invalidate()

    def free(self, seq: Hashable) -> None:
        """Forget a sequence and release its blocks."""
        self.pool.release(self._get(seq).blocks)
        del self._sequences[seq]
        self._invalidate()

    def truncate(self, seq: Hashable, length: int) -> None:
        """Drop the tokens of ``seq`` from position ``length`` on, e.g. rejected draft tokens.

        Raises:
            ConfigError: If ``length`` is negative or above the present length.
        """
        entry = self._get(seq)
        if not 0 <= length <= entry.length:
            raise ConfigError(
                f"length={length}",
                f"{seq!r} holds {entry.length} tokens and can only be cut",
                f"pass 0 <= length <= {entry.length}",
            )
        keep = self.layout.blocks(length)
        self.pool.release(entry.blocks[keep:])
        del entry.blocks[keep:], entry.hashes[length // self.layout.unit_tokens :]
        entry.length = length
        self._invalidate()

    # Steps

    def plan(self, requests: Sequence[tuple[Hashable, int]]) -> StepPlan:
        """Decide a step of ``(sequence, new tokens)``; nothing is changed until it is committed.

        A later plan, or any change of a sequence, makes an earlier plan stale.

        Raises:
            ConfigError: On an unknown or repeated sequence or a negative number of tokens.
            CacheFullError: If the pool cannot hold the step; alike on all ranks.
        """
        names = [seq for seq, _ in requests]
        if len(set(names)) != len(names):
            raise ConfigError(f"seqs={names}", "a step names a sequence once", "merge the entries")
        trial = self.pool.trial()
        pending: dict[Hashable, list[int]] = {}
        copies: list[tuple[int, int]] = []
        overwritten: list[int] = []
        parts = []
        for seq, new in requests:
            entry = self._get(seq)
            if not isinstance(new, int) or new < 0:
                raise ConfigError(f"new tokens of {seq!r}={new!r}", "at least 0", "pass an int >= 0")
            blocks = list(entry.blocks)
            if new:
                self._unshare(entry, blocks, trial, copies, overwritten)
            missing = self.layout.blocks(entry.length + new) - len(blocks)
            blocks += trial.pick(missing, after=blocks[-1] if blocks else None)
            pending[seq] = blocks
            parts.append(Request(seq, entry.length, new, blocks))
        plan = build_plan(parts, self.view_of_rank, self._version + 1)
        self._version += 1
        overwritten += trial.taken
        self._pending = _Pending(plan, trial, pending, copies, overwritten)
        return plan

    def _unshare(
        self,
        entry: _Sequence,
        blocks: list[int],
        trial: Trial,
        copies: list[tuple[int, int]],
        overwritten: list[int],
    ) -> None:
        """Own the blocks into which the first new token of any rank may fall."""
        last = self.layout.cp_size - 1
        first = self.layout.count_before(entry.length, last) // self.layout.block_size
        for i in range(first, len(blocks)):
            if self.pool.refs(blocks[i]) > 1:
                (fresh,) = trial.pick(1, after=blocks[i - 1] if i else None)
                copies.append((blocks[i], fresh))
                blocks[i] = fresh
            elif self.pool.is_hashed(blocks[i]):
                overwritten.append(blocks[i])

    def write(self, plan: StepPlan, layer: int, writes: Writes, *planes: Tensor) -> None:
        """Store rows of a step.

        Args:
            plan: The current plan.
            layer: Layer index.
            writes: ``plan.decode_writes`` or one of ``plan.prefill_writes``.
            planes: One tensor `[rows, heads, dim]` per plane of the spec.
        """
        pending = self._require(plan)
        if not pending.started:
            self._start(pending)
        self._storage.write(layer, writes, planes)

    def _start(self, pending: _Pending) -> None:
        for block in pending.overwritten:
            self.pool.forget(block)
        size = self.layout.block_size
        for source, target in pending.copies:
            self._storage.copy(source * size, target * size, size)
        pending.started = True

    def commit(self, plan: StepPlan) -> None:
        """Make the step count: lengths grow, blocks are taken, whole prompt units become reusable.

        Raises:
            StateError: If the plan is stale or was committed already.
        """
        pending = self._require(plan)
        if not pending.started:
            self._start(pending)
        self.pool.apply(pending.trial)
        if pending.copies:
            self.pool.release([source for source, _ in pending.copies])
        for seq, new in zip(plan.seqs, plan.new, strict=True):
            entry = self._sequences[seq]
            entry.blocks = pending.blocks[seq]
            before, entry.length = entry.length, entry.length + new
            if entry.hashes:
                self._register_units(entry, before)
        self._invalidate()

    def view(self, layer: int, slot: int, length: int) -> list[Tensor]:
        """``length`` keys of one layer from ``slot`` on, in place, `[length, heads, dim]` per plane."""
        return self._storage.view(layer, slot, length)

    # Capacity

    @property
    def nbytes(self) -> int:
        """Bytes of storage on this rank."""
        return self.pool.num_blocks * self.layout.block_size * self.token_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that sequences refer to, on this rank."""
        return self.pool.num_used * self.layout.block_size * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on its owner, over all layers."""
        return bytes_per_token(self.spec, self.num_layers, self.dtype)

    def blocks_for(self, requests: Sequence[tuple[Hashable, int]]) -> int:
        """Additional blocks that the step would take, copy-on-write aside."""
        return sum(
            max(0, self.layout.blocks(self.length(seq) + new) - len(self._get(seq).blocks))
            for seq, new in requests
        )

    def grow(self, num_blocks: int) -> None:
        """Enlarge the cache to ``num_blocks`` in place; contents and ids stay."""
        if num_blocks <= self.pool.num_blocks:
            return
        self._storage.grow(num_blocks * self.layout.block_size)
        self.pool.grow(num_blocks)
        self._invalidate()

    # Helpers

    def _get(self, seq: Hashable) -> _Sequence:
        try:
            return self._sequences[seq]
        except KeyError:
            raise ConfigError(
                f"seq={seq!r}", "a sequence is added before it is used", f"add it; known: {self.seqs}"
            ) from None

    def _require(self, plan: StepPlan) -> _Pending:
        if self._pending is None or self._pending.plan is not plan:
            raise StateError(
                "the plan is stale: the cache was planned, committed or changed since; "
                "plan the step again"
            )
        return self._pending

    def _invalidate(self) -> None:
        self._pending = None

    def _hash_units(self, tokens: Sequence[int]) -> list[bytes]:
        size, result = self.layout.unit_tokens, [b""]
        for start in range(0, len(tokens) - size + 1, size):
            result.append(chain_hash(result[-1], tokens[start : start + size]))
        return result[1:]

    def _register_units(self, entry: _Sequence, before: int) -> None:
        tokens, blocks = self.layout.unit_tokens, self.layout.unit_blocks
        done = min(entry.length // tokens, len(entry.hashes))
        for unit in range(before // tokens, done):
            self.pool.register(
                entry.hashes[unit], entry.blocks[unit * blocks : (unit + 1) * blocks]
            )

    def __repr__(self) -> str:
        view = self.view_of_rank
        return (
            f"PagedKVCache({self.spec}, {self.layout}, num_layers={self.num_layers}, "
            f"num_blocks={self.pool.num_blocks}, cp_rank={view.cp_rank}, dtype={self.dtype})"
        )

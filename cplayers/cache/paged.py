"""The paged cache of one rank: storage, sequences, and the plan / commit cycle.

    cache.add("a")
    plan = cache.plan([("a", 13)])      # decides everything, takes nothing
    ... every layer: cache.write(plan, layer, k, v); attention over cache.view(...) ...
    cache.commit(plan)                  # the step counts from here on

A step that raises before ``commit`` leaves every length, block table and block as it was: what it
wrote lies beyond the lengths, in slots that nobody reads. Reusable content that a step may
overwrite is forgotten by ``plan`` and not by the first write, because a step may fail on one rank
before and on another after its first write, and the ranks must know of the same content afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cplayers.cache.blocks import BlockPool
from cplayers.cache.build import build_plan
from cplayers.cache.layouts import InterleavedLayout, require_positive
from cplayers.cache.plan import StepPlan
from cplayers.cache.portable import PortableCache
from cplayers.cache.sequences import Draft, SequenceTable
from cplayers.cache.spec import CacheSpec, bytes_per_token
from cplayers.cache.storage import Storage
from cplayers.cache.table_store import TableStore
from cplayers.cache.view import RankView, Writes
from cplayers.errors import StateError

MAX_DECODE_TOKENS = 16
"""New tokens up to which a sequence with cached ones decodes: one token, or a draft to verify."""


@dataclass
class _Pending:
    """The step that was planned last, not committed yet."""

    plan: StepPlan
    draft: Draft
    copied: bool = False


class PagedKVCache(PortableCache):
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
        self.spec, self.layout, self.dtype = spec, layout, dtype
        self.num_layers = num_layers
        self.view_of_rank = RankView(layout, cp_rank, pcp_rank, pcp_size, torch.device(device))
        self.pool = BlockPool(num_blocks)
        self._sequences = SequenceTable(layout, self.pool)
        self.tables = TableStore(self.view_of_rank.device)
        self._version = 0
        self._pending: _Pending | None = None
        self.storage = Storage(
            spec, num_layers, num_blocks * layout.block_size, dtype, self.view_of_rank.device
        )

    # Sequences

    @property
    def seqs(self) -> tuple[Hashable, ...]:
        """The sequences in the cache, in order of their addition."""
        return self._sequences.names

    def length(self, seq: Hashable) -> int:
        """Committed tokens of ``seq``, all ranks together."""
        return self._sequences.get(seq).length

    def block_table(self, seq: Hashable) -> tuple[int, ...]:
        """Block ids of ``seq``, -1 for those that were given back."""
        state = self._sequences.get(seq)
        return (*(-1 for _ in range(state.dropped)), *state.held)

    def add(self, seq: Hashable, tokens: Sequence[int] | None = None) -> int:
        """Start a sequence; with its prompt's ``tokens``, reuse a cached prefix of whole units.

        Args:
            seq: A new name.
            tokens: Token ids of the prompt. At least one of them is always left to compute. The
                steps that follow are taken at their word: they compute these tokens.

        Returns:
            Tokens that the cache holds already: the step computes ``tokens[matched:]``.

        Raises:
            ConfigError: If the name is taken.
        """
        return self._sequences.add(seq, tokens)

    def fork(self, seq: Hashable, new: Hashable) -> None:
        """Start ``new`` with the content of ``seq``; blocks are shared until one of them writes.

        Raises:
            ConfigError: If ``seq`` is unknown or the name ``new`` is taken.
        """
        self._sequences.fork(seq, new)
        self._pending = None

    def free(self, seq: Hashable) -> None:
        """Forget a sequence and release its blocks; registered content stays until it is evicted.

        A plan in which ``seq`` has no part stays good: it takes no block that could be released.
        So a sequence may be freed at any time, also by garbage collection amid a step.

        Raises:
            ConfigError: If ``seq`` is unknown.
        """
        self._sequences.free(seq)
        self.tables.drop(seq)
        if self._pending is not None and seq in self._pending.plan.seqs:
            self._pending = None

    def truncate(self, seq: Hashable, length: int) -> None:
        """Drop the tokens of ``seq`` from position ``length`` on, e.g. rejected draft tokens.

        Raises:
            ConfigError: If ``length`` is negative, above the present length, or among tokens that
                were forgotten.
        """
        self._sequences.truncate(seq, length)
        self._pending = None

    def forget(self, seq: Hashable, position: int) -> None:
        """Give back the blocks of ``seq`` whose tokens all lie before ``position``.

        For models in which every layer has a sliding window: before ``length + 1 - window`` no new
        token sees anything. A later step with a layer that does see it raises StateError.

        Args:
            seq: The sequence.
            position: Tokens before it are out of every window; alike on all ranks.

        Raises:
            ConfigError: If ``seq`` is unknown.
        """
        self._sequences.forget(seq, position)
        if self._pending is not None and seq in self._pending.plan.seqs:
            self._pending = None

    # Steps

    def plan(
        self,
        requests: Sequence[tuple[Hashable, int]],
        *,
        max_decode_tokens: int = MAX_DECODE_TOKENS,
    ) -> StepPlan:
        """Decide a step of ``(sequence, new tokens)``; nothing is taken until it is committed.

        A later plan, a fork, a cut, growth, and freeing or forgetting a sequence of it make a plan
        stale. Reusable content of blocks that it would take is forgotten at once.

        Args:
            requests: The sequences in the step, each with its number of new tokens.
            max_decode_tokens: A sequence with cached tokens and at most so many new ones decodes:
                its new tokens are computed on every PCP rank, and visit the cached ones. The new
                tokens of all others are shared out over PCP as prompts are. Alike on all ranks.

        Raises:
            ConfigError: On an unknown or repeated sequence or a negative number of tokens.
            CacheFullError: If the pool cannot hold the step; alike on all ranks.
        """
        draft = self._sequences.draft(requests)
        version = self._version + 1
        plan = build_plan(draft, self.view_of_rank, self.tables, version, max_decode_tokens)
        for block in (*draft.overwritten, *draft.trial.taken):
            self.pool.forget(block)
        self._version = version
        self._pending = _Pending(plan, draft)
        return plan

    def write(self, plan: StepPlan, layer: int, writes: Writes, *planes: Tensor) -> None:
        """Store rows of a step.

        Args:
            plan: The current plan.
            layer: Layer index.
            writes: ``plan.decode_writes`` or one of ``plan.prefill_writes``.
            planes: One tensor `[rows, heads, dim]` per plane of the spec.

        Raises:
            StateError: If the plan is stale or was committed already.
        """
        if not plan.is_static:  # else it was prepared when it was loaded
            self.prepare(plan)
        self.storage.write(layer, writes, planes)

    def prepare(self, plan: StepPlan) -> None:
        """Make sure that ``plan`` may be written: it is current, and blocks it writes are its own.

        Raises:
            StateError: If the plan is stale or was committed already.
        """
        self._copy_once(self._require(plan))

    def commit(self, plan: StepPlan) -> None:
        """Make the step count: lengths grow, blocks are taken, whole prompt units become reusable.

        Raises:
            StateError: If the plan is stale or was committed already.
        """
        pending = self._require(plan)
        self._copy_once(pending)
        self._sequences.apply(pending.draft)
        self.tables.settle()
        self._pending = None

    def view(self, layer: int, slot: int, length: int) -> list[Tensor]:
        """``length`` keys of a layer from ``slot`` on, in place: `[length, heads, dim]` a plane."""
        return self.storage.view(layer, slot, length)

    def _require(self, plan: StepPlan) -> _Pending:
        if self._pending is None or self._pending.plan is not plan:
            raise StateError(
                "the plan is stale: the cache was planned, committed or changed since; "
                "plan the step again"
            )
        return self._pending

    def _copy_once(self, pending: _Pending) -> None:
        """Copy the blocks that stop being shared, before the first row is written."""
        if not pending.copied:
            size = self.layout.block_size
            for source, target in pending.draft.copies:
                self.storage.copy(source * size, target * size, size)
            pending.copied = True

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
        """Blocks that the step would take from the pool, copy-on-write included.

        Raises:
            ConfigError: On an unknown sequence.
        """
        return sum(self._sequences.blocks_for(seq, new) for seq, new in requests)

    def grow(self, num_blocks: int) -> None:
        """Enlarge the cache to ``num_blocks`` in place; contents and ids stay."""
        if num_blocks <= self.pool.num_blocks:
            return
        self.storage.grow(num_blocks * self.layout.block_size)
        self.pool.grow(num_blocks)
        self._pending = None

    def __repr__(self) -> str:
        view = self.view_of_rank
        return (
            f"PagedKVCache({self.spec}, {self.layout}, num_layers={self.num_layers}, "
            f"num_blocks={self.pool.num_blocks}, cp_rank={view.cp_rank}, dtype={self.dtype})"
        )

"""Decode steps in buffers that stay where they are, for CUDA graphs and torch.compile.

    buffers = StaticDecode(cache, rows=8)                 # once
    for each step:
        plan = cache.plan([(seq, 1) for seq in running])  # at most 8 rows, none of them a prompt's
        step = buffers.load(plan)                         # the same object each time
        ... replay the graph, or call what torch.compile made of the layers with `step` ...
        cache.commit(plan)

A step of fewer rows is filled up with rows that see nothing and are written nowhere. `load` does
all that depends on the data on the host; what layers read of the step are tensors at fixed
addresses and numbers that never change, so that capturing or compiling them once is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cplayers.cache.paged import PagedKVCache
from cplayers.cache.plan import StepPlan
from cplayers.cache.view import Writes
from cplayers.errors import ConfigError, StateError
from cplayers.ops import PagedKeys


class StaticDecode:
    """Buffers for decode steps of one cache.

    Args:
        cache: The cache. Its table of blocks is enlarged now and may not grow any more.
        rows: Most rows of a step.
        new_tokens: Most new tokens of a sequence in a step; above 1 for drafts to verify.
        max_tokens: Most tokens of a sequence, all ranks together; by default as many as the pool
            holds.
        sequences: Most sequences in the cache at a time; by default one for each row.
        windows: Sliding windows of the layers, ``None`` for those without one.

    A layer needs a backend that looks up block tables (`CachedAttention.local_backends`), and a way
    of decoding in which queries travel; ``overlap`` does nothing here.

    Attributes:
        positions: Position of each row in its sequence, int64 `[rows]`; 0 in rows that fill up.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        rows: int,
        *,
        new_tokens: int = 1,
        max_tokens: int | None = None,
        sequences: int | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        if rows < 1:
            raise ConfigError(f"rows={rows}", "a step has at least one row", "pass rows >= 1")
        self.cache, self.rows = cache, rows
        blocks = cache.pool.num_blocks
        if max_tokens is not None:
            blocks = min(blocks, cache.layout.blocks(max_tokens))
        cache.tables.reserve(sequences or rows, blocks)
        device, table, size = cache.view_of_rank.device, cache.tables.table, cache.layout.block_size
        paged = {}
        with torch.inference_mode(False):  # so that both later modes may write in place
            self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
            slots = torch.full_like(self.positions, -1)
            for window in windows:
                request, lo, hi = (torch.zeros_like(self.positions) for _ in range(3))
                paged[window] = PagedKeys(table, size, request, lo, hi, new_tokens)
        self._new_tokens, self._at = new_tokens, self._addresses()
        empty = cache.plan([])
        self._step = replace(
            empty,
            positions=self.positions,
            tokens=torch.arange(rows, device=device),
            num_decode=rows,
            slot_mapping=slots,
            decode_writes=Writes(slots=slots),
            is_static=True,
            _paged=paged,
        )

    def load(self, plan: StepPlan) -> StepPlan:
        """Put a step into the buffers.

        Args:
            plan: The cache's current plan.

        Returns:
            The step for the layers, the same object every time.

        Raises:
            ConfigError: The plan has too many rows, or rows of prompts.
            StateError: The plan is stale, or the cache or its table of blocks has grown.
        """
        most = max(plan.new, default=0)
        if plan.prefill is not None or plan.num_rows > self.rows or most > self._new_tokens:
            raise ConfigError(
                f"a plan of {plan.num_rows} rows, {plan.num_rows - plan.num_decode} of prompts, "
                f"up to {most} of a sequence",
                f"these buffers hold up to {self.rows} rows that decode, {self._new_tokens} of a "
                "sequence",
                "run prompts without buffers; make buffers for more rows or new_tokens",
            )
        self.cache.prepare(plan)
        if self._addresses() != self._at:
            raise StateError(
                "the cache or its table of blocks has grown and lies elsewhere; remedy: make the "
                "buffers with more sequences or max_tokens, and capture or compile again"
            )
        for window, keys in self._step._paged.items():
            found = plan.paged(window)
            for buffer, value in zip(keys[2:5], found[2:5], strict=True):
                _fill(buffer, value, 0)
        _fill(self.positions, plan.positions, 0)
        _fill(self._step.slot_mapping, plan.slot_mapping, -1)
        return self._step

    def _addresses(self) -> list[int]:
        """Of what kernels read and write."""
        return [t.data_ptr() for t in (self.cache.tables.table, *self.cache.storage.stores(0))]


def _fill(buffer: Tensor, values: Tensor, rest: int) -> None:
    buffer[: len(values)] = values
    buffer[len(values) :] = rest

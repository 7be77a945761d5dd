"""A call's ``[B, S]`` columns with their padding, and the packed real tokens ``[P]`` they hold."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from cplayers.errors import ConfigError


class Chunk(NamedTuple):
    """A part of the new tokens, computed in one step.

    Attributes:
        counts: Its tokens of each row.
        tokens: Which packed tokens these are `[P']`, row after row, or ``None`` for all.
    """

    counts: list[int]
    tokens: Tensor | None

    def of(self, packed: Tensor) -> Tensor:
        """Its part of something given per packed token."""
        return packed if self.tokens is None else packed[self.tokens.to(packed.device)]

    def place(self, wanted: Tensor) -> tuple[Tensor | slice, Tensor]:
        """Which of the ``wanted`` packed tokens `[s]` are its own, and where they are in it.

        Args:
            wanted: Packed indices over all chunks.

        Returns:
            An index into ``wanted``, and for each that it picks the index among its own tokens.
        """
        if self.tokens is None:
            return slice(None), wanted
        at = torch.searchsorted(self.tokens, wanted.contiguous()).clamp(max=len(self.tokens) - 1)
        mine = self.tokens[at] == wanted
        return mine.nonzero()[:, 0], at[mine]


class Batch:
    """The new columns of a call.

    Args:
        tokens: Token ids `[B, S]`, or embeddings `[B, S, hidden]`.
        attention_mask: Mask over cached and new columns `[B, past + S]`, or ``None``.
        past: Columns in the cache.
        seen: Which of those are tokens, bool `[B, past]`, or ``None`` where all are.

    Attributes:
        rows: B.
        columns: S.
        real: Which new columns are tokens `[B, S]`, or ``None`` where all are.
        counts: New real tokens of each row.

    Raises:
        ConfigError: On a mask of another shape, or one that hides cached tokens.
    """

    def __init__(
        self, tokens: Tensor, attention_mask: Tensor | None, past: int, seen: Tensor | None
    ) -> None:
        self.tokens, self.past = tokens, past
        self.rows, self.columns = tokens.shape[:2]
        self._before = seen
        self.real = None if attention_mask is None else self._split(attention_mask)
        self.counts: list[int] = (
            [self.columns] * self.rows if self.real is None else self.real.sum(1).tolist()
        )

    def _split(self, mask: Tensor) -> Tensor | None:
        """The new columns of the mask, once its cached ones are checked."""
        wanted = (self.rows, self.past + self.columns)
        if tuple(mask.shape) != wanted:
            raise ConfigError(
                f"attention_mask of shape {tuple(mask.shape)}",
                f"a mask has shape {wanted}: a column for each of {self.past} cached and "
                f"{self.columns} new tokens",
                "pass the tokenizer's 2-D mask; causality is the library's work",
            )
        mask = mask.to(torch.bool)
        before, real = mask[:, : self.past], mask[:, self.past :]
        if not (before.all() if self._before is None else torch.equal(before, self._before)):
            raise ConfigError(
                "an attention_mask that differs from the cached one",
                "a token is cached or left out when it is computed and cannot be masked later",
                "extend the mask of the earlier calls, or start without their cache",
            )
        return None if real.all() else real

    def seen(self) -> Tensor | None:
        """Which columns, cached and new, are tokens `[B, past + S]`; ``None`` where all are."""
        if self._before is None and self.real is None:
            return None
        parts = [(self._before, self.past), (self.real, self.columns)]
        return torch.cat(
            [self.tokens.new_ones(self.rows, n).bool() if x is None else x for x, n in parts], dim=1
        )

    def pack(self, x: Tensor) -> Tensor:
        """`[B, S, ...]` to the real tokens `[P, ...]`, row after row."""
        return x.flatten(0, 1) if self.real is None else x[self.real]

    @property
    def has_gaps(self) -> bool:
        """Whether a row has padding between its tokens, cached and new."""
        seen = self.seen()
        if seen is None:
            return False
        before, behind = seen.cumsum(1) > 0, seen.flip(1).cumsum(1).flip(1) > 0
        return bool((before & behind & ~seen).any())

    def chunks(self, size: int | None) -> list[Chunk]:
        """The new tokens in chunks of at most ``size`` of each row; ``None``: all at once.

        Rows of few tokens have none left in later chunks.
        """
        longest = max(self.counts)
        if size is None or longest <= size:
            return [Chunk(self.counts, None)]
        starts = list(itertools.accumulate(self.counts, initial=0))
        chunks = []
        for first in range(0, longest, size):
            counts = [min(size, max(0, count - first)) for count in self.counts]
            parts = [
                torch.arange(start + first, start + first + count)
                for start, count in zip(starts, counts, strict=False)
            ]
            chunks.append(Chunk(counts, torch.cat(parts)))
        return chunks

    def rope_positions(self, given: Tensor | None) -> Tensor:
        """Position of each packed token for the rotary embedding, int64 `[P]`.

        Given ones win. Otherwise a token's column, counted from the first real one of its row:
        padding in front shifts nothing, and padding in between counts, as it does in transformers.
        """
        if given is None:
            given = torch.arange(self.past, self.past + self.columns, device=self.tokens.device)
            seen = self.seen()
            if seen is not None:
                given = given - (seen.long().cumsum(1) == 0).sum(1, keepdim=True)
        elif given.shape[-1] != self.columns:
            raise ConfigError(
                f"position_ids of shape {tuple(given.shape)}",
                f"there is one position per new column, and there are {self.columns}",
                "leave position_ids out, or pass those of the new columns",
            )
        return self.pack(given.expand(self.rows, self.columns))

    def select(self, keep: int | Tensor) -> tuple[Tensor, Tensor | None]:
        """The columns whose logits are wanted: the last ``keep`` (0: all), or those listed.

        Returns:
            Packed index of each wanted real token, row after row, and which of the wanted
            `[B, columns]` are real (``None``: all).
        """
        packed = torch.arange(sum(self.counts))
        wanted: slice | Tensor
        if isinstance(keep, Tensor):
            wanted = keep.cpu()
        else:
            wanted = slice(-keep if 0 < keep < self.columns else 0, None)
        if self.real is None:
            return packed.view(self.rows, self.columns)[:, wanted].flatten(), None
        index = torch.full((self.rows, self.columns), -1)
        real = self.real.cpu()
        index[real] = packed
        return index[:, wanted][real[:, wanted]], real[:, wanted]

"""One call's ``[B, S]`` columns with their padding, and the packed real tokens ``[P]`` they hold."""

from __future__ import annotations

import torch
from torch import Tensor

from cplayers.errors import ConfigError


class Batch:
    """The new columns of a call.

    Args:
        tokens: Token ids `[B, S]`, or embeddings `[B, S, hidden]`.
        attention_mask: Mask over cached and new columns `[B, past + S]`, or ``None``.
        past: Columns in the cache.
        first: First real column of each row so far (``past`` where there is none yet).

    Attributes:
        rows: B.
        columns: S.
        real: Which new columns are tokens `[B, S]`, or ``None`` where all are.
        counts: New real tokens of each row.
        first: First real column of each row, these columns included.

    Raises:
        ConfigError: On a mask of another shape.
    """

    def __init__(
        self, tokens: Tensor, attention_mask: Tensor | None, past: int, first: list[int]
    ) -> None:
        self.tokens, self.past = tokens, past
        self.rows, self.columns = tokens.shape[:2]
        self.real = self._real(attention_mask)
        if self.real is None:
            self.counts = [self.columns] * self.rows
            self.first = list(first)
        else:
            self.counts = self.real.sum(1).tolist()
            leading = (self.real.long().cumsum(1) == 0).sum(1).tolist()
            self.first = [
                known if known < past else past + pads
                for known, pads in zip(first, leading, strict=True)
            ]

    def _real(self, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        wanted = (self.rows, self.past + self.columns)
        if tuple(mask.shape) != wanted:
            raise ConfigError(
                f"attention_mask of shape {tuple(mask.shape)}",
                f"a mask has shape {wanted}: a column for each of {self.past} cached and "
                f"{self.columns} new tokens",
                "pass the tokenizer's 2-D mask; causality is the library's work",
            )
        real = mask[:, self.past :].to(torch.bool)
        return None if bool(real.all()) else real

    def trailing(self, row: int) -> int:
        """Real columns after the row's last padding column."""
        if self.real is None:
            return self.columns
        pads = (~self.real[row]).nonzero()
        return self.columns - 1 - int(pads[-1]) if len(pads) else self.columns

    def pack(self, x: Tensor) -> Tensor:
        """`[B, S, ...]` to the real tokens `[P, ...]`, row after row."""
        return x.flatten(0, 1) if self.real is None else x[self.real]

    def rope_positions(self, given: Tensor | None) -> Tensor:
        """Position of each packed token for the rotary embedding, int64 `[P]`.

        Given ones win. Otherwise a token's column, counted from the first real one of its row:
        padding in front shifts nothing, and padding in between counts, as it does in transformers.
        """
        if given is None:
            column = torch.arange(self.past, self.past + self.columns, device=self.tokens.device)
            first = torch.tensor(self.first, device=self.tokens.device)
            given = column - first[:, None]
        elif given.shape[-1] != self.columns:
            raise ConfigError(
                f"position_ids of shape {tuple(given.shape)}",
                f"there are {self.columns} new columns",
                "pass one position per new column",
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

"""The zigzag split of several prompts packed one after another, for all of them at once.

    packed tokens      the prompts' tokens, prompt after prompt, F in all
    piece of rank r    its share of each prompt, prompt after prompt
    gathered           the pieces of all ranks, each padded to the width of the largest

Prompts of any length are split, so that the pieces need not be equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cplayers.cache.layouts import mirrored, zigzag_count
from cplayers.ops import Spans, spans


class PackedZigzag:
    """`ZigzagLayout` of each of several prompts.

    Args:
        cp_size: Ranks that share the prompts.
        lengths: Tokens of each prompt, int64 `[R]`.
        prompt: Prompt of each packed token, int64 `[F]`.
        pos: Position of each packed token in its prompt, int64 `[F]`.

    Attributes:
        owner: Rank of each packed token, `[F]`.
        order: Packed token of each row, piece after piece, `[F]`.
        counts: Rows of each rank's piece.
        width: Rows of the largest piece.
        row: Row of each packed token in its owner's piece, `[F]`.
    """

    def __init__(self, cp_size: int, lengths: Tensor, prompt: Tensor, pos: Tensor) -> None:
        self.cp_size, self._lengths, self._prompt, self._pos = cp_size, lengths, prompt, pos
        self._chunks = (-(-lengths // (2 * cp_size))).clamp(min=1)
        self.owner = mirrored(pos // self._chunks[prompt], cp_size)
        # A stable sort keeps the prompts, and the positions within each, in order.
        self.order = self.owner.argsort(stable=True)
        counts = self.owner.bincount(minlength=cp_size)
        self.counts: tuple[int, ...] = tuple(counts.tolist())
        self.width = max(self.counts)
        self._starts = counts.cumsum(0) - counts
        self.row = torch.empty_like(self.order)
        self.row[self.order] = torch.arange(len(pos)) - self._starts[self.owner[self.order]]

    def piece(self, rank: int) -> Tensor:
        """Packed tokens of the rows of ``rank``."""
        start = int(self._starts[rank])
        return self.order[start : start + self.counts[rank]]

    def gathered(self, values: Tensor, fill: int) -> Tensor:
        """``values`` of the packed tokens in gathered order, ``fill`` in the padding."""
        result = torch.full((self.cp_size * self.width,), fill, dtype=values.dtype)
        result[self.owner * self.width + self.row] = values
        return result

    def spans(self, rank: int, source: int, window: int | None = None) -> Spans:
        """What the rows of ``rank`` see of the piece of ``source``, as rows of that piece."""
        rows = self.piece(rank)
        prompt = self._prompt[rows]
        share = zigzag_count(self._lengths, self._chunks, source, self.cp_size)
        offset = (share.cumsum(0) - share)[prompt]
        chunk = self._chunks[prompt]
        lo, hi = spans(
            self._pos[rows], lambda n: zigzag_count(n, chunk, source, self.cp_size), window
        )
        return Spans(lo + offset, hi + offset)

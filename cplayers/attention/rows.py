"""The rows of a step inside a layer, before attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """What a layer has projected for its rows.

    Attributes:
        x: Hidden states `[T, hidden]`.
        cos: Rotary embedding `[T, H]`.
        sin: Likewise.
        k: Keys of this rank's KV heads, rotated, `[T, K, H]`.
        v: Values `[T, K, V]`.
    """

    x: Tensor
    cos: Tensor
    sin: Tensor
    k: Tensor
    v: Tensor

    def part(self, start: int, stop: int) -> Rows:
        """Rows ``start..stop``; the same object where these are all."""
        if start == 0 and stop == len(self.x):
            return self
        return Rows(*(t[start:stop] for t in self))

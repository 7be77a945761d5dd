"""Attention tile by tile, for kernels that know no spans.

    for each tile:
        full     every row sees all keys                           -> full
        causal   prefix that all rows see -> full, square -> causal,  merged
        masked   keys that all rows see   -> full, both rims -> masked,  merged

so that a kernel needs three forms, and a mask never grows with the context.
Inside, keys and values are head-major, `[K, S, H]`: contiguous rows per head in the paged cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cplayers.ops.partial import Partial, empty, merge
from cplayers.ops.spans import Tile, tile_rows

COMMON_KEYS = 128
"""A masked tile whose rows have fewer keys in common is one masked call instead of up to three."""


class Kernels(NamedTuple):
    """The three forms, each ``(q [t, N, H], k [K, s, H], v [K, s, V], ...) -> Partial``, t, s >= 1.

    Attributes:
        full: ``full(q, k, v, scale, softcap)``: every row sees every key.
        causal: ``causal(q, k, v, scale, softcap)``: t = s, row i sees the keys 0..i.
        masked: ``masked(q, k, v, lo, hi, scale, softcap)``: row i sees lo[i]..hi[i]-1, clipped to
            0..s-1, which may be nothing.
    """

    full: Callable[[Tensor, Tensor, Tensor, float, float | None], Partial]
    causal: Callable[[Tensor, Tensor, Tensor, float, float | None], Partial]
    masked: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, float | None], Partial]

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lo: Tensor,
        hi: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        tiles: Sequence[Tile] | None = None,
    ) -> Partial:
        """Attend; see `cplayers.ops.attend` for the arguments."""
        if tiles is None:
            tiles = tile_rows(lo, hi)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        num_tokens, num_heads = q.shape[:2]
        if len(tiles) == 1 and tiles[0].row1 - tiles[0].row0 == num_tokens:
            out, lse = self._tile(tiles[0], q, k, v, lo, hi, scale, softcap)
            return Partial(out, lse.float())
        result = empty(num_tokens, num_heads, v.shape[-1], q.dtype, q.device)
        for tile in tiles:
            rows = slice(tile.row0, tile.row1)
            out, lse = self._tile(tile, q[rows], k, v, lo[rows], hi[rows], scale, softcap)
            result.out[rows] = out
            result.lse[rows] = lse
        return result

    def _tile(
        self,
        tile: Tile,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lo: Tensor,
        hi: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Partial:
        keys = tile.hi - tile.lo
        if keys != k.shape[1]:
            k, v = k.narrow(1, tile.lo, keys), v.narrow(1, tile.lo, keys)
        if tile.kind == "full":
            return self.full(q, k, v, scale, softcap)
        if tile.kind == "causal":
            prefix = keys - len(q)
            square = self.causal(q, k[:, prefix:], v[:, prefix:], scale, softcap)
            if not prefix:
                return square
            return merge([self.full(q, k[:, :prefix], v[:, :prefix], scale, softcap), square])
        lo, hi = lo - tile.lo, hi - tile.lo
        left, right = torch.stack([lo.amax(), hi.amin()]).tolist()
        if right - left < COMMON_KEYS:
            return self.masked(q, k, v, lo, hi, scale, softcap)
        parts = [self.full(q, k[:, left:right], v[:, left:right], scale, softcap)]
        for a, b in ((0, left), (right, keys)):
            if a < b:
                rim_k, rim_v = k[:, a:b], v[:, a:b]
                parts.append(self.masked(q, rim_k, rim_v, lo - a, hi - a, scale, softcap))
        return merge(parts)


def pack(q: Tensor, num_kv_heads: int) -> Tensor:
    """`[t, N, H]` -> `[K, t*G, H]`: the query heads of a KV head as rows, which share its keys."""
    t, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    if t == 1:
        return q.reshape(num_kv_heads, group, head_dim)
    q = q.view(t, num_kv_heads, group, head_dim).transpose(0, 1)
    return q.reshape(num_kv_heads, t * group, head_dim)


def unpack(rows: Partial, num_tokens: int) -> Partial:
    """Undo `pack`: out `[K, t*G, V]`, lse `[K, t*G]` -> `[t, N, V]`, `[t, N]`."""
    out, lse = rows
    num_kv_heads, num_rows, value_dim = out.shape
    num_heads = num_kv_heads * (num_rows // num_tokens)
    if num_tokens == 1:
        return Partial(out.reshape(1, num_heads, value_dim), lse.reshape(1, num_heads))
    group = num_rows // num_tokens
    out = out.reshape(num_kv_heads, num_tokens, group, value_dim).transpose(0, 1)
    lse = lse.reshape(num_kv_heads, num_tokens, group).transpose(0, 1)
    return Partial(
        out.reshape(num_tokens, num_heads, value_dim), lse.reshape(num_tokens, num_heads)
    )


def device_refusal(q: Tensor) -> str | None:
    """Why a backend made for the CPU cannot take ``q``."""
    return None if q.device.type == "cpu" else f"it runs on the CPU, q is on {q.device}"


def is_prefix(v: Tensor, k: Tensor) -> bool:
    """Whether v is the first columns of k, as with latents, so that one copy serves both."""
    return (
        v.data_ptr() == k.data_ptr()
        and v.stride() == k.stride()
        and v.shape[2] <= k.shape[2]
        and v.requires_grad == k.requires_grad  # a detached view must stay without gradient
    )

"""The up-projection of MLA, and the two forms of attention that it allows.

A token is stored as its latent c `[L]` and a rotary key `[R]` that all heads share. Per head, with
W_UK `[P, L]` and W_UV `[V, L]`,

    key = (W_UK c, rotary key)      value = W_UV c      query = (nope [P], rope [R])

    expanded   keys and values as they are: P + R and V wide, one per head, made anew from c
    absorbed   nope . (W_UK c) = (W_UK^T nope) . c: the query goes into the latent instead, reads
               the one stored row as key, L + R wide, and as value, L wide; W_UV is applied to the
               result. No key is ever expanded.

Both are exact (DeepSeek-V2, arXiv:2405.04434, section 2.1). A query-key pair costs P + R + V or
2L + R multiplications a head; expanding a key costs L * (P + V) a head, whatever the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class UpProjection(NamedTuple):
    """W_UK and W_UV of some heads, as views of ``kv_b_proj``.

    Attributes:
        weight: `[N, P + V, L]`.
        nope_dim: P.
    """

    weight: Tensor
    nope_dim: int

    def absorb(self, nope: Tensor, rope: Tensor) -> Tensor:
        """Queries of the latent `[T, N, L + R]` from nope `[T, N, P]` and rope `[T, N, R]`."""
        inside = torch.bmm(nope.transpose(0, 1), self.weight[:, : self.nope_dim])
        return torch.cat([inside.transpose(0, 1), rope], dim=-1)

    def values(self, out: Tensor) -> Tensor:
        """W_UV of attention outputs in the latent: `[T, N, L]` to `[T, N, V]`."""
        # the weight on the left: on the right, in bf16, its transpose would be copied
        w_uv = self.weight[:, self.nope_dim :]
        return torch.bmm(w_uv, out.permute(1, 2, 0)).permute(2, 0, 1)

    def expand(self, planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys `[S, N, P + R]` and values `[S, N, V]` of stored rows `[S, 1, L + R]`."""
        (stored,) = planes
        heads, width, rank = self.weight.shape
        latent, rope = stored.squeeze(1).tensor_split([rank], dim=-1)
        both = functional.linear(latent, self.weight.reshape(-1, rank)).view(-1, heads, width)
        shared = rope.unsqueeze(1).expand(-1, heads, -1)
        return torch.cat([both[..., : self.nope_dim], shared], dim=-1), both[..., self.nope_dim :]

    def absorbs(self, num_rows: int) -> bool:
        """Whether the absorbed form is the cheaper one for so many rows over the same keys."""
        _, width, rank = self.weight.shape
        return num_rows * (2 * rank - width) < rank * width

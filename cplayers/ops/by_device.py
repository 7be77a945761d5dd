"""Kernel or plain torch, by the device of the tensors: the one place where that is decided.

On a CUDA device that the kernels are made for, each function here is the one of the same name in
`cplayers.ops.kernels`, imported with the first call; anywhere else it is the one in
`cplayers.ops.plain`. Attention itself is not among them: it has backends (`cplayers.ops.attend`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cplayers.ops import plain
from cplayers.ops.device import refuse_kernels
from cplayers.ops.partial import Partial


def cache_write(slot_mapping: Tensor, planes: Sequence[Tensor], stores: Sequence[Tensor]) -> None:
    """Write each row of every plane to its slot, in the store's dtype, without a look at values.

    No two rows may have the same slot.

    Args:
        slot_mapping: Slot of each row, int `[T]`; a row is skipped whose slot is -1.
        planes: Rows of each plane, `[T, heads, dim]`.
        stores: Their caches, `[heads, slots, dim]`, all with the same slots; written in place.
    """
    if refuse_kernels(*planes, *stores) is not None:
        plain.cache_write(slot_mapping, planes, stores)
        return
    from cplayers.ops import kernels

    kernels.cache_write(slot_mapping, planes, stores)


def pack(partial: Partial, *, parts: int = 1) -> Tensor:
    """out and lse side by side, as one message; see `cplayers.ops.kernels.pack`.

    Args:
        partial: out `[T, N, V]` and lse `[T, N]` in fp32.
        parts: Into how many equal parts the heads are cut.

    Returns:
        `[parts, T, N / parts, W]` in a type of at most 4 bytes per element, W of them being the
        bytes of V elements and 4 more.
    """
    if refuse_kernels(partial.out) is not None:
        packed = plain.pack(partial, parts=parts)
    else:
        from cplayers.ops import kernels

        packed = kernels.pack(partial, parts=parts)
    num_tokens, num_heads = partial.lse.shape
    return packed.view(parts, num_tokens, num_heads // parts, packed.shape[-1])


def merge_packed(packed: Tensor, dtype: torch.dtype) -> Partial:
    """Merge n partials as `pack` leaves them.

    Args:
        packed: `[n, T, N, W]`, contiguous.
        dtype: Of the out that was packed, and of the result.

    Returns:
        out `[T, N, V]` and lse `[T, N]` in fp32.
    """
    if refuse_kernels(packed) is not None or packed.dtype != dtype:
        return plain.merge_packed(packed, dtype)
    from cplayers.ops import kernels

    return kernels.merge_packed(packed, dtype)

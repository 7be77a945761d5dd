"""out and its fp32 lse side by side, as one message: `[T, N, W]` of out's dtype.

======  ==============================  ==============================
dtype   W                               last elements of a row
======  ==============================  ==============================
fp32    V + 1                           lse
bf16    V + 2                           low, then high 16 bits of lse
fp16    V + 2                           likewise
======  ==============================  ==============================

These are the bytes that ``view`` and ``cat`` of torch give on a little-endian machine.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cplayers.ops.device import DTYPES
from cplayers.ops.kernels.launch import Launch, require
from cplayers.ops.kernels.tiles import ceil_div, ceil_power
from cplayers.ops.partial import Partial

PROGRAM_ELEMENTS = 2048
"""Elements that a program copies."""


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _pack_kernel(
    out_ptr,
    lse_ptr,
    packed_ptr,
    num_rows,
    num_tokens,
    out_row,
    out_head,
    lse_row,
    lse_head,
    NUM_HEADS: tl.constexpr,
    PART_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Bits of out, 16 or 32 of them at a time, with those of lse behind."""
    WIDTH: tl.constexpr = VALUE_DIM + (2 if HALVES else 1)
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = index < num_rows
    token = index // NUM_HEADS
    head = index % NUM_HEADS
    column = tl.arange(0, BLOCK_W)
    from_out = live[:, None] & (column[None, :] < VALUE_DIM)
    at = out_ptr + token[:, None] * out_row + head[:, None] * out_head + column[None, :]
    bits = tl.load(at, mask=from_out, other=0)
    lse = tl.load(lse_ptr + token * lse_row + head * lse_head, mask=live, other=0)
    last = (column == WIDTH - 1)[None, :]
    if HALVES:
        low = (lse & 0xFFFF).to(tl.int16)
        high = ((lse >> 16) & 0xFFFF).to(tl.int16)
        tail = tl.where(last, high[:, None], low[:, None])
    else:
        tail = lse[:, None]
    bits = tl.where((column < VALUE_DIM)[None, :], bits, tail)
    part = head // PART_HEADS
    target = (part * num_tokens + token) * PART_HEADS + head % PART_HEADS
    at = packed_ptr + target[:, None] * WIDTH + column[None, :]
    tl.store(at, bits, mask=live[:, None] & (column[None, :] < WIDTH))


@triton.jit(do_not_specialize=["num_rows"])
def _unpack_kernel(
    packed_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HALVES: tl.constexpr,
):
    WIDTH: tl.constexpr = VALUE_DIM + (2 if HALVES else 1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    column = tl.arange(0, BLOCK_W)
    copied = live[:, None] & (column[None, :] < VALUE_DIM)
    bits = tl.load(packed_ptr + row[:, None] * WIDTH + column[None, :], mask=copied, other=0)
    tl.store(out_ptr + row[:, None] * VALUE_DIM + column[None, :], bits, mask=copied)
    at = packed_ptr + row * WIDTH + VALUE_DIM
    lse = tl.load(at, mask=live, other=0)
    if HALVES:
        high = tl.load(at + 1, mask=live, other=0)
        lse = (high.to(tl.int32) << 16) | (lse.to(tl.int32) & 0xFFFF)
    tl.store(lse_ptr + row, lse, mask=live)


def pack(partial: Partial, *, parts: int = 1) -> Tensor:
    """out and lse side by side, lse in 4 bytes whatever out's dtype.

    Args:
        partial: out `[T, N, V]` in fp32, bf16 or fp16, and lse `[T, N]` in fp32.
        parts: Into how many equal parts the heads are cut. Above 1 the parts come first, as the
            ranks of an all-to-all want them.

    Returns:
        `[T, N, W]`, or `[parts, T, N / parts, W]`, in out's dtype.

    Raises:
        ConfigError: Shapes, dtypes or strides do not fit, or the tensors are on no GPU.
    """
    launch, packed = plan_pack(partial, parts=parts)
    if launch is not None:
        launch.run()
    return packed


def unpack(packed: Tensor, dtype: torch.dtype) -> Partial:
    """The inverse of `pack`, for any leading shape.

    Args:
        packed: `[..., W]`, contiguous.
        dtype: Of the out that was packed.

    Returns:
        out `[..., V]` and lse `[...]` in fp32.

    Raises:
        ConfigError: Shapes, dtypes or strides do not fit, or the tensors are on no GPU.
    """
    launch, partial = plan_unpack(packed, dtype)
    if launch is not None:
        launch.run()
    return partial


def plan_pack(partial: Partial, *, parts: int = 1) -> tuple[Launch | None, Tensor]:
    """What `pack` launches, and where it writes."""
    out, lse = partial
    require(
        "packing needs out [T, N, V] in fp32, bf16 or fp16 with contiguous rows, lse [T, N] in "
        "fp32, and parts that divide N",
        "convert them, or choose another number of parts",
        out.dim() == 3
        and out.shape[:2] == lse.shape
        and out.dtype in DTYPES
        and lse.dtype == torch.float32
        and (out.stride(2) == 1 or out.shape[2] <= 1)
        and parts >= 1
        and out.shape[1] % parts == 0,
        out=out,
        lse=lse,
        parts=parts,
    )
    num_tokens, num_heads, value_dim = out.shape
    halves, bits = _bits(out.dtype)
    width = value_dim + (2 if halves else 1)
    split = () if parts == 1 else (parts,)
    shape = (*split, num_tokens, num_heads // parts, width)
    packed = torch.empty(shape, dtype=out.dtype, device=out.device)
    num_rows = num_tokens * num_heads
    if not num_rows:
        return None, packed
    block_w = max(16, ceil_power(width))
    rows = max(1, PROGRAM_ELEMENTS // block_w)
    args = {
        "out_ptr": out.view(bits),
        "lse_ptr": lse.view(torch.int32),
        "packed_ptr": packed.view(bits),
        "num_rows": num_rows,
        "num_tokens": num_tokens,
        "out_row": out.stride(0),
        "out_head": out.stride(1),
        "lse_row": lse.stride(0),
        "lse_head": lse.stride(1),
    }
    constants = {
        "NUM_HEADS": num_heads,
        "PART_HEADS": num_heads // parts,
        "VALUE_DIM": value_dim,
        "ROWS": rows,
        "BLOCK_W": block_w,
        "HALVES": halves,
    }
    return Launch(_pack_kernel, (ceil_div(num_rows, rows),), args, constants, 4, 2), packed


def plan_unpack(packed: Tensor, dtype: torch.dtype) -> tuple[Launch | None, Partial]:
    """What `unpack` launches, and where it writes."""
    halves, bits = _bits(dtype)
    require(
        "unpacking needs a contiguous [..., W] of the packed dtype, fp32, bf16 or fp16",
        "pass what pack() returned",
        packed.dim() >= 1
        and packed.dtype == dtype
        and dtype in DTYPES
        and packed.shape[-1] >= (2 if halves else 1)
        and packed.is_contiguous(),
        packed=packed,
        dtype=dtype,
    )
    *leading, width = packed.shape
    value_dim = width - (2 if halves else 1)
    out = torch.empty(*leading, value_dim, dtype=dtype, device=packed.device)
    lse = torch.empty(leading, dtype=torch.float32, device=packed.device)
    num_rows = lse.numel()
    if not num_rows:
        return None, Partial(out, lse)
    block_w = max(16, ceil_power(value_dim))
    rows = max(1, PROGRAM_ELEMENTS // block_w)
    args = {
        "packed_ptr": packed.view(bits),
        "out_ptr": out.view(bits),
        "lse_ptr": lse.view(torch.int32),
        "num_rows": num_rows,
    }
    constants = {"VALUE_DIM": value_dim, "ROWS": rows, "BLOCK_W": block_w, "HALVES": halves}
    launch = Launch(_unpack_kernel, (ceil_div(num_rows, rows),), args, constants, 4, 2)
    return launch, Partial(out, lse)


def _bits(dtype: torch.dtype) -> tuple[bool, torch.dtype]:
    """Whether lse takes two elements, and the integers that carry the elements' bits."""
    halves = dtype.itemsize == 2
    return halves, torch.int16 if halves else torch.int32

"""Writing new rows to the slots of the paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from cplayers.ops.device import DTYPES
from cplayers.ops.kernels.launch import Launch, interpreted, require
from cplayers.ops.kernels.rounding import narrow
from cplayers.ops.kernels.tiles import ceil_div, ceil_power

PROGRAM_ELEMENTS = 1024
"""Most elements of a row that a program copies."""


@triton.jit
def _copy(
    rows_ptr,
    store_ptr,
    row,
    slot,
    rows_row,
    rows_head,
    store_head,
    store_slot,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = (element // DIM).to(tl.int64)
    column = element % DIM
    # A slot that does not exist is not written either: it would be somebody else's memory.
    kept = element < HEADS * DIM
    x = tl.load(rows_ptr + row * rows_row + head * rows_head + column, mask=kept, other=0.0)
    at = store_ptr + head * store_head + slot * store_slot + column
    tl.store(at, narrow(x, store_ptr.dtype.element_ty, INTERPRETED), mask=kept)


@triton.jit(do_not_specialize=["num_slots"])
def write_kernel(
    slot_ptr,
    rows_a_ptr,
    store_a_ptr,
    rows_b_ptr,
    store_b_ptr,
    num_slots,
    rows_a_row,
    rows_a_head,
    store_a_head,
    store_a_slot,
    rows_b_row,
    rows_b_head,
    store_b_head,
    store_b_slot,
    HEADS_A: tl.constexpr,
    DIM_A: tl.constexpr,
    HEADS_B: tl.constexpr,
    DIM_B: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One row of one or two planes; HEADS_B is 0 where there is no second one."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    # A slot that does not exist is not written either: it would be somebody else's memory.
    if (slot >= 0) & (slot < num_slots):
        _copy(
            rows_a_ptr,
            store_a_ptr,
            row,
            slot,
            rows_a_row,
            rows_a_head,
            store_a_head,
            store_a_slot,
            HEADS_A,
            DIM_A,
            BLOCK,
            INTERPRETED,
        )
        if HEADS_B > 0:
            _copy(
                rows_b_ptr,
                store_b_ptr,
                row,
                slot,
                rows_b_row,
                rows_b_head,
                store_b_head,
                store_b_slot,
                HEADS_B,
                DIM_B,
                BLOCK,
                INTERPRETED,
            )


def cache_write(slot_mapping: Tensor, planes: Sequence[Tensor], stores: Sequence[Tensor]) -> None:
    """Write each row of every plane to its slot, in the store's dtype.

    Two planes at a time take one launch. No two rows may have the same slot.

    Args:
        slot_mapping: Slot of each row, int `[T]`; a row is skipped whose slot is -1, or none of the
            store's.
        planes: Rows of each plane, `[T, heads, dim]`, any strides of rows and heads.
        stores: Their caches, `[heads, slots, dim]`, all with the same slots; written in place.

    Raises:
        ConfigError: Shapes, dtypes or strides do not fit, or the tensors are on no GPU.
    """
    for launch in plan_write(slot_mapping, planes, stores):
        launch.run()


def plan_write(
    slot_mapping: Tensor, planes: Sequence[Tensor], stores: Sequence[Tensor]
) -> list[Launch]:
    """What `cache_write` launches."""
    _check(slot_mapping, planes, stores)
    pairs = [(r, s) for r, s in zip(planes, stores, strict=True) if r.numel() and s.numel()]
    launches = []
    for first in range(0, len(pairs), 2):
        (rows_a, store_a), *second = pairs[first : first + 2]
        rows_b, store_b = second[0] if second else (rows_a, store_a)
        elements = max(rows_a[0].numel(), rows_b[0].numel())
        block = min(PROGRAM_ELEMENTS, max(16, ceil_power(elements)))
        args = {
            "slot_ptr": slot_mapping,
            "rows_a_ptr": rows_a,
            "store_a_ptr": store_a,
            "rows_b_ptr": rows_b,
            "store_b_ptr": store_b,
            "num_slots": store_a.shape[1],
            "rows_a_row": rows_a.stride(0),
            "rows_a_head": rows_a.stride(1),
            "store_a_head": store_a.stride(0),
            "store_a_slot": store_a.stride(1),
            "rows_b_row": rows_b.stride(0),
            "rows_b_head": rows_b.stride(1),
            "store_b_head": store_b.stride(0),
            "store_b_slot": store_b.stride(1),
        }
        constants = {
            "HEADS_A": rows_a.shape[1],
            "DIM_A": rows_a.shape[2],
            "HEADS_B": rows_b.shape[1] if second else 0,
            "DIM_B": rows_b.shape[2],
            "BLOCK": block,
            "INTERPRETED": interpreted(write_kernel),
        }
        grid = (len(slot_mapping), ceil_div(elements, block))
        launches.append(Launch(write_kernel, grid, args, constants, 4, 2))
    return launches


def _check(slot_mapping: Tensor, planes: Sequence[Tensor], stores: Sequence[Tensor]) -> None:
    require(
        "every plane has a store, and a contiguous [T] says each row's slot",
        "pass one store per plane",
        len(planes) == len(stores) and slot_mapping.dim() == 1 and slot_mapping.is_contiguous(),
        slot_mapping=slot_mapping,
        planes=len(planes),
        stores=len(stores),
    )
    for rows, store in zip(planes, stores, strict=True):
        require(
            "rows [T, heads, dim] go to a store [heads, slots, dim] with as many slots as the "
            "others, both with contiguous rows, in fp32, bf16 or fp16",
            "pass tensors of these shapes and dtypes",
            rows.dim() == store.dim() == 3
            and rows.shape == (len(slot_mapping), store.shape[0], store.shape[2])
            and store.shape[1] == stores[0].shape[1]
            and all(t.stride(2) == 1 or t.shape[2] <= 1 for t in (rows, store))
            and rows.dtype in DTYPES
            and store.dtype in DTYPES,
            slot_mapping=slot_mapping,
            rows=rows,
            store=store,
        )

"""The kernel behind `span_attention`; what it does is told in `cplayers.ops.kernels.attention`."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from cplayers.ops.kernels.rounding import narrow

_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2.0))
_FAR = tl.constexpr(2**31 - 1)


@triton.jit
def _tanh(x):
    # exp of a negative number only, which cannot overflow
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # it multiplies bf16 as the integers that hold it; in fp32 products are exact
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _attend(
    top,
    total,
    acc,
    q_first,
    q_rest,
    k_ptr,
    v_ptr,
    table_ptr,
    row_lo,
    row_hi,
    in_group,
    number,
    scale,
    softcap,
    k_slot,
    v_slot,
    table_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Let the rows of one group see their keys of this split."""
    d = tl.arange(0, BLOCK_D)
    start = tl.min(tl.where(in_group, row_lo, _FAR), 0)
    stop = tl.max(tl.where(in_group, row_hi, 0), 0)
    keys = tl.maximum(stop - start, 0)
    step = tl.cdiv(tl.cdiv(keys, BLOCK_N), tl.num_programs(1)) * BLOCK_N
    first = start + tl.program_id(1) * step
    last = tl.minimum(first + step, stop)
    if BLOCK_SIZE > 0:
        row = tl.max(tl.where(in_group, number, 0), 0).to(tl.int64)
        table = table_ptr + row * table_row
    for n in range(first, last, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        inside = key < last
        if BLOCK_SIZE > 0:
            block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        else:
            slot = key.to(tl.int64)
        k_rows = k_ptr + slot[:, None] * k_slot
        wanted = inside[:, None]
        if HEAD_DIM < BLOCK_D:
            wanted = wanted & (d[None, :] < HEAD_DIM)
        k = tl.load(k_rows + d[None, :], mask=wanted, other=0.0)
        scores = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        scores = _dot(q_first, tl.trans(k), scores, PRECISION, INTERPRETED)
        if BLOCK_REST > 0:
            r = BLOCK_D + tl.arange(0, BLOCK_REST)
            wanted = inside[:, None] & (r[None, :] < HEAD_DIM)
            rest = tl.load(k_rows + r[None, :], mask=wanted, other=0.0)
            scores = _dot(q_rest, tl.trans(rest), scores, PRECISION, INTERPRETED)
        scores *= scale
        if HAS_SOFTCAP:
            scores = softcap * _tanh(scores / softcap)
        sees = (key[None, :] >= row_lo[:, None]) & (key[None, :] < row_hi[:, None])
        sees = sees & in_group[:, None] & inside[None, :]
        scores = tl.where(sees, scores * _LOG2_E, float("-inf"))
        if SHARED:
            v = k
        else:
            c = tl.arange(0, BLOCK_V)
            wanted = inside[:, None]
            if VALUE_DIM < BLOCK_V:
                wanted = wanted & (c[None, :] < VALUE_DIM)
            v = tl.load(v_ptr + slot[:, None] * v_slot + c[None, :], mask=wanted, other=0.0)
        highest = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        acc = _dot(
            narrow(weights, v.dtype, INTERPRETED), v, acc * fade[:, None], PRECISION, INTERPRETED
        )
        top = highest
    return top, total, acc


@triton.jit(do_not_specialize=["num_rows", "table_row"])
def span_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    request_ptr,
    lo_ptr,
    hi_ptr,
    out_ptr,
    lse_ptr,
    scale,
    softcap,
    num_rows,
    q_row,
    q_head,
    k_head,
    k_slot,
    v_head,
    v_slot,
    table_row,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_REQUEST: tl.constexpr,
    PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attention of some rows of one KV head to one split of the keys."""
    # Head tiles of the same rows come first: they read the same keys at about the same time.
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    PARTS: tl.constexpr = NUM_HEADS // GROUP * HEAD_TILES
    part = tl.program_id(0) % PARTS
    kv_head = (part // HEAD_TILES).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    token = m // HEADS
    row = (tl.program_id(0) // PARTS) * TOKENS + token
    head = part % HEAD_TILES * HEADS + m % HEADS
    live = (token < TOKENS) & (row < num_rows) & (head < GROUP)
    head = kv_head * GROUP + head
    row_lo = tl.load(lo_ptr + row, mask=live, other=0).to(tl.int32)
    row_hi = tl.load(hi_ptr + row, mask=live, other=0).to(tl.int32)
    sees = live & (row_hi > row_lo)
    if HAS_REQUEST:
        number = tl.load(request_ptr + row, mask=live, other=0).to(tl.int32)
    else:
        number = tl.zeros([BLOCK_M], dtype=tl.int32)
    row = row.to(tl.int64)

    d = tl.arange(0, BLOCK_D)
    q_rows = q_ptr + row[:, None] * q_row + head[:, None] * q_head
    wanted = live[:, None] & (d[None, :] < HEAD_DIM)
    q_first = tl.load(q_rows + d[None, :], mask=wanted, other=0.0)
    if BLOCK_REST > 0:
        r = BLOCK_D + tl.arange(0, BLOCK_REST)
        wanted = live[:, None] & (r[None, :] < HEAD_DIM)
        q_rest = tl.load(q_rows + r[None, :], mask=wanted, other=0.0)
    else:
        q_rest = q_first
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head

    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    if TOKENS == 1:
        groups = 1
    else:
        common = tl.max(tl.where(sees, row_lo, -1), 0) < tl.min(tl.where(sees, row_hi, _FAR), 0)
        lowest = tl.min(tl.where(sees, number, _FAR), 0)
        together = common & (lowest == tl.max(tl.where(sees, number, -1), 0))
        groups = tl.where(together, 1, TOKENS)
    for g in range(groups):
        if TOKENS == 1:
            in_group = sees
        else:
            alone = sees & (token == g)
            mates = sees & (number == tl.max(tl.where(alone, number, -1), 0))
            shared = tl.max(tl.where(mates, row_lo, -1), 0) < tl.min(
                tl.where(mates, row_hi, _FAR), 0
            )
            leads = tl.min(tl.where(mates, token, _FAR), 0) == g
            in_group = sees & (together | tl.where(shared, mates & leads, alone))
        top, total, acc = _attend(
            top,
            total,
            acc,
            q_first,
            q_rest,
            k_ptr,
            v_ptr,
            table_ptr,
            row_lo,
            row_hi,
            in_group,
            number,
            scale,
            softcap,
            k_slot,
            v_slot,
            table_row,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            BLOCK_REST,
            BLOCK_V,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_SIZE,
            SHARED,
            HAS_SOFTCAP,
            PRECISION,
            INTERPRETED,
        )

    seen = total > 0
    lse = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * _LN_2, float("-inf"))
    acc = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    c = tl.arange(0, BLOCK_V)
    written = live[:, None] & (c[None, :] < VALUE_DIM)
    index = row * NUM_HEADS + head
    if PARTIAL:
        # of a row that sees nothing here the merge reads no more than its lse
        index += tl.program_id(1).to(tl.int64) * num_rows * NUM_HEADS
        written = written & seen[:, None]
    tl.store(lse_ptr + index, lse, mask=live)
    out = out_ptr + index[:, None] * VALUE_DIM + c[None, :]
    tl.store(out, narrow(acc, out_ptr.dtype.element_ty, INTERPRETED), mask=written)

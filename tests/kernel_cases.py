"""Checks of the Triton kernels on small, awkward inputs, for Triton's interpreter and for a GPU.

Every check compares with float64, worked out without library code, and with the plain version.
What nobody wrote holds NaN: unused slots, and with `poisoned` whatever ``torch.empty`` gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cplayers.ops import Partial, attention_reference, plain
from cplayers.ops.kernels import (
    cache_write,
    merge_packed,
    merge_partials,
    pack,
    span_attention,
    unpack,
)

PEAK = 4.0
F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16


@contextmanager
def poisoned() -> Iterator[None]:
    """Let ``torch.empty`` return NaN."""
    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> Tensor:
        given = empty(*args, **kwargs)
        return given.fill_(math.nan) if given.is_floating_point() else given

    with mock.patch.object(torch, "empty", filled):
        yield


@dataclass(frozen=True)
class Attention:
    """Rows of several requests, ``rows[r]`` being the spans (lo, hi) of request r."""

    rows: tuple[tuple[tuple[int, int], ...], ...]
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    value_dim: int | None = None
    block: int | None = 16
    latent: bool = False
    shuffled: bool = False
    dtype: torch.dtype = F32
    softcap: float | None = None
    num_splits: int | None = None
    tile_rows: int | None = None
    rows_per_request: int | None = None


def decode(*lengths: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(((0, n),) for n in lengths)


def chunk(new: int, length: int, window: int | None = None) -> tuple[tuple[int, int], ...]:
    """The last ``new`` tokens of ``length``."""
    ends = range(length - new + 1, length + 1)
    return tuple((0 if window is None else max(0, n - window), n) for n in ends)


ATTENTION = {
    "one_key": Attention(decode(1)),
    "three_requests": Attention(decode(3, 17, 200), kv_heads=2, group=4),
    "an_empty_request": Attention(decode(0, 63, 65), group=8, num_splits=3),
    "only_empty_requests": Attention(decode(0, 0), kv_heads=2, group=3, num_splits=2),
    "more_splits_than_keys": Attention(decode(3, 65), group=2, num_splits=7),
    "several_new_tokens": Attention(
        (chunk(3, 65), chunk(3, 200)), kv_heads=2, group=3, head_dim=96, num_splits=2
    ),
    "window": Attention((((150, 200),), ((0, 17),)), group=16, head_dim=128, num_splits=2),
    "many_kv_heads": Attention(decode(17, 63), kv_heads=8),
    "latent": Attention(
        decode(65, 17), group=16, head_dim=576, value_dim=512, latent=True, num_splits=2
    ),
    "latent_heads_in_tiles": Attention(
        decode(63), group=24, head_dim=576, value_dim=512, latent=True, tile_rows=16
    ),
    "latent_apart": Attention(decode(63), group=3, head_dim=80, value_dim=48),
    "wide": Attention(decode(63), group=8, head_dim=256),
    "chunk": Attention((chunk(20, 65),), kv_heads=2, group=4),
    "chunk_in_window": Attention((chunk(20, 65, 17),), group=4, num_splits=2),
    "window_of_one": Attention((chunk(9, 17, 1),), group=2),
    "requests_share_a_tile": Attention(
        (chunk(5, 63), chunk(1, 17), chunk(7, 40)), kv_heads=2, group=2
    ),
    "drafts_in_one_tile": Attention(
        (chunk(3, 40), chunk(3, 17), chunk(2, 65)), group=2, rows_per_request=3, num_splits=2
    ),
    "blind_rows_in_a_tile": Attention(
        (((0, 0), (0, 7), (3, 5)), ((2, 2),), ((0, 3), (1, 9), (4, 4))), group=2, rows_per_request=8
    ),
    "spans_apart_in_a_tile": Attention(
        (((0, 3), (5, 9)), ((0, 2), (0, 3))), kv_heads=2, rows_per_request=8
    ),
    "rows_in_any_order": Attention(
        (chunk(5, 63), chunk(2, 3), chunk(4, 33)), group=3, shuffled=True, num_splits=2
    ),
    "rows_that_see_nothing": Attention(
        (((0, 0), (0, 7), (3, 3), (5, 2), (2, 9)), ((4, 4), (0, 1))), group=2
    ),
    "softcap": Attention(decode(65, 17), kv_heads=2, group=4, softcap=5.0),
    "blocks_of_five": Attention(decode(65, 17), group=4, block=5, num_splits=2),
    "contiguous": Attention((chunk(20, 65),), kv_heads=2, group=3, block=None, num_splits=2),
    "contiguous_with_gaps": Attention(
        (((0, 3), (0, 4), (6, 7), (9, 15)),), kv_heads=2, group=3, block=None
    ),
    "odd_dims": Attention(decode(33), group=2, head_dim=24, value_dim=5),
}
for _name in ("three_requests", "several_new_tokens", "latent", "chunk", "softcap"):
    for _dtype, _suffix in ((B16, "bf16"), (F16, "fp16")):
        ATTENTION[f"{_name}_{_suffix}"] = replace(ATTENTION[_name], dtype=_dtype)


def check_attention(case: Attention, device: str) -> None:
    generator = torch.Generator().manual_seed(len(case.rows) + case.head_dim + case.group)
    dim, value_dim = case.head_dim, case.value_dim or case.head_dim
    num_heads = case.kv_heads * case.group
    spans = [span for rows in case.rows for span in rows]
    owner = [r for r, rows in enumerate(case.rows) for _ in rows]
    lo, hi = torch.tensor(spans).T.contiguous()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    q = draw(len(spans), num_heads, dim) * PEAK
    lengths = [max((hi for lo, hi in rows if hi > lo), default=0) for rows in case.rows]
    block = case.block or max(1, *lengths)
    counts = [-(-n // block) for n in lengths]
    ids = torch.randperm(sum(counts) + 2, generator=generator)  # the last two are nobody's
    if case.block is None:
        ids = torch.arange(len(ids))
    k_cache = torch.full((case.kv_heads, len(ids) * block, dim), math.nan, dtype=case.dtype)
    v_cache = k_cache[..., :value_dim]
    if not case.latent:
        v_cache = k_cache.new_full((*k_cache.shape[:2], value_dim), math.nan)
    table = torch.full((len(lengths), max(1, *counts) + 1), int(ids[-1]), dtype=torch.int32)
    keys, values = [], []
    for r, (first, last) in enumerate(pairwise(accumulate(counts, initial=0))):
        table[r, : last - first] = ids[first:last]
        k = draw(case.kv_heads, lengths[r], dim)
        v = k[..., :value_dim] if case.latent else draw(case.kv_heads, lengths[r], value_dim)
        keys.append(k.transpose(0, 1))
        values.append(v.transpose(0, 1))
        for key in range(lengths[r]):
            if any(lo <= key < hi for lo, hi in case.rows[r]):  # others stay NaN
                slot = int(table[r, key // block]) * block + key % block
                k_cache[:, slot], v_cache[:, slot] = k[:, key], v[:, key]
    request = torch.tensor(owner, dtype=torch.int32)
    if case.shuffled:
        order = torch.randperm(len(spans), generator=generator)
        q, lo, hi, request = q[order], lo[order], hi[order], request[order]

    scale = dim**-0.5
    kwargs: dict[str, Any] = {"scale": scale, "softcap": case.softcap}
    if case.block is not None:
        kwargs |= {"block_table": table.to(device), "block_size": block}
        kwargs["request"] = request.to(device) if len(lengths) > 1 else None
    tiling = {"num_splits": case.num_splits, "tile_rows": case.tile_rows}
    tiling["rows_per_request"] = case.rows_per_request
    on = [t.to(device) for t in (q, k_cache, lo, hi)]
    v_on = on[1][..., :value_dim] if case.latent else v_cache.to(device)
    inputs = (on[0], on[1], v_on, on[2], on[3])
    with poisoned():
        given = span_attention(*inputs, **kwargs, **tiling)
    result = Partial(given.out.cpu(), given.lse.cpu())
    assert result.out.shape == (len(spans), num_heads, value_dim)
    assert result.out.dtype == case.dtype
    assert result.lse.dtype == F32

    expected = Partial(
        torch.zeros(result.out.shape).double(), torch.zeros(result.lse.shape).double()
    )
    allowed = 1e-5 if case.dtype == F32 else 0.0
    for r, (k, v) in enumerate(zip(keys, values, strict=True)):
        mine = request == r
        where = (q[mine], k, v, lo[mine], hi[mine])
        one = attention_reference(*where, scale=scale, softcap=case.softcap)
        expected.out[mine], expected.lse[mine] = one
        if case.dtype != F32:
            allowed = max(allowed, 2 * rounding_error(one.out, *where, scale, case.softcap))
    check_lse(result.lse, expected.lse, case.dtype)
    assert_close(result.out, expected.out, allowed, "out")
    blind = hi <= lo
    assert not result.out[blind].any()
    assert (result.lse[blind] == -math.inf).all()

    ours = plain.span_attention(*inputs, **kwargs)
    check_lse(ours.lse.cpu(), expected.lse, case.dtype)
    assert_close(ours.out.cpu(), expected.out, allowed, "out of the plain version")


def rounding_error(
    exact: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    scale: float,
    softcap: float | None,
) -> float:
    """Largest error of a softmax in fp32 whose weights and result are rounded to q's dtype."""
    worst = 0.0
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    for t, (first, last) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
        if last <= first:
            continue
        scores = torch.einsum("nh,snh->ns", q[t].float(), k[first:last]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.softmax(-1).to(q.dtype).float()
        out = torch.einsum("ns,snv->nv", weights, v[first:last]).to(q.dtype)
        worst = max(worst, float((out.double() - exact[t]).abs().max()))
    return worst


def check_lse(lse: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    finite = expected != -math.inf
    assert torch.equal(lse != -math.inf, finite)
    allowed = 1e-5 if dtype == F32 else torch.finfo(dtype).eps / 8
    error = (lse[finite].double() - expected[finite]).abs() / expected[finite].abs().clamp_min(1)
    assert not error.numel() or float(error.max()) <= allowed, f"lse is off by {error.max():.2e}"


def assert_close(out: Tensor, expected: Tensor, allowed: float, what: str) -> None:
    assert out.isfinite().all(), f"{what} is not finite"
    error = float((out.double() - expected).abs().max()) if out.numel() else 0.0
    assert error <= allowed, f"{what} is off by {error:.2e}, allowed is {allowed:.2e}"


def check_far_heads(device: str) -> None:
    """Heads 2**30 elements apart: the last one begins where 32 bits end."""
    far = 2**30
    memory = torch.empty(2 * far + 2**12, dtype=B16, device=device)
    cache = memory.as_strided((3, 32, 64), (far, 64, 1))
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 32, 64, generator=generator).to(B16)
    cache.copy_(keys)
    q = (torch.randn(1, 3, 64, generator=generator) * PEAK).to(B16)
    lo, hi = torch.tensor([0]), torch.tensor([32])
    on = (q.to(device), cache, cache, lo.to(device), hi.to(device))
    out, lse = span_attention(*on, scale=0.125)
    near = keys.transpose(0, 1)
    expected = attention_reference(q, near, near, lo, hi, scale=0.125)
    check_lse(lse.cpu(), expected.lse, B16)
    allowed = 2 * rounding_error(expected.out, q, near, near, lo, hi, 0.125, None)
    assert_close(out.cpu(), expected.out, allowed, "out")


MERGES = [
    (1, 3, 2, 16, F32),
    (2, 17, 3, 64, F32),
    (3, 5, 8, 96, B16),
    (5, 3, 1, 512, F16),
    (3, 65, 1, 5, B16),
    (2, 1, 1, 1, F16),
    (4, 0, 2, 16, F32),
]


def stacked(n: int, num_tokens: int, num_heads: int, dim: int, dtype: torch.dtype) -> Partial:
    """Partials with all that a foreign kernel may return for rows without keys."""
    generator = torch.Generator().manual_seed(n + num_tokens + dim)
    out = torch.randn(n, num_tokens, num_heads, dim, generator=generator).to(dtype)
    lse = torch.randn(n, num_tokens, num_heads, generator=generator) * 10
    kind = torch.randint(0, 8, lse.shape, generator=generator)
    for number, value in enumerate((-math.inf, math.nan, math.inf)):
        lse[kind == number] = value
        out[kind == number] = math.nan if number else math.inf
    if num_tokens:
        lse[:, 0] = -math.inf
        out[:, 0] = math.nan
        if num_tokens > 1:
            lse[:, 1] = torch.arange(n).unsqueeze(1) * 500.0 - 900.0  # one of them is all
            out[:, 1] = 1.0
    return Partial(out, lse)


def merged_in_fp64(partials: Partial) -> Partial:
    """Row by row, after the definition."""
    n, *shape, dim = partials.out.shape
    out = torch.zeros(*shape, dim, dtype=torch.float64)
    lse = torch.full(shape, -math.inf, dtype=torch.float64)
    for t in range(shape[0]):
        for h in range(shape[1]):
            parts = [
                (float(partials.lse[i, t, h]), partials.out[i, t, h].double()) for i in range(n)
            ]
            parts = [(x, o) for x, o in parts if math.isfinite(x)]
            if parts:
                top = max(x for x, _ in parts)
                total = sum(math.exp(x - top) for x, _ in parts)
                lse[t, h] = top + math.log(total)
                for x, o in parts:
                    if math.exp(x - top) > 1e-38:  # 0 in fp32
                        out[t, h] += math.exp(x - top) / total * o
    return Partial(out, lse)


def check_merge(shape: tuple[int, int, int, int, torch.dtype], device: str) -> None:
    partials = stacked(*shape)
    dtype = shape[-1]
    expected = merged_in_fp64(partials)
    on = Partial(partials.out.to(device), partials.lse.to(device))
    packed = torch.stack([plain.pack(Partial(*p)) for p in zip(*on, strict=True)])
    with poisoned():
        results = {
            "merged": merge_partials(*on),
            "merged to fp32": merge_partials(*on, dtype=F32),
            "merged from packed": merge_packed(packed, dtype),
        }
    results["plain"] = plain.merge_partials(*on)
    results["plain from packed"] = plain.merge_packed(packed, dtype)
    for name, (out, lse) in results.items():
        rounding = 1e-6 if out.dtype == F32 else torch.finfo(dtype).eps
        largest = float(expected.out.abs().max()) if expected.out.numel() else 0.0
        assert out.dtype == (F32 if name == "merged to fp32" else dtype)
        assert_close(out.cpu(), expected.out, rounding * max(1.0, largest), name)
        check_lse(lse.cpu(), expected.lse, F32)
        assert not out[lse == -math.inf].any()


PACKS = [
    (3, 4, 64, F32, 1),
    (17, 6, 96, B16, 1),
    (5, 6, 512, F16, 3),
    (65, 4, 5, B16, 2),
    (1, 2, 17, F32, 2),
    (0, 2, 16, B16, 1),
]


def check_pack(shape: tuple[int, int, int, torch.dtype, int], device: str) -> None:
    num_tokens, num_heads, dim, dtype, parts = shape
    partial = stacked(1, num_tokens, num_heads, dim + 3, dtype)
    out = partial.out[0].to(device)[..., 1 : dim + 1]  # rows apart
    lse = partial.lse[0].to(device)
    with poisoned():
        packed = pack(Partial(out, lse), parts=parts)
    n, width = num_heads // parts, 4 // dtype.itemsize
    assert packed.shape[-1] == dim + width
    bits = torch.int16 if width == 2 else torch.int32
    by_part = packed.view(parts, num_tokens, n, dim + width).view(bits)
    for h in range(num_heads):
        rows = by_part[h // n, :, h % n]
        assert torch.equal(rows[:, :dim], out[:, h].contiguous().view(bits))
        tail = rows[:, dim:].clone(memory_format=torch.contiguous_format)
        assert torch.equal(
            tail.view(torch.int32).squeeze(-1), lse[:, h].contiguous().view(torch.int32)
        )
    assert torch.equal(packed.view(bits), plain.pack(Partial(out, lse), parts=parts).view(bits))
    with poisoned():
        back = unpack(packed, dtype)
    ours = plain.unpack(packed, dtype)
    for given in (back, ours):
        by_part = given.out.view(parts, num_tokens, n, dim).transpose(0, 1)
        assert torch.equal(by_part.reshape(out.shape).view(bits), out.contiguous().view(bits))
        again = given.lse.view(parts, num_tokens, n).transpose(0, 1).reshape(lse.shape)
        assert torch.equal(again.view(torch.int32), lse.view(torch.int32))


@dataclass(frozen=True)
class Write:
    """Slots of the rows, and (heads, dim) of each plane."""

    slots: tuple[int, ...]
    planes: tuple[tuple[int, int], ...]
    rows: torch.dtype = F32
    store: torch.dtype = F32
    num_slots: int = 20


WRITES = {
    "keys_and_values": Write((3, 4, 5, 19, 0), ((2, 64), (2, 64))),
    "skipped_rows": Write((-1, 7, -1, 2, -1), ((2, 96), (2, 96)), B16, B16),
    "one_latent": Write((17, 3, 1), ((1, 576),), F16, F16),
    "unequal_planes": Write((5, -1, 9), ((1, 512), (3, 5), (2, 16))),
    "wide_rows": Write((8, 9), ((8, 256), (8, 256)), B16, B16),
    "rounded": Write((3, 1, 2), ((2, 64), (2, 64)), F32, B16),
    "slots_that_do_not_exist": Write((20, 3, 10**9, -7), ((2, 16), (2, 16))),
    "only_skipped": Write((-1, -1), ((2, 16), (2, 16))),
    "no_rows": Write((), ((2, 16), (2, 16))),
}


def check_write(case: Write, device: str) -> None:
    generator = torch.Generator().manual_seed(len(case.slots))
    total = sum(heads * dim for heads, dim in case.planes)
    projected = torch.randn(len(case.slots), total, generator=generator).to(case.rows).to(device)
    sizes = [heads * dim for heads, dim in case.planes]
    rows = [
        part.unflatten(1, shape)
        for part, shape in zip(projected.split(sizes, 1), case.planes, strict=True)
    ]
    slots = torch.tensor(case.slots, dtype=torch.int64, device=device)

    def stores() -> Sequence[Tensor]:
        return [
            torch.full((h, case.num_slots, d), math.nan, dtype=case.store, device=device)
            for h, d in case.planes
        ]

    written, by_plain, expected = stores(), stores(), stores()
    cache_write(slots, rows, written)
    plain.cache_write(slots, rows, by_plain)
    for given, store in zip(rows, expected, strict=True):
        for row, slot in enumerate(case.slots):
            if 0 <= slot < case.num_slots:
                store[:, slot] = given[row].to(case.store)
    for given, ours, store in zip(written, by_plain, expected, strict=True):
        assert torch.equal(given.isnan(), store.isnan())
        assert torch.equal(given.nan_to_num(), store.nan_to_num())
        assert torch.equal(ours.nan_to_num(), store.nan_to_num())

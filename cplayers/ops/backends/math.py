"""Backend ``"math"``: two matrix products and a softmax, on any device, for any dtype and width.

Scores and softmax are in fp32, or fp64 for fp64 inputs. Keys and values below fp32 are converted a
chunk at a time, so that nobody holds a copy of all of them::

    for each part of the rows:
        for each chunk of the keys that any of these rows sees:
            k, v = the chunk in fp32; one copy for both where v is the first columns of k
            partial = softmax(q k^T) v, over the keys of the chunk that each row sees
        merge the partials
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from cplayers.ops.backends.base import Backend
from cplayers.ops.backends.tiled import Kernels, is_prefix, pack, unpack
from cplayers.ops.partial import Partial, empty, merge
from cplayers.ops.spans import Tile

MAX_SCORES = 1 << 24
"""Most scores that are held at once, 64 MiB in fp32; more rows are done in parts."""

CHUNK = 1 << 20
"""Elements of k that are converted at once on a CPU: 4 MiB in fp32, which stay in cache.

Measured on one AMD EPYC core (1 MiB of L2, 32 MiB of L3) in bf16, CPU time in milliseconds, by rows
per KV head. Left: 64,000 latents of 576 (V = 512), whose 74 MB take 3 ms to read and 5 to convert.
Right: 65,536 keys of 128 for each of 8 KV heads. Last line: all keys converted at once.

======  ====  ====  =====  =====  =====  =====
MiB     1     16    128    1      4      16
======  ====  ====  =====  =====  =====  =====
0.5     26.9  55.9  248.5  57.9   69.8   116.0
1       20.3  48.3  226.2  59.2   72.2   115.1
2       15.1  41.6  216.5  44.6   59.2   103.3
4       13.1  39.9  221.7  41.7   54.5   98.5
8       12.5  42.1  221.4  53.3   69.9   125.0
16      18.0  55.2  234.1  103.0  111.5  154.8
all     164   194   364    335    336    392
======  ====  ====  =====  =====  =====  =====
"""

CHUNK_SCORES = 1 << 21
"""Most scores of a chunk on a CPU, and elements of its partials that wait for a merge: 8 MiB."""

MIN_KEYS = 256
"""Fewest keys of a chunk, however many KV heads there are: products of fewer are slow."""

ALIGN = 64
"""The keys of a chunk are a multiple of it.

With 1,820 keys in place of 1,792, 1,024 rows of 576 times keys run at 68 GFLOP/s in place of 92.
"""

FEW_ROWS = 8
"""Rows per KV head (G*t) up to which `few_rows` pays, on keys of at least `FEW_ROWS_BYTES`."""

FEW_ROWS_BYTES = 1 << 24
"""Size of a part's fp32 keys from which they no longer stay in cache.

Measured as for `CHUNK`, the best of 7: queries on the left / keys on the left. With 128 rows over
16,384 latents it is 57 / 59. Keys whose rows lie apart take twice as long on the left.

====  ===============  ================  ===================
rows  latents, 16 MiB  latents, 140 MiB  K = 8, 192, V = 128
====  ===============  ================  ===================
1     1.4 / 1.0        24.2 / 24.3       31.6 / 20.2
2     3.0 / 2.2        55.0 / 27.0       69.8 / 26.5
3     4.5 / 2.3        82.1 / 27.6       102.2 / 25.9
4     2.8 / 2.4        37.6 / 27.7       36.5 / 25.7
8     4.1 / 4.0        43.7 / 36.1       42.2 / 35.5
12    5.0 / 6.6        49.1 / 69.1       49.2 / 62.1
====  ===============  ================  ===================
"""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def soften(scores: Tensor, v: Tensor) -> Partial:
    """Softmax of ``scores`` times ``v``. Overwrites ``scores``; -inf marks a key that is not seen.

    Args:
        scores: `[K, M, s]`, fp32 or fp64.
        v: `[K, s, V]`, of the same dtype.

    Returns:
        out `[K, M, V]`, lse `[K, M]`, in the dtype of the scores.
    """
    # The floor keeps -inf - -inf, a NaN, from arising in a row that sees nothing.
    # Detached: its gradient cancels, and the scores are overwritten.
    top = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    # The largest weight is exactly 1, so the clamp acts only in a row that sees nothing.
    out = torch.bmm(weights, v) / total.clamp_min(1.0)
    return Partial(out, (total.log() + top).squeeze(-1))


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """``softcap * tanh(scores / softcap)``, or the scores as they are."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, Tensor] | None,
    scale: float,
    softcap: float | None,
) -> Partial:
    if q.dtype != accumulate_dtype(q.dtype):
        return _attend_in_chunks(q, k, v, bounds, scale, softcap)
    step = max(1, MAX_SCORES // (q.shape[1] * k.shape[1]))
    parts: list[Partial] = []
    for start in range(0, len(q), step):
        part = q[start : start + step]
        scores = cap(torch.bmm(pack(part * scale, len(k)), k.transpose(1, 2)), softcap)
        if bounds is not None:
            _hide(scores, 0, _cut(bounds, start, step))
        parts.append(unpack(soften(scores, v), len(part)))
    return _join(parts)


def _attend_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, Tensor] | None,
    scale: float,
    softcap: float | None,
) -> Partial:
    """As `_attend`, for dtypes below fp32. The result is in fp32."""
    num_kv_heads, num_keys, dim = k.shape
    # On other devices more launches cost more than what a cache saves.
    size, max_scores = (CHUNK, CHUNK_SCORES) if k.device.type == "cpu" else (MAX_SCORES, MAX_SCORES)
    chunk = min(num_keys, max(MIN_KEYS, size // (num_kv_heads * dim) // ALIGN * ALIGN))
    step = max(1, max_scores // (q.shape[1] * chunk))
    shared = is_prefix(v, k)
    # One buffer for all chunks stays in cache; gradients need each chunk as it was.
    recording = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    k_buffer = None if recording else _buffer(k, chunk)
    v_buffer = None if recording or shared else _buffer(v, chunk)
    parts: list[Partial] = []
    for start in range(0, len(q), step):
        part = q[start : start + step]
        rows = pack(part.float() * scale, num_kv_heads)
        seen = None if bounds is None else _cut(bounds, start, step)
        first, left, right, last = _limits(seen, num_keys)
        partials: list[Partial] = []
        for a in range(first, last, chunk):
            b = min(a + chunk, last)
            wide_k = _widen(k[:, a:b], k_buffer)
            wide_v = wide_k[..., : v.shape[2]] if shared else _widen(v[:, a:b], v_buffer)
            scores = cap(torch.bmm(rows, wide_k.transpose(1, 2)), softcap)
            if seen is not None and (a < left or right < b):
                _hide(scores, a, seen)
            partials.append(unpack(soften(scores, wide_v), len(part)))
            if len(partials) > 1 and len(partials) * partials[0].out.numel() > max_scores:
                partials = [merge(partials)]
        if not partials:
            partials.append(empty(len(part), q.shape[1], v.shape[2], torch.float32, q.device))
        parts.append(merge(partials) if len(partials) > 1 else partials[0])
    return _join(parts)


def _cut(bounds: tuple[Tensor, Tensor], start: int, step: int) -> tuple[Tensor, Tensor]:
    lo, hi = bounds
    return lo[start : start + step], hi[start : start + step]


def _limits(bounds: tuple[Tensor, Tensor] | None, num_keys: int) -> tuple[int, int, int, int]:
    """Some row sees a key only in ``first .. last - 1``; all rows see ``left .. right - 1``."""
    if bounds is None:
        return 0, 0, num_keys, num_keys
    lo, hi = bounds
    first, left, right, last = torch.stack([lo.amin(), lo.amax(), hi.amin(), hi.amax()]).tolist()
    return max(first, 0), left, right, min(last, num_keys)


def _hide(scores: Tensor, first: int, bounds: tuple[Tensor, Tensor]) -> None:
    """-inf for what a row does not see: scores `[K, t*G, s]` of the keys from ``first`` on."""
    keys = torch.arange(first, first + scores.shape[2], device=scores.device)
    lo, hi = (b.unsqueeze(1) for b in bounds)
    hidden = ((keys < lo) | (keys >= hi)).repeat_interleave(scores.shape[1] // len(lo), 0)
    scores.masked_fill_(hidden, float("-inf"))


def _buffer(x: Tensor, keys: int) -> Tensor:
    return x.new_empty((x.shape[0], keys, x.shape[2]), dtype=torch.float32)


def _widen(x: Tensor, buffer: Tensor | None) -> Tensor:
    return x.float() if buffer is None else buffer[:, : x.shape[1]].copy_(x)


def _join(parts: list[Partial]) -> Partial:
    if len(parts) == 1:
        return parts[0]
    return Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))


def pad_rows(q: Tensor) -> Tensor:
    """Fill the rows of q `[K, M, H]` up to a multiple of 4 with zeros, unless M is 1.

    The matrix library takes twice as long for 2 or 3 rows as for 4.
    """
    missing = -q.shape[1] % 4
    return pad(q, (0, 0, 0, missing)) if missing and q.shape[1] > 1 else q


def few_rows(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Partial:
    """`_full`, with keys on the left of the product: scores^T = k q^T, transposed by a copy."""
    rows = pack(q, len(k)) * scale
    num_rows = rows.shape[1]
    scores = torch.bmm(k, pad_rows(rows).transpose(1, 2)).transpose(1, 2).contiguous()
    out, lse = soften(cap(scores, softcap), v)
    return unpack(Partial(out[:, :num_rows], lse[:, :num_rows]), len(q))


def _few_rows_pay(q: Tensor, k: Tensor) -> bool:
    return (
        q.shape[0] * q.shape[1] <= FEW_ROWS * k.shape[0]
        and k.dtype == torch.float32
        and k.stride(1) == k.shape[2]
        and k.numel() * k.itemsize >= FEW_ROWS_BYTES
        and k.device.type == "cpu"
    )


def _full(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Partial:
    if _few_rows_pay(q, k):
        return few_rows(q, k, v, scale, softcap)
    return _attend(q, k, v, None, scale, softcap)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Partial:
    last = torch.arange(len(q), device=q.device)
    return _attend(q, k, v, (torch.zeros_like(last), last + 1), scale, softcap)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, scale: float, softcap: float | None
) -> Partial:
    return _attend(q, k, v, (lo, hi), scale, softcap)


def _run(
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
    out, lse = KERNELS.run(q, k, v, lo, hi, scale=scale, softcap=softcap, tiles=tiles)
    # Narrow dtypes are rounded to here, once, and not before the parts of a tile are merged.
    return Partial(out.to(q.dtype), lse)


def _refuse(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    return None


KERNELS = Kernels(_full, _causal, _masked)
MATH = Backend("math", _run, _refuse)

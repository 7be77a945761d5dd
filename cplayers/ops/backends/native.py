"""Backend ``"native"``: few query rows over many keys on a CPU, by a kernel in C.

It needs a C compiler, as torch.compile and Triton do; without one the backend refuses, with what
the compiler said, and ``"auto"`` takes torch's operators (`cplayers.ops.backends.cpu`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cplayers.ops import native
from cplayers.ops.backends.base import Backend, PagedKeys
from cplayers.ops.backends.tiled import device_refusal
from cplayers.ops.partial import Partial
from cplayers.ops.spans import Tile

MAX_ROWS = 512
"""Rows per KV head (query heads of its group, times new tokens) up to which it pays.

Measured on one AMD EPYC core, fp32, the median in milliseconds, beside the best of the others:

==================  =====  =======  ======
keys, heads, dim    rows   native   others
==================  =====  =======  ======
64, 8, 128          4      0.043    0.075
64, 8, 128          16     0.108    0.349
2,048, 8, 128       4      0.94     1.83
2,048, 8, 128       16     2.29     3.83
16,384, 8, 128      4      7.7      13.1
16,384, 8, 128      16     18.7     27.7
16,384, 1, 128      64     7.3      9.4
16,384, 1, 576/512  16     8.2      14.8
16,384, 1, 576/512  128    58.3     60.2
4,096, 8, 128       256    56.9     56.0
16,384, 8, 128      512    450      489
==================  =====  =======  ======

On two cores it is ahead of or level with them in all of these too, by 1.4 times for 128 rows of
latents. Blocks were consecutive; others have to copy those that are not.
"""


def pays(most_rows: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether it is the fastest for requests of up to so many rows; see `Backend.pays`."""
    return most_rows * num_heads <= MAX_ROWS * num_kv_heads


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
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    return native.span_attention(q, k, v, lo.long(), hi.long(), scale=scale)


def _run_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    keys: PagedKeys,
    *,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    return native.span_attention(
        q,
        k_cache,
        v_cache,
        keys.lo,
        keys.hi,
        scale=scale,
        block_table=keys.block_table,
        block_size=keys.block_size,
        request=keys.request,
    )


def _refuse(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    refused = device_refusal(q)
    if refused is not None:
        return refused
    if softcap is not None:
        return f"it has no softcap, {softcap} was asked for"
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return "it needs q, k and v contiguous in their last dimension"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return "it has no gradient"
    reason: str | None = native.unavailable(q.shape[-1], v.shape[-1], q.dtype)
    return reason


NATIVE = Backend("native", _run, _refuse, _run_paged, pays)

"""Backend ``"rows_cpu"``: few query rows over many keys, at the speed of reading them.

    scores^T [K, s, M] = k [K, s, H] @ q^T [K, H, M]      keys on the left
    softmax over s of the transposed copy [K, M, s], then w [K, M, s] @ v [K, s, V]

With the few rows on the left the matrix library reads keys that do not fit the cache at half the
speed. Parts of a tile that are not "full" are done by ``"math"``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cplayers.ops.backends import math
from cplayers.ops.backends.base import Backend
from cplayers.ops.backends.tiled import Kernels, device_refusal

MAX_ROWS = 8
"""Rows per KV head (G*t) up to which `math.few_rows` beats flash on keys of `MIN_BYTES` or more."""

MIN_BYTES = 1 << 23
"""Size of a part's keys from which they no longer stay in cache.

Measured on one AMD EPYC core, fp32, s = 65536, K = 8, H = 128, the best of 7 in milliseconds:

======  ======  =====
rows    few     flash
======  ======  =====
1       45      71
2 to 4  53      78
6, 8    79      90
16      153     112
======  ======  =====

With s = 2048 (8 MiB) 4 rows take 1.6 against 2.4 and 8 rows 2.5 against 2.8. Two cores, which
were shared while measuring, gave the same order at s = 65536 for 1, 4 and 8 rows.
On keys of 1.5 MiB and below (s = 2048, K = 3, H = 64) flash wins or ties at every number of rows.
"""


def pays(q: Tensor, k: Tensor) -> bool:
    """Whether `math.few_rows` beats flash for q `[t, N, H]`, k `[K, s, H]`.

    Not on keys whose rows lie apart, as token-major ones do: it takes up to 3 times as long there.
    """
    return (
        q.shape[0] * q.shape[1] <= MAX_ROWS * k.shape[0]
        and k.numel() * k.itemsize >= MIN_BYTES
        and k.stride(1) == k.shape[2]
    )


def _refuse(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    if q.dtype not in (torch.float32, torch.float64):
        # A product of bf16 matrices is rounded to bf16, which scores do not survive.
        return f"it computes in the dtype of its inputs, which for {q.dtype} is too coarse"
    return device_refusal(q)


KERNELS = Kernels(math.few_rows, math.KERNELS.causal, math.KERNELS.masked)
ROWS_CPU = Backend("rows_cpu", KERNELS.run, _refuse)

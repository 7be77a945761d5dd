"""Backend ``"triton"``: this library's own kernel, for contiguous keys on CUDA devices.

The keys stay where they are, heads apart or not; see `cplayers.ops.kernels.attention`. Triton is
imported with the first call, so that a machine without it, or without a GPU, pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cplayers.ops.backends.base import Backend, PagedKeys
from cplayers.ops.device import refuse_kernels
from cplayers.ops.partial import Partial
from cplayers.ops.spans import Tile

MAX_DIM, MAX_VALUE_DIM = 576, 512
"""Largest head and value dimension."""


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
    from cplayers.ops.kernels import span_attention

    k, v = k.transpose(0, 1), v.transpose(0, 1)
    return span_attention(q, k, v, lo.contiguous(), hi.contiguous(), scale=scale, softcap=softcap)


def _run_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    keys: PagedKeys,
    *,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    from cplayers.ops.kernels import span_attention

    return span_attention(
        q,
        k_cache,
        v_cache,
        keys.lo,
        keys.hi,
        scale=scale,
        softcap=softcap,
        block_table=keys.block_table,
        block_size=keys.block_size,
        request=keys.request,
        rows_per_request=keys.usual_rows,
    )


def refuse(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    """Why the kernel cannot do this, or ``None``."""
    refused = refuse_kernels(q, k, v)
    if refused is not None:
        return refused
    if q.shape[-1] > MAX_DIM or v.shape[-1] > MAX_VALUE_DIM:
        limits = f"H up to {MAX_DIM} and V up to {MAX_VALUE_DIM}"
        return f"it takes {limits}, got H={q.shape[-1]}, V={v.shape[-1]}"
    if q.shape[-1] > 1 and not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return "it needs q, k and v contiguous in their last dimension"
    return None


TRITON = Backend("triton", _run, refuse, _run_paged)

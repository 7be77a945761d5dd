"""Backend ``"triton"``: this library's own kernel, for contiguous keys on CUDA devices.

The keys stay where they are, heads apart or not; see `cplayers.ops.kernels.attention`. Triton is
imported with the first call, so that a machine without it, or without a GPU, pays nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from cplayers.ops.backends.base import Backend, PagedKeys
from cplayers.ops.partial import Partial
from cplayers.ops.spans import Tile

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What it takes."""

MAX_DIM, MAX_VALUE_DIM = 576, 512
"""Largest head and value dimension."""

CAPABILITY = (8, 0)
"""Least compute capability: the tensor cores that the kernel is compiled for."""


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
    )


def refuse(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    """Why the kernel cannot do this, or ``None``."""
    if q.device.type != "cuda":
        return f"it runs on CUDA devices, q is on {q.device}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    capability = torch.cuda.get_device_capability(q.device)
    if capability < CAPABILITY:
        return f"it needs compute capability 8.0, {q.device} has {'.'.join(map(str, capability))}"
    if q.dtype not in DTYPES:
        return f"it takes fp32, bf16 and fp16, q is {q.dtype}"
    if q.shape[-1] > MAX_DIM or v.shape[-1] > MAX_VALUE_DIM:
        limits = f"H up to {MAX_DIM} and V up to {MAX_VALUE_DIM}"
        return f"it takes {limits}, got H={q.shape[-1]}, V={v.shape[-1]}"
    if q.shape[-1] > 1 and not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return "it needs q, k and v contiguous in their last dimension"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return "it has no gradient"
    return None


TRITON = Backend("triton", _run, refuse, _run_paged)

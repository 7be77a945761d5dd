"""Where the Triton kernels run: asked before one is launched, without importing Triton."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels read and write; they add up in fp32."""

CAPABILITY = (8, 0)
"""Least compute capability: the tensor cores that the kernels are compiled for."""


def refuse_kernels(*tensors: Tensor) -> str | None:
    """Why no kernel can take these tensors, or ``None``.

    Args:
        *tensors: Of one device.
    """
    first = tensors[0]
    if not first.is_cuda:  # asked for every layer of a CPU's step: a device takes 5 us to print
        return "it runs on CUDA devices, not on the " + first.device.type
    refused = _refuse_device(first.device)
    if refused is not None:
        return refused
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            return f"it takes fp32, bf16 and fp16, not {tensor.dtype}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "it has no gradient"
    return None


@cache
def _refuse_device(device: torch.device) -> str | None:
    """What cannot change while the process lives, so that a call pays for it once."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"it needs compute capability 8.0, {device} has {'.'.join(map(str, capability))}"
    return None

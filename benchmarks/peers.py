"""Other implementations of the same work, called at their best.

- torch's own ring attention, `torch.distributed.tensor.experimental`. Its public context manager
  refuses causal attention on a CPU; its template with the CPU flash operator does it, and its load
  balance splits a prompt over ranks as `cplayers.ZigzagLayout` does.
- ring-attention-pytorch (lucidrains), from the extra ``bench``.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LUCIDRAINS = "ring-attention-pytorch"
MISSING = f"{LUCIDRAINS} is not installed: pip install '.[bench]'"


def has_lucidrains() -> bool:
    return find_spec("ring_attention_pytorch") is not None


def lucidrains() -> Any:
    """The package, told anew how many ranks there are: it remembers that for good."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its type hints, which Python has deprecated
        import ring_attention_pytorch
        from ring_attention_pytorch import distributed
    for known in (distributed.get_rank, distributed.get_world_size, distributed.is_distributed):
        known.cache_clear()
    return ring_attention_pytorch


def torch_ring(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """torch's causal ring over all ranks, zigzag rows `[1, heads, T, H]`, all-to-all rotation."""
    from torch.distributed.tensor.experimental._attention import (
        _cp_options,
        _templated_ring_attention,
        set_rotate_method,
    )

    set_rotate_method("alltoall")
    _cp_options.enable_load_balance = True
    out: Tensor = _templated_ring_attention(
        dist.group.WORLD,
        2,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        q,
        k,
        v,
        is_causal=True,
        scale=scale,
    )[0]
    return out

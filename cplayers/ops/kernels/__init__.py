"""Triton kernels for CUDA devices of compute capability 8.0 and above.

Each has a plain torch version of the same name in `cplayers.ops.plain`, which it equals.
They are tested under Triton's interpreter on the CPU and compiled for sm_80 and sm_90 without a
device; `tests/gpu` and ``benchmarks/gpu.py`` run them on one.
"""

from __future__ import annotations

from cplayers.ops.kernels.attention import span_attention
from cplayers.ops.kernels.merge import merge_packed, merge_partials
from cplayers.ops.kernels.pack import pack, unpack
from cplayers.ops.kernels.write import cache_write

__all__ = ["cache_write", "merge_packed", "merge_partials", "pack", "span_attention", "unpack"]

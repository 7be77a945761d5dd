"""Local attention backends, one file each."""

from __future__ import annotations

from cplayers.ops.backends.base import Backend, PagedKeys
from cplayers.ops.backends.cpu import CPU
from cplayers.ops.backends.flash_cpu import FLASH_CPU
from cplayers.ops.backends.math import MATH
from cplayers.ops.backends.native import NATIVE
from cplayers.ops.backends.rows_cpu import ROWS_CPU
from cplayers.ops.backends.triton import TRITON
from cplayers.ops.backends.varlen import VARLEN

BACKENDS: dict[str, Backend] = {
    b.name: b for b in (TRITON, VARLEN, NATIVE, CPU, FLASH_CPU, ROWS_CPU, MATH)
}
"""All backends by name."""

PREFERENCE: tuple[Backend, ...] = (TRITON, CPU, FLASH_CPU, MATH)
"""What ``backend="auto"`` tries, in order; the last one takes everything."""

PAGED: tuple[Backend, ...] = (TRITON, VARLEN, NATIVE)
"""Those that attend to a paged cache in one call, in order of preference."""

__all__ = ["BACKENDS", "PAGED", "PREFERENCE", "Backend", "PagedKeys"]

"""Local attention backends, one file each."""

from __future__ import annotations

from cplayers.ops.backends.base import Backend
from cplayers.ops.backends.cpu import CPU
from cplayers.ops.backends.flash_cpu import FLASH_CPU
from cplayers.ops.backends.math import MATH
from cplayers.ops.backends.rows_cpu import ROWS_CPU

BACKENDS: dict[str, Backend] = {b.name: b for b in (CPU, FLASH_CPU, ROWS_CPU, MATH)}
"""All backends by name."""

PREFERENCE: tuple[Backend, ...] = (CPU, FLASH_CPU, MATH)
"""What ``backend="auto"`` tries, in order; the last one takes everything."""

__all__ = ["BACKENDS", "PREFERENCE", "Backend"]

"""Huge pages for large tensors: a hint to the kernel, without which nothing but time is lost.

On one core of an AMD EPYC under a hypervisor, reading 537 MB of fp32 keys and values takes 16 ms
with them and 21 without, attention over them 24 and 29: fewer addresses have to be translated.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

MIN_BYTES = 1 << 22
"""Smaller tensors come from memory that is in use already, or hold hardly a page of 2 MiB."""


def advise(tensor: Tensor) -> None:
    """Ask for huge pages under a tensor on the CPU that nobody has written to yet.

    Args:
        tensor: Contiguous; others than large ones on Linux are left alone.
    """
    size = tensor.numel() * tensor.itemsize
    if tensor.device.type != "cpu" or size < MIN_BYTES or sys.platform != "linux":
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
    address, count = ctypes.c_void_p(start), ctypes.c_size_t(length)
    ctypes.CDLL(None).madvise(address, count, mmap.MADV_HUGEPAGE)

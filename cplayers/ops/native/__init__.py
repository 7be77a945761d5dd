"""A kernel in C for CPUs, compiled at first use, as torch.compile and Triton's launcher are."""

from __future__ import annotations

from cplayers.ops.native.attention import span_attention, unavailable

__all__ = ["span_attention", "unavailable"]

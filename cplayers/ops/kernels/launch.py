"""What a kernel is launched with, as a value that can be launched, or compiled without a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from cplayers.errors import ConfigError


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
        kernel: A function of ``triton.jit``.
        grid: Programs along up to three axes.
        args: Tensors and numbers by the kernel's parameter names.
        constants: Compile-time values, likewise.
        warps: Warps of a program.
        stages: Depth of the pipeline of a loop.
    """

    kernel: Callable[..., Any]
    grid: tuple[int, ...]
    args: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """How it is compiled. Fused multiply-add is asked for, since Triton's default changes."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def run(self) -> None:
        """Launch it on the device of its tensors.

        Raises:
            ConfigError: The tensors are on no GPU, and Triton's interpreter is not in use.
        """
        device = next(a.device for a in self.args.values() if isinstance(a, Tensor))
        if device.type != "cuda" and not interpreted(self.kernel):
            raise ConfigError(
                f"tensors on {device}",
                "Triton kernels run on CUDA devices",
                "move the tensors to a GPU, or use what has the same name in cplayers.ops.plain",
            )
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.args, **self.constants, **self.options)


def interpreted(kernel: Callable[..., Any]) -> bool:
    """Whether Triton's interpreter runs the kernel, which takes tensors of the CPU."""
    return not isinstance(kernel, triton.runtime.JITFunction)


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for any other device."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def require(rule: str, remedy: str, holds: bool, **given: Any) -> None:
    """Raise ConfigError unless a rule holds, naming what was given.

    Args:
        rule: The rule.
        remedy: What to do instead.
        holds: Whether it is kept.
        **given: Tensors, shown by shape and dtype, or other values, by name.
    """
    if holds:
        return
    shown = (
        f"{name} {list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else f"{name}={x!r}"
        for name, x in given.items()
    )
    raise ConfigError(", ".join(shown), rule, remedy)

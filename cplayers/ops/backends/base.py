"""What a local attention backend is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from cplayers.ops.partial import Partial
from cplayers.ops.spans import Tile


class Run(Protocol):
    """The work of a backend; see `cplayers.ops.attend` for the arguments."""

    def __call__(
        self,
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
        """Attend; lse in natural log."""
        ...


class Backend(NamedTuple):
    """One way of computing attention on this device.

    Attributes:
        name: Under which it is asked for and reported.
        run: Does the work.
        refuse: ``refuse(q, k, v, softcap)`` says why the backend cannot do it, or ``None``.
    """

    name: str
    run: Run
    refuse: Callable[[Tensor, Tensor, Tensor, float | None], str | None]

"""What a local attention backend is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
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


class PagedKeys(NamedTuple):
    """Which keys of a paged cache each of T query rows sees.

    Attributes:
        block_table: Block ids, int32 `[S, B]`: key s of a request is in block ``s // Z``.
        block_size: Slots per block (Z).
        request: Row of the table of each query row, int64 `[T]`; rows of a request are together.
        lo: First key that each row sees, counted in its request, int64 `[T]`.
        hi: One past the last, int64 `[T]`.
        most_rows: Most rows of a request.
        causal_rows: Rows of each request, in their order, where the plan knows without a look at
            lo and hi that every row sees the keys from 0 on, the last one of a request all up to
            its hi and each before it one less; else ``None``.
        usual_rows: Rows that requests have on average, rounded up: what a kernel's tiles hold.
    """

    block_table: Tensor
    block_size: int
    request: Tensor
    lo: Tensor
    hi: Tensor
    most_rows: int
    causal_rows: tuple[int, ...] | None = None
    usual_rows: int = 1

    def part(self, rows: slice) -> PagedKeys:
        """Of some rows, those of whole requests, which come one after another."""
        counts = None
        if self.causal_rows is not None:
            ends = accumulate(self.causal_rows)
            pairs = zip(self.causal_rows, ends, strict=True)
            start = rows.start or 0
            counts = tuple([n for n, end in pairs if n and start < end <= rows.stop])
        request, lo, hi = self.request[rows], self.lo[rows], self.hi[rows]
        return self._replace(request=request, lo=lo, hi=hi, causal_rows=counts)


class RunPaged(Protocol):
    """The same work on keys `[K, slots, H]` and values `[K, slots, V]` where a cache has them."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        keys: PagedKeys,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> Partial:
        """Attend; lse in natural log."""
        ...


class Backend(NamedTuple):
    """One way of computing attention on this device.

    Attributes:
        name: Under which it is asked for and reported.
        run: Does the work.
        refuse: ``refuse(q, k, v, softcap)`` says why the backend cannot do it, or ``None``.
        paged: Does the work of a whole step on a paged cache in one call; ``None``: it cannot, and
            is called for each run of consecutive blocks.
        pays: ``pays(most_rows, N, K)`` says whether ``paged`` is the fastest for requests of up to
            so many rows; only ``"auto"`` asks.
        takes: ``takes(keys)`` says whether ``paged`` can do a step; if not, it is as without one.
    """

    name: str
    run: Run
    refuse: Callable[[Tensor, Tensor, Tensor, float | None], str | None]
    paged: RunPaged | None = None
    pays: Callable[[int, int, int], bool] = lambda most_rows, num_heads, num_kv_heads: True
    takes: Callable[[PagedKeys], bool] = lambda keys: True

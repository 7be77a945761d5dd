"""How a layer scores keys: the same for every strategy, handed through as one value."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from cplayers.ops import PagedKeys, Partial, Tile, attend, attend_paged


class Seen(Protocol):
    """Which of some keys each row sees."""

    @property
    def lo(self) -> Tensor:
        """First key, int `[T]`."""
        ...

    @property
    def hi(self) -> Tensor:
        """One past the last key."""
        ...

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """`cplayers.ops.tile_rows` of lo and hi."""
        ...


class Scoring(NamedTuple):
    """What makes attention weights of a query and a key.

    Attributes:
        scale: Factor on the logits.
        softcap: Soft cap on them, or ``None``.
        window: A query at p sees the positions p - window + 1 .. p; ``None``: all up to p.
        backend: Local attention backend, see `cplayers.ops.attend`.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    backend: str = "auto"

    def attend_paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, keys: PagedKeys
    ) -> Partial | None:
        """The same on keys `[K, slots, H]` and values `[K, slots, V]` where a cache has them.

        Args:
            q: Queries.
            k_cache: Keys.
            v_cache: Values.
            keys: What each row sees.

        Returns:
            ``None`` if the backend wants keys run by run.
        """
        return attend_paged(
            q,
            k_cache,
            v_cache,
            keys,
            scale=self.scale,
            softcap=self.softcap,
            backend=self.backend,
        )

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, seen: Seen) -> Partial:
        """Partial attention of q `[T, N, H]` to keys `[S, K, H]` and values `[S, K, V]`.

        Args:
            q: Queries.
            keys: Keys.
            values: Values.
            seen: What each row sees of them.
        """
        return attend(
            q,
            keys,
            values,
            seen.lo,
            seen.hi,
            scale=self.scale,
            softcap=self.softcap,
            backend=self.backend,
            tiles=seen.tiles,
        )

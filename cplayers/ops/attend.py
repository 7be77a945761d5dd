"""Attention of packed queries over local keys: `attend`.

The work is done by a backend (`cplayers.ops.backends`). ``"auto"`` takes the first that can do it,
and `select` tells which; a backend asked for by name does it or raises, it is never replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cplayers.errors import ConfigError
from cplayers.ops.backends import BACKENDS, PAGED, PREFERENCE, Backend, PagedKeys
from cplayers.ops.partial import Partial
from cplayers.ops.spans import Tile


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
    tiles: Sequence[Tile] | None = None,
) -> Partial:
    """Attend with each query row to its own run of keys.

    Args:
        q: `[T, N, H]`; query head n reads KV head n // (N/K).
        k: `[S, K, H]`, may be a view; it is not copied (``"math"`` converts dtypes below fp32, the
            flash operator's backends widen values that are narrower than keys).
        v: `[S, K, V]`, likewise.
        lo: First key that each row sees, int `[T]`.
        hi: One past the last key that each row sees, int `[T]`; hi <= lo: it sees nothing.
        scale: Factor of q . k.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        backend: A name from `available_backends`, or ``"auto"``.
        tiles: ``tile_rows(lo, hi)`` where the caller has it, so that it is computed once per step.
            It is trusted: the values of lo and hi are then not checked again.

    Returns:
        out `[T, N, V]` in q's dtype and lse `[T, N]` in fp32, natural log; (0, -inf) for a row that
        sees nothing.

    Raises:
        ConfigError: Shapes, dtypes or spans do not fit together, or the backend cannot do this.
    """
    _check(q, k, v, lo, hi)
    if tiles is None:
        _check_range(lo, hi, len(k))
    if backend == "auto":
        backend = select(q, k, v, softcap)
    else:
        require_fit(backend, q, k, v, softcap)
    return BACKENDS[backend].run(q, k, v, lo, hi, scale=scale, softcap=softcap, tiles=tiles)


def attend_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    keys: PagedKeys,
    *,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> Partial | None:
    """The same on keys where a paged cache has them, in one call, if a backend can.

    Args:
        q: `[T, N, H]`.
        k_cache: `[K, slots, H]`.
        v_cache: `[K, slots, V]`.
        keys: What each row sees, and where. Not checked by value.
        scale: Factor of q . k.
        softcap: Soft cap on the logits, or ``None``.
        backend: As for `attend`.

    Returns:
        As `attend`; or ``None``: the backend is called with keys, run by run.

    Raises:
        ConfigError: Shapes or dtypes do not fit together.
    """
    _check_paged(q, k_cache, v_cache, keys)
    paged = select_paged(q, k_cache, v_cache, keys.most_rows, softcap, backend)
    if paged is None or paged.paged is None or not paged.takes(keys):
        return None
    return paged.paged(q, k_cache, v_cache, keys, scale=scale, softcap=softcap)


def select_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    most_rows: int,
    softcap: float | None = None,
    backend: str = "auto",
) -> Backend | None:
    """The backend that `attend_paged` takes, or ``None``.

    Args:
        q: `[T, N, H]`.
        k_cache: `[K, slots, H]`.
        v_cache: `[K, slots, V]`.
        most_rows: Most rows of a request.
        softcap: Soft cap on the logits, or ``None``.
        backend: As for `attend`.
    """
    for candidate in PAGED:
        wanted = backend == candidate.name or (
            backend == "auto" and candidate.pays(most_rows, q.shape[1], k_cache.shape[0])
        )
        if wanted and candidate.refuse(q, k_cache, v_cache, softcap) is None:
            return candidate
    return None


def select(q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None) -> str:
    """Name of the backend that ``backend="auto"`` takes for these tensors."""
    for backend in PREFERENCE[:-1]:
        if backend.refuse(q, k, v, softcap) is None:
            return backend.name
    return PREFERENCE[-1].name


def available_backends(
    q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None
) -> tuple[str, ...]:
    """Names of all backends that can do the work on these tensors."""
    return tuple(n for n, b in BACKENDS.items() if b.refuse(q, k, v, softcap) is None)


def require_backend(name: str) -> None:
    """Raise ConfigError unless ``name`` is ``"auto"`` or names a backend."""
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(
            f'backend="{name}"', "no such backend", f"use auto or one of {', '.join(BACKENDS)}"
        )


def require_fit(name: str, q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> None:
    """Raise ConfigError unless the backend can attend with tensors such as these.

    Args:
        name: Its name.
        q: `[T, N, H]`; only its dtype, device, strides and H count.
        k: `[S, K, H]`, likewise.
        v: `[S, K, V]`, likewise.
        softcap: Soft cap on the logits, or ``None``.
    """
    require_backend(name)
    refused = BACKENDS[name].refuse(q, k, v, softcap)
    if refused is not None:
        others = ", ".join(available_backends(q, k, v, softcap))
        raise ConfigError(f'backend="{name}"', refused, f"use auto or one of {others}")


def _check(q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor) -> None:
    """Shapes and dtypes only: cheap enough for every call."""
    if (
        q.dim() == k.dim() == v.dim() == 3
        and k.shape[:2] == v.shape[:2]
        and q.shape[2] == k.shape[2]
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
        and lo.shape == hi.shape == q.shape[:1]
        and q.dtype == k.dtype == v.dtype
    ):
        return
    raise ConfigError(
        ", ".join(
            f"{name} {list(t.shape)} {t.dtype}"
            for name, t in (("q", q), ("k", k), ("v", v), ("lo", lo), ("hi", hi))
        ),
        "attention needs q [T, N, H], k [S, K, H], v [S, K, V] of one dtype, with K dividing N, "
        "and lo, hi [T]",
        "pass tensors of these shapes and of one dtype",
    )


def _check_paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, keys: PagedKeys) -> None:
    """Shapes and dtypes only, since a kernel would read beyond what does not fit."""
    at = keys.request, keys.lo, keys.hi
    if (
        q.dim() == k_cache.dim() == v_cache.dim() == 3
        and k_cache.shape[:2] == v_cache.shape[:2]
        and q.shape[2] == k_cache.shape[2]
        and k_cache.shape[0] > 0
        and q.shape[1] % k_cache.shape[0] == 0
        and q.dtype == k_cache.dtype == v_cache.dtype
        and all(t.shape == q.shape[:1] and t.dtype == torch.int64 for t in at)
        and keys.block_table.dtype == torch.int32
        and keys.block_table.dim() == 2
    ):
        return
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "table": keys.block_table}
    given |= dict(zip(("request", "lo", "hi"), at, strict=True))
    raise ConfigError(
        ", ".join(f"{name} {list(t.shape)} {t.dtype}" for name, t in given.items()),
        "attention needs q [T, N, H], k_cache [K, slots, H], v_cache [K, slots, V] of one dtype, "
        "with K dividing N, int64 request, lo and hi [T], and an int32 table [S, B]",
        "pass tensors of these shapes, and of the cache's dtype",
    )


def _check_range(lo: Tensor, hi: Tensor, num_keys: int) -> None:
    sees = hi > lo
    wrong = (sees & ((lo < 0) | (hi > num_keys))).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ConfigError(
            f"lo={int(lo[row])}, hi={int(hi[row])} in row {row}",
            f"a span lies within the {num_keys} keys",
            "count the keys that this rank holds",
        )

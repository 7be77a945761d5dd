"""Does a local attention backend keep the contract of `cplayers.ops.attend`?

A kernel that is right on its own can still be wrong in a merge: lse in base 2 or all zero, query
heads grouped (h g) instead of (g h), causal masks aligned to the wrong corner, rows without keys
that return lse 0. With random, unpeaked logits most of this hides below any usual tolerance, so the
cases here are peaked, of odd lengths and of unequal spans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cplayers.errors import CPLayersError
from cplayers.ops import Partial, attention_reference

PEAK = 4.0
"""Factor of the queries, which makes a few keys dominate each row."""


class BackendError(CPLayersError, AssertionError):
    """A backend breaks the contract; the message names the case and what is wrong."""


class Attention(Protocol):
    """What is checked: `cplayers.ops.attend`, or a kernel behind the same arguments."""

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
    ) -> Partial | tuple[Tensor, Tensor]:
        """Return out `[T, N, V]` and lse `[T, N]`."""
        ...


class Case(NamedTuple):
    """Shapes and spans of one check: ``spans[t]`` is (lo, hi) of row t."""

    name: str
    spans: tuple[tuple[int, int], ...]
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    softcap: float | None = None


def _cases(softcap: bool, value_dim: bool) -> Iterator[Case]:
    chunk = tuple((0, n) for n in range(20, 33))
    yield Case("one decode row", ((0, 37),), 37, 6, 2, 16, 16)
    yield Case("one key", ((0, 1),), 1, 2, 1, 16, 16)
    yield Case("causal square", tuple((0, n + 1) for n in range(19)), 19, 6, 2, 16, 16)
    yield Case("causal chunk after a prefix", chunk, 32, 6, 3, 16, 16)
    yield Case("causal rows, more keys than rows see", ((0, 1), (0, 2), (0, 3)), 11, 4, 2, 16, 16)
    yield Case("interleaved shard", ((0, 1), (0, 2), (0, 2), (0, 3)), 3, 4, 2, 16, 16)
    yield Case("sliding window", tuple((n, n + 5) for n in range(13)), 17, 4, 2, 16, 16)
    yield Case("rows that see nothing", ((0, 0), (0, 7), (3, 3), (5, 2), (7, 9)), 9, 4, 2, 16, 16)
    yield Case("no row sees anything", ((0, 0), (4, 4)), 5, 4, 2, 16, 16)
    yield Case("no keys", ((0, 0), (0, 0)), 0, 4, 2, 16, 16)
    yield Case("packed requests with gaps", ((0, 3), (0, 4), (6, 7), (9, 15)), 17, 6, 2, 16, 16)
    yield Case("many rows", tuple((0, 300 + n // 2) for n in range(131)), 366, 4, 2, 32, 32)
    if softcap:
        yield Case("softcap", chunk, 32, 6, 3, 16, 16, 2.0)
    if value_dim:
        yield Case("V != H", chunk, 32, 6, 1, 24, 16)


def check_backend(
    fn: Attention,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    device: torch.device | str = "cpu",
    softcap: bool = False,
    value_dim: bool = False,
) -> None:
    """Check a backend against fp64 attention on small, awkward inputs.

    Args:
        fn: Called as ``fn(q, k, v, lo, hi, scale=..., softcap=...)``. Keys and values are views
            whose heads lie apart, as in the paged cache; keys that no row sees hold NaN.
        dtypes: Dtypes of q, k and v. fp32 is held to 1e-5; narrower ones to twice the error of a
            softmax in fp32 whose weights and result are rounded to that dtype.
        device: Where the inputs live.
        softcap: Also check a softcap.
        value_dim: Also check values narrower than keys.

    Raises:
        BackendError: Something is wrong; the message says in which case and what.
    """
    for case in _cases(softcap, value_dim):
        for dtype in dtypes:
            _check(fn, case, dtype, torch.device(device))


def _check(fn: Attention, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    where = f"{case.name} ({dtype})"
    generator = torch.Generator().manual_seed(len(case.spans) + case.num_keys)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q = draw(len(case.spans), case.num_heads, case.head_dim) * PEAK
    k = draw(case.num_kv_heads, case.num_keys, case.head_dim).transpose(0, 1)
    v = draw(case.num_kv_heads, case.num_keys, case.value_dim).transpose(0, 1)
    lo, hi = torch.tensor(case.spans).unbind(1)
    scale = case.head_dim**-0.5
    expected = attention_reference(q, k, v, lo, hi, scale=scale, softcap=case.softcap)
    keys = torch.arange(case.num_keys)
    unseen = ~((keys >= lo.unsqueeze(1)) & (keys < hi.unsqueeze(1))).any(0)
    k[unseen] = math.nan
    v[unseen] = math.nan
    arguments = (t.to(device) for t in (q, k, v, lo, hi))
    out, lse = fn(*arguments, scale=scale, softcap=case.softcap)

    shape = (*q.shape[:2], case.value_dim)
    if out.shape != shape or out.dtype != dtype:
        raise BackendError(
            f"{where}: out is {list(out.shape)} {out.dtype}, not {list(shape)} {dtype}"
        )
    if lse.shape != shape[:2] or lse.dtype != torch.float32:
        raise BackendError(
            f"{where}: lse is {list(lse.shape)} {lse.dtype}, not {list(shape[:2])} torch.float32"
        )
    out, lse = out.cpu().double(), lse.cpu().double()
    blind = hi <= lo
    if out[blind].ne(0).any() or lse[blind].ne(-math.inf).any():
        raise BackendError(f"{where}: a row that sees nothing must give out 0 and lse -inf")
    sees = ~blind
    if not (out[sees].isfinite().all() and lse[sees].isfinite().all()):
        raise BackendError(f"{where}: not finite; keys outside the spans hold NaN and must not act")
    _check_lse(where, lse[sees], expected.lse[sees], dtype)
    error = _largest(out - expected.out)
    bound = _bound(dtype, q, k, v, case, expected)
    if error > bound:
        grouped = k[:, torch.arange(case.num_heads) % case.num_kv_heads]
        values = v[:, torch.arange(case.num_heads) % case.num_kv_heads]
        swapped = attention_reference(q, grouped, values, lo, hi, scale=scale, softcap=case.softcap)
        hint = ""
        if _largest(out - swapped.out) <= bound:
            hint = "; it matches query head n reading KV head n % K, which must be n // (N/K)"
        raise BackendError(f"{where}: out is off by {error:.2e}, allowed is {bound:.2e}{hint}")


def _check_lse(where: str, lse: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    # Scores are summed in fp32 for every input dtype. Below fp32 some kernels take a coarser exp,
    # yet stay far from the error of scores rounded to that dtype, which is eps/2 times the score.
    bound = 1e-5 if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).eps / 8
    if _close(lse, expected, bound):
        return
    if not lse.any():
        hint = "it is all zeros"
    elif _close(lse * math.log(2), expected, bound):
        hint = "it is in base 2, natural log is asked for"
    else:
        hint = "check the scale, the mask's alignment and the order of heads"
    raise BackendError(f"{where}: lse is off by {_largest(lse - expected):.2e}; {hint}")


def _close(lse: Tensor, expected: Tensor, bound: float) -> bool:
    return bool(((lse - expected).abs() <= bound * expected.abs().clamp_min(1.0)).all())


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def _bound(
    dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, case: Case, expected: Partial
) -> float:
    """The largest error allowed in out."""
    if dtype in (torch.float32, torch.float64):
        return 1e-5
    group = case.num_heads // case.num_kv_heads
    worst = 0.0
    for t, (lo, hi) in enumerate(case.spans):
        if hi <= lo:
            continue
        keys = k[lo:hi].float().repeat_interleave(group, 1)
        values = v[lo:hi].float().repeat_interleave(group, 1)
        scores = torch.einsum("nh,snh->ns", q[t].float(), keys) * case.head_dim**-0.5
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        weights = scores.softmax(-1).to(dtype).float()
        plain = torch.einsum("ns,snv->nv", weights, values).to(dtype)
        worst = max(worst, _largest(plain.double() - expected.out[t]))
    return 2 * worst

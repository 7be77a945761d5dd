"""Backend ``"math"``: two matrix products and a softmax, on any device, for any dtype and width.

Scores and softmax are in fp32, or fp64 for fp64 inputs; other dtypes are converted, keys and values
of a tile included. The memory that scores take is bounded by `MAX_SCORES`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cplayers.ops.backends.base import Backend
from cplayers.ops.backends.tiled import Kernels, pack, unpack
from cplayers.ops.partial import Partial

MAX_SCORES = 1 << 24
"""Most scores that are held at once, 64 MiB in fp32; more rows are done in chunks."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def soften(scores: Tensor, v: Tensor) -> Partial:
    """Softmax of ``scores`` times ``v``. Overwrites ``scores``; -inf marks a key that is not seen.

    Args:
        scores: `[K, M, s]`, fp32 or fp64.
        v: `[K, s, V]`, of the same dtype.

    Returns:
        out `[K, M, V]`, lse `[K, M]`, in the dtype of the scores.
    """
    # The floor keeps -inf - -inf, a NaN, from arising in a row that sees nothing.
    # Detached: its gradient cancels, and the scores are overwritten.
    top = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    # The largest weight is exactly 1, so the clamp acts only in a row that sees nothing.
    out = torch.bmm(weights, v) / total.clamp_min(1.0)
    return Partial(out, (total.log() + top).squeeze(-1))


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """``softcap * tanh(scores / softcap)``, or the scores as they are."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, Tensor] | None,
    scale: float,
    softcap: float | None,
) -> Partial:
    dtype = accumulate_dtype(q.dtype)
    k, v = k.to(dtype), v.to(dtype)
    keys = torch.arange(k.shape[1], device=k.device)
    step = max(1, MAX_SCORES // (q.shape[1] * k.shape[1]))
    chunks: list[Partial] = []
    for start in range(0, len(q), step):
        part = q[start : start + step]
        scores = cap(torch.bmm(pack(part.to(dtype) * scale, len(k)), k.transpose(1, 2)), softcap)
        if bounds is not None:
            lo, hi = (b[start : start + step].unsqueeze(1) for b in bounds)
            hidden = ((keys < lo) | (keys >= hi)).repeat_interleave(q.shape[1] // len(k), 0)
            scores.masked_fill_(hidden, float("-inf"))
        chunks.append(unpack(soften(scores, v), len(part)))
    if len(chunks) == 1:
        return Partial(chunks[0].out.to(q.dtype), chunks[0].lse)
    return Partial(
        torch.cat([c.out for c in chunks]).to(q.dtype), torch.cat([c.lse for c in chunks])
    )


def _full(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Partial:
    return _attend(q, k, v, None, scale, softcap)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Partial:
    last = torch.arange(len(q), device=q.device)
    return _attend(q, k, v, (torch.zeros_like(last), last + 1), scale, softcap)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, scale: float, softcap: float | None
) -> Partial:
    return _attend(q, k, v, (lo, hi), scale, softcap)


def _refuse(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    return None


KERNELS = Kernels(_full, _causal, _masked)
MATH = Backend("math", KERNELS.run, _refuse)

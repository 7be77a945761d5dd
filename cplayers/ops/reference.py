"""Attention in fp64, the slow obvious way: the oracle of every test.

It shares no computation with the rest of the library, and is written to be read, not to be fast.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cplayers.ops.partial import Partial


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Partial:
    """Attention of each query row over its own keys ``lo[t] .. hi[t] - 1``.

    Args:
        q: `[T, N, H]`.
        k: `[S, K, H]`; query head n reads KV head n // (N/K).
        v: `[S, K, V]`.
        lo: First key of each row, int `[T]`.
        hi: One past the last key of each row, int `[T]`.
        scale: Factor of q . k.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        sinks: One more logit per head in the denominator, `[N]`.

    Returns:
        out `[T, N, V]` and lse `[T, N]`, both fp64; 0 and -inf for a row without keys or sinks.
    """
    num_tokens, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    out = torch.zeros(num_tokens, num_heads, v.shape[2], dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    q, k, v = q.detach().cpu().double(), k.detach().cpu().double(), v.detach().cpu().double()
    for t in range(num_tokens):
        seen = range(int(lo[t]), int(hi[t]))
        for n in range(num_heads):
            keys = k[seen.start : seen.stop, n // group] if seen else k[:0, 0]
            logits = keys @ q[t, n] * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if sinks is not None:
                logits = torch.cat([logits, sinks[n : n + 1].detach().cpu().double()])
            if not len(logits):
                continue
            largest = logits.max()
            if largest == -math.inf:  # a sink of -inf and no key
                continue
            exponentials = torch.exp(logits - largest)
            lse[t, n] = largest + torch.log(exponentials.sum())
            weights = exponentials / exponentials.sum()
            if seen:
                out[t, n] = weights[: len(seen)] @ v[seen.start : seen.stop, n // group]
    return Partial(out.to(q.device), lse.to(q.device))

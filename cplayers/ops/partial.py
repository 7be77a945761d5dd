"""Partial attention results and their exact merge.

Attention over a part of the keys is ``out`` (softmax-weighted values) and ``lse`` (natural log of
the sum of exponentials). Over disjoint parts i of the keys::

    lse = log sum_i exp(lse_i)
    out = sum_i exp(lse_i - lse) * out_i

in any order, with the identity ``(0, -inf)``: no keys. `scale_weights` is the one place of the
first line and of the factor in the second, `weigh` of the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_NEG_INF = float("-inf")
_POS_INF = float("inf")


class Partial(NamedTuple):
    """Attention over some of the keys.

    Attributes:
        out: Weighted values `[T, N, V]`; 0 where a row saw no key.
        lse: Natural log of the softmax denominator, fp32 `[T, N]`; -inf where a row saw no key.
    """

    out: Tensor
    lse: Tensor


def empty(
    num_tokens: int, num_heads: int, value_dim: int, dtype: torch.dtype, device: torch.device | str
) -> Partial:
    """The identity of `merge`: what ``num_tokens`` rows that see no key produce."""
    out = torch.zeros(num_tokens, num_heads, value_dim, dtype=dtype, device=device)
    lse = torch.full((num_tokens, num_heads), _NEG_INF, dtype=torch.float32, device=device)
    return Partial(out, lse)


def scale_weights(lse: Tensor) -> tuple[Tensor, Tensor]:
    """The share of each partial in the merged result.

    Args:
        lse: `[n, ...]`, one per partial along the first dimension. NaN and +inf, which foreign
            kernels return for rows without keys, count as -inf.

    Returns:
        weights `[n, ...]`, which sum to 1 over the partials (or are all 0 where nothing was seen),
        and the merged lse `[...]`; both fp32, or fp64 for an fp64 lse.
    """
    if lse.dtype != torch.float64:
        lse = lse.float()
    # NaN fails the comparison, so one test catches both.
    lse = torch.where(lse < _POS_INF, lse, _NEG_INF)
    top = lse.amax(0)
    # The finite floor keeps -inf - -inf, a NaN, from arising.
    weights = (lse - top.clamp_min(torch.finfo(lse.dtype).min)).exp_()
    total = weights.sum(0)
    # The largest partial contributes exactly 1, so the clamp acts only where nothing was seen.
    return weights / total.clamp_min(1.0), total.log() + top


def weigh(out: Tensor, weight: Tensor) -> Tensor:
    """``out * weight`` in fp32 (or fp64), exactly 0 where the weight is 0, whatever ``out`` holds.

    Args:
        out: `[..., V]`; may hold NaN where the weight is 0.
        weight: `[...]`, fp32 or fp64.
    """
    weight = weight.unsqueeze(-1)
    return torch.where(weight > 0, out * weight, 0.0)


def merge_stacked(out: Tensor, lse: Tensor) -> Partial:
    """Merge n partials held in two tensors: out `[n, T, N, V]`, lse `[n, T, N]`.

    Computed in fp32, or fp64 for an fp64 out. Returns out in its own dtype, lse in fp32.
    """
    weights, merged = scale_weights(lse)
    return Partial(weigh(out, weights).sum(0).to(out.dtype), merged.float())


def merge(partials: Sequence[Partial]) -> Partial:
    """Merge partials over disjoint sets of keys, in any order.

    A single partial is sanitised like any other: NaN or +inf lse becomes -inf, and its out 0.

    Args:
        partials: At least one, all of one shape and dtype.

    Returns:
        out in the dtype of the given ones, lse in fp32.

    Raises:
        ValueError: No partials were given, so that the shape of the result is unknown.
    """
    if not partials:
        raise ValueError("merge: 0 partials; at least one is needed, use empty() for no keys")
    weights, merged = scale_weights(torch.stack([p.lse for p in partials]))
    total = weigh(partials[0].out, weights[0])
    for partial, weight in zip(partials[1:], weights[1:], strict=True):
        total = total + weigh(partial.out, weight)
    return Partial(total.to(partials[0].out.dtype), merged.float())


def merge_stream(partials: Iterable[Partial]) -> Partial | None:
    """Merge partials as they come, so that two of them are held at a time.

    The sum is kept in fp32 (fp64 for fp64 outputs) and rounded once, however many there are.

    Args:
        partials: All of one shape and dtype.

    Returns:
        out in the dtype of the given ones, lse in fp32; ``None`` if there were none.
    """
    total: Partial | None = None
    dtype = torch.float32
    for partial in partials:
        if total is None:
            dtype = partial.out.dtype
            total = Partial(partial.out.to(torch.promote_types(dtype, torch.float32)), partial.lse)
        else:
            total = merge([total, partial])
    return None if total is None else Partial(total.out.to(dtype), total.lse)


def add_sink(partial: Partial, sink: Tensor) -> Partial:
    """Add one more logit per head to the denominator: an attention sink, a key of value 0.

    Apply it once, after all partials have been merged, or ``exp(sink)`` is counted per shard.

    Args:
        partial: out `[T, N, V]`, lse `[T, N]`.
        sink: Logit of each of these N heads, `[N]`.
    """
    weights, merged = scale_weights(
        torch.stack([partial.lse, sink.to(partial.lse.dtype).expand_as(partial.lse)])
    )
    return Partial(weigh(partial.out, weights[0]).to(partial.out.dtype), merged.float())

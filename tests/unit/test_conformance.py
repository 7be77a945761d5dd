"""`check_backend` passes what is right and names what is wrong."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cplayers.ops import Partial, attend
from cplayers.ops.backends import BACKENDS
from cplayers.testing.conformance import BackendError, check_backend

HALF = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backend", [*sorted(BACKENDS.keys() - {"triton", "varlen"}), "auto"])
def test_our_backends_conform(backend: str) -> None:
    wide = backend in ("cpu", "rows_cpu")
    check_backend(
        partial(attend, backend=backend),
        dtypes=HALF[:2] if wide else HALF[::2] if backend == "native" else HALF,
        softcap=backend in ("math", "rows_cpu", "auto"),
        value_dim=backend in ("math", "rows_cpu", "auto"),
    )


def base_two(*args: Tensor, **kwargs: Any) -> Partial:
    out, lse = attend(*args, **kwargs)
    return Partial(out, lse / math.log(2))


def zero_lse(*args: Tensor, **kwargs: Any) -> Partial:
    out, lse = attend(*args, **kwargs)
    return Partial(out, torch.zeros_like(lse))


def zero_lse_where_blind(*args: Tensor, **kwargs: Any) -> Partial:
    out, lse = attend(*args, **kwargs)
    return Partial(out, torch.where(lse == -math.inf, 0.0, lse))


def zero_lse_where_seeing(*args: Tensor, **kwargs: Any) -> Partial:
    out, lse = attend(*args, **kwargs)
    return Partial(out, torch.where(lse == -math.inf, lse, 0.0))


def heads_apart(q: Tensor, k: Tensor, v: Tensor, *spans: Tensor, **kwargs: Any) -> Partial:
    """Query heads grouped (g h): head n reads KV head n % K."""
    heads = torch.arange(q.shape[1]) % k.shape[1]
    return attend(q, k[:, heads], v[:, heads], *spans, **kwargs)


def values_apart(q: Tensor, k: Tensor, v: Tensor, *spans: Tensor, **kwargs: Any) -> Partial:
    """Right scores, but values of the wrong KV head: only out is wrong."""
    heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    wrong = torch.arange(q.shape[1]) % k.shape[1]
    return attend(q, k[:, heads], v[:, wrong], *spans, **kwargs)


def bottom_right(q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, **kwargs: Any) -> Partial:
    """Causal with the last row seeing the last key, whatever the spans say."""
    if len(q) > 1 and int(hi[0]) + 1 == int(hi[1]) and not lo.any():
        hi = torch.arange(len(q)) + 1 + len(k) - len(q)
    return attend(q, k, v, lo, hi, **kwargs)


def mask_by_addition(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, *, scale: float, softcap: float | None
) -> Partial:
    """All keys enter, those outside the span with weight 0: NaN times 0 is NaN."""
    group = q.shape[1] // k.shape[1]
    keys = torch.arange(len(k))
    scores = torch.einsum("tnh,snh->nts", q, k.repeat_interleave(group, 1)) * scale
    scores += torch.where((keys >= lo[:, None]) & (keys < hi[:, None]), 0.0, -math.inf)
    out = torch.einsum("nts,snv->tnv", scores.softmax(-1), v.repeat_interleave(group, 1))
    blind = hi <= lo
    out[blind] = 0
    return Partial(out, scores.logsumexp(-1).T.masked_fill(blind[:, None], -math.inf))


def no_scale(*args: Tensor, scale: float, **kwargs: Any) -> Partial:
    return attend(*args, scale=scale * 1.001, **kwargs)


def wide_lse(*args: Tensor, **kwargs: Any) -> Partial:
    out, lse = attend(*args, **kwargs)
    return Partial(out, lse.double())


def coarse_out(*args: Tensor, **kwargs: Any) -> Partial:
    out, lse = attend(*args, **kwargs)
    return Partial(out.bfloat16().to(out.dtype), lse)


def heads_first(*args: Tensor, **kwargs: Any) -> Partial:
    out, lse = attend(*args, **kwargs)
    return Partial(out.transpose(0, 1), lse)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (base_two, r"one decode row \(torch\.float32\): lse is off .* in base 2"),
        (zero_lse, "lse is off .* all zeros"),
        (zero_lse_where_seeing, "lse is off .* all zeros"),
        (zero_lse_where_blind, "rows that see nothing.*out 0 and lse -inf"),
        (heads_apart, "lse is off .* order of heads"),
        (values_apart, "out is off by"),
        (bottom_right, "causal rows, more keys than rows see.*not finite"),
        (mask_by_addition, "more keys than rows see.*not finite; keys outside"),
        (no_scale, "lse is off .* check the scale"),
        (wide_lse, r"lse is \[1, 6\] torch\.float64, not \[1, 6\] torch\.float32"),
        (coarse_out, "out is off by .* allowed is 1.00e-05"),
        (heads_first, r"out is \[6, 1, 16\].*not \[1, 6, 16\]"),
    ],
)
def test_a_broken_backend_is_named(broken: Any, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        check_backend(broken)


def test_scores_rounded_to_bf16_are_found() -> None:
    def rounded(
        q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, *, scale: float, softcap: Any
    ) -> Partial:
        """fp32 logits are right, those of bf16 inputs come from a product rounded to bf16."""
        out, lse = attend(q, k, v, lo, hi, scale=scale, softcap=softcap)
        return Partial(out, lse.to(q.dtype).float())

    check_backend(rounded)
    with pytest.raises(BackendError, match=r"torch\.bfloat16.*lse is off"):
        check_backend(rounded, dtypes=[torch.bfloat16])


def test_options_reach_the_backend() -> None:
    with pytest.raises(BackendError, match="softcap"):
        check_backend(lambda *args, softcap, scale: attend(*args, scale=scale), softcap=True)
    seen = set()

    def record(q: Tensor, k: Tensor, v: Tensor, *spans: Tensor, **kwargs: Any) -> Partial:
        seen.add(v.shape[-1] == q.shape[-1])
        return attend(q, k, v, *spans, **kwargs)

    check_backend(record, value_dim=True)
    assert seen == {True, False}

"""Backend ``"flash_cpu"``: torch's fused attention operator for CPUs, called tile by tile.

Traps of the operator, closed here: a row whose mask hides every key gets lse 0 instead of -inf;
zero keys end the process (no tile is empty); vectors that are not contiguous are read as if they
were. Values narrower than keys, which it does not take, are widened with zeros: on one core, 1,024
causal rows of 16 heads, H = 192, V = 128, take 118 to 138 ms that way and 219 to 225 in ``"math"``,
4,096 rows 1.4 and 3.5 s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cplayers.ops.backends.base import Backend
from cplayers.ops.backends.math import pad_rows
from cplayers.ops.backends.tiled import Kernels, device_refusal, is_prefix, pack, unpack
from cplayers.ops.partial import Partial

_OPERATOR: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_FLASH: Any = getattr(_OPERATOR, "default", None)

PAD_KEYS, PAD_DIM = 1024, 128
"""From so many keys and dimensions on, padding 2 or 3 rows to 4 saves more than it costs.

With keys in main memory and one thread, 3 rows of 128 dimensions over 2,048 keys and 8 KV heads
take 3.2 ms as they are and 2.6 ms padded; of 64 dimensions and 3 KV heads 0.35 and 0.48 ms.
"""


def full(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Partial:
    """See `Kernels.full`. The query heads of a KV head are rows of one call: keys are read once."""
    rows = pack(q, len(k))
    num_rows = rows.shape[1]
    if k.shape[1] >= PAD_KEYS and k.shape[2] >= PAD_DIM:
        rows = pad_rows(rows)
    wide = _as_wide(v, k)
    out, lse = _FLASH(rows.unsqueeze(0), k.unsqueeze(0), wide.unsqueeze(0), 0.0, False, scale=scale)
    out, lse = out.squeeze(0)[..., : v.shape[2]], lse.squeeze(0)
    if rows.shape[1] != num_rows:
        out, lse = out.narrow(1, 0, num_rows), lse.narrow(1, 0, num_rows)
    return unpack(Partial(out, lse), len(q))


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Partial:
    """See `Kernels.causal`."""
    return _by_head(q, k, v, scale, is_causal=True)


def masked(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, scale: float, softcap: float | None
) -> Partial:
    """See `Kernels.masked`."""
    keys = torch.arange(k.shape[1])
    hidden = (keys < lo.unsqueeze(1)) | (keys >= hi.unsqueeze(1))
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
    out, lse = _by_head(q, k, v, scale, mask=mask)
    blind = hidden.all(1).unsqueeze(1)
    return Partial(out.masked_fill(blind.unsqueeze(2), 0.0), lse.masked_fill(blind, float("-inf")))


def _by_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> Partial:
    """The operator as it is: query heads apart, each with the keys of its KV head."""
    out, lse = _FLASH(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        _as_wide(v, k).unsqueeze(0),
        0.0,
        is_causal,
        attn_mask=None if mask is None else mask[None, None],
        scale=scale,
    )
    return Partial(out[0, ..., : v.shape[2]].transpose(0, 1), lse[0].transpose(0, 1))


def _as_wide(v: Tensor, k: Tensor) -> Tensor:
    """Values with columns of zeros, up to the width of the keys, which the operator wants."""
    missing = k.shape[2] - v.shape[2]
    return pad(v, (0, missing)) if missing else v


def refuse(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    """Why the operator cannot do this, or ``None``."""
    if _FLASH is None:
        return f"torch {torch.__version__} has no such operator"
    if softcap is not None:
        return f"it has no softcap, {softcap} was asked for"
    if v.shape[-1] > q.shape[-1]:
        return f"it needs V <= H, got V={v.shape[-1]}, H={q.shape[-1]}"
    if v.shape[-1] < q.shape[-1] and is_prefix(v, k):
        return "v is a part of k, which would be copied to widen it"
    if q.shape[-1] > 1 and not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return "it needs q, k and v contiguous in their last dimension"
    return device_refusal(q)


FLASH_CPU = Backend("flash_cpu", Kernels(full, causal, masked).run, refuse)

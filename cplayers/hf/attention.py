"""The swapped attention modules: the library's layers behind the signature of transformers'."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cplayers.attention import DCPGQAAttention, DCPMLAAttention
from cplayers.cache import PagedKVCache, StepPlan


class HFGQAAttention(DCPGQAAttention):
    """`DCPGQAAttention` as a decoder layer of transformers calls it.

    The plan and the cache arrive as the keyword arguments ``cp_plan`` and ``cp_cache``, which
    transformers' models hand through to every layer; its own masks and caches are not used.
    """

    def forward(  # type: ignore[override]  # the caller's signature is transformers'
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        cp_cache: PagedKVCache,
        cp_plan: StepPlan,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """See `DCPGQAAttention.forward`; the second value stands for attention weights.

        gpt-oss passes each angle once, `[1, T, H/2]`; it turns the same pairs.
        """
        cos, sin = position_embeddings
        if 2 * cos.shape[-1] == self.head_dim:
            position_embeddings = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
        return super().forward(hidden_states, position_embeddings, cp_cache, cp_plan), None


class HFMLAAttention(DCPMLAAttention):
    """`DCPMLAAttention` as a decoder layer of transformers calls it, see `HFGQAAttention`."""

    def forward(  # type: ignore[override]  # the caller's signature is transformers'
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | Tensor,
        *,
        cp_cache: PagedKVCache,
        cp_plan: StepPlan,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """See `DCPMLAAttention.forward`; the second value stands for attention weights.

        DeepSeek-V2 passes its angles as complex numbers `[1, T, R/2]`, scaled as the others' cos
        and sin are.
        """
        if isinstance(position_embeddings, Tensor):
            pairs = torch.view_as_real(position_embeddings).movedim(-1, 0)
            cos, sin = pairs.repeat(1, 1, 1, 2).to(hidden_states.dtype)
            position_embeddings = cos, sin
        return super().forward(hidden_states, position_embeddings, cp_cache, cp_plan), None

"""The swapped attention module: `DCPGQAAttention` behind the signature of transformers' modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cplayers.attention import DCPGQAAttention
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
        """See `DCPGQAAttention.forward`; the second value stands for attention weights."""
        return super().forward(hidden_states, position_embeddings, cp_cache, cp_plan), None

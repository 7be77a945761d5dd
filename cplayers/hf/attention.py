"""The swapped attention module: `DCPGQAAttention` behind the signature of transformers' modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cplayers.attention import Combine, DCPGQAAttention, PCPPrefillAttention
from cplayers.attention.gqa import QProj
from cplayers.cache import PagedKVCache, StepPlan
from cplayers.mesh import CPMesh


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

    @classmethod
    def from_hf(
        cls,
        module: nn.Module,
        mesh: CPMesh,
        *,
        q_proj: QProj,
        combine: Combine,
        prefill: str,
        backend: str = "auto",
    ) -> HFGQAAttention:
        """Swap for an attention module of the Llama family, keeping its Parameters.

        Args:
            module: Unsharded attention of transformers: q_proj, k_proj, v_proj, o_proj, and
                q_norm, k_norm where the architecture has them.
            mesh: The ranks.
            q_proj: See `DCPGQAAttention`.
            combine: See `DCPGQAAttention`.
            prefill: Strategy of `PCPPrefillAttention`.
            backend: See `cplayers.ops.attend`.
        """
        plain: Any = module
        return cls.from_full(
            q_proj=plain.q_proj,
            k_proj=plain.k_proj,
            v_proj=plain.v_proj,
            o_proj=plain.o_proj,
            q_norm=getattr(plain, "q_norm", None),
            k_norm=getattr(plain, "k_norm", None),
            head_dim=plain.head_dim,
            mode=q_proj,
            mesh=mesh,
            layer_idx=plain.layer_idx,
            combine=combine,
            scale=plain.scaling,
            backend=backend,
            prefill=PCPPrefillAttention(prefill, backend=backend, mesh=mesh),
        )

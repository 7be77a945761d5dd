"""The projections of a multi-head latent attention layer, cut to a rank.

    kv = (norm(latent), rope(k_pe))  of kv_a_proj_with_mqa(x)    # [T, 1, L + R], whole on each rank
    q  = (nope, rope(pe))            of q_proj(x), or of q_b_proj(norm(q_a_proj(x)))
    kv_b_proj: per head, P rows of W_UK and V rows of W_UV

Projections to heads are split over TP, or over TPA where a rank has those of its whole DCP group.
Names are those of transformers' DeepSeek layers.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from cplayers.attention.heads import head_shard
from cplayers.attention.latent import UpProjection
from cplayers.attention.layer import CachedAttention, Once, Rows
from cplayers.attention.linear import RowParallelLinear, adopt
from cplayers.attention.tpa import TPAQProj
from cplayers.cache import MLASpec
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh
from cplayers.ops import apply_rope


class MLAProjections(CachedAttention):
    """Weights of `DCPMLAAttention`, which documents the arguments.

    Args:
        hidden_size: Model width.
        num_heads: Query heads of the model (N).
        q_lora_rank: Rank of the query's own latent, or ``None``.
        kv_lora_rank: L.
        qk_nope_head_dim: P.
        qk_rope_head_dim: R.
        v_head_dim: V.
        replicate: Whether this rank has the heads of its DCP group, and not only its own.
        rope_interleave: Whether rotary pairs are neighbours.
        norm_eps: Epsilon of the norms.
        bias: Bias on q_a_proj, kv_a_proj_with_mqa and o_proj.
        mesh: The ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        *,
        replicate: bool,
        rope_interleave: bool,
        norm_eps: float,
        bias: bool,
        mesh: CPMesh,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.q_lora_rank = hidden_size, num_heads, q_lora_rank
        self.kv_lora_rank, self.value_dim = kv_lora_rank, v_head_dim
        self.nope_dim, self.rope_dim = qk_nope_head_dim, qk_rope_head_dim
        self.replicate, self.rope_interleave, self.mesh = replicate, rope_interleave, mesh
        self.heads = head_shard(mesh.topology, mesh.rank("tp"), num_heads, 1, replicate_q=replicate)
        self.q_proj: nn.Module | None = None
        self.q_a_proj: nn.Module | None = None
        self.q_a_layernorm: nn.Module | None = None
        self.q_b_proj: nn.Module | None = None
        head_dim = qk_nope_head_dim + qk_rope_head_dim
        if q_lora_rank is None:
            self.q_proj = self._to_heads(hidden_size, head_dim)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(q_lora_rank, eps=norm_eps)
            self.q_b_proj = self._to_heads(q_lora_rank, head_dim)
        self.kv_a_proj_with_mqa: nn.Module = nn.Linear(
            hidden_size, kv_lora_rank + qk_rope_head_dim, bias=bias
        )
        self.kv_a_layernorm: nn.Module = nn.RMSNorm(kv_lora_rank, eps=norm_eps)
        self.kv_b_proj = self._to_heads(kv_lora_rank, qk_nope_head_dim + v_head_dim)
        self.o_proj = RowParallelLinear(
            self.heads.num_own * v_head_dim, hidden_size, bias=bias, mesh=mesh
        )

    def _to_heads(self, in_features: int, head_dim: int) -> nn.Linear | TPAQProj:
        if self.replicate:
            return TPAQProj(in_features, self.num_heads, head_dim, mesh=self.mesh)
        return nn.Linear(in_features, self.heads.num_own * head_dim, bias=False)

    @property
    def cache_spec(self) -> MLASpec:
        """What this layer stores per token on this rank."""
        return MLASpec(self.kv_lora_rank, self.rope_dim)

    def _forms(self) -> list[tuple[int, int, bool]]:
        absorbed = self.kv_lora_rank + self.rope_dim, self.kv_lora_rank, True
        return [absorbed, (self.nope_dim + self.rope_dim, self.value_dim, False)]

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> Rows:
        def planes() -> tuple[Tensor, ...]:
            latent, rope = self.kv_a_proj_with_mqa(x).tensor_split([self.kv_lora_rank], dim=-1)
            rope = self._rope(rope.unsqueeze(1), cos, sin)
            return (torch.cat([self.kv_a_layernorm(latent).unsqueeze(1), rope], dim=-1),)

        latent_q = x
        if self.q_a_proj is not None and self.q_a_layernorm is not None:
            latent_q = self.q_a_layernorm(self.q_a_proj(x))
        return Rows(latent_q, cos, sin, Once(planes))

    def _queries(self, rows: Rows, *, own: bool) -> tuple[Tensor, Tensor]:
        """Queries without position `[T, heads, P]`, and rotated ones `[T, heads, R]`."""
        project: Any = self.q_proj if self.q_b_proj is None else self.q_b_proj
        if own and self.replicate:
            project = project.own
        q = project(rows.x)
        head_dim = self.nope_dim + self.rope_dim
        q = q.view(len(q), q.shape[1] // head_dim, head_dim)
        nope, rope = q.tensor_split([self.nope_dim], dim=-1)
        return nope, self._rope(rope, rows.cos, rows.sin)

    def _rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rope(x, cos, sin, interleaved=self.rope_interleave)

    def _up(self, *, own: bool) -> UpProjection:
        """W_UK and W_UV of own heads, or of all that this rank has."""
        weight = self.kv_b_proj.weight.view(-1, self.nope_dim + self.value_dim, self.kv_lora_rank)
        if own and self.replicate:
            first = self.heads.own[0] - self.heads.group[0]
            weight = weight.narrow(0, first, self.heads.num_own)
        return UpProjection(weight, self.nope_dim)

    @classmethod
    def from_full(
        cls,
        *,
        q_proj: nn.Linear | None = None,
        q_a_proj: nn.Linear | None = None,
        q_a_layernorm: nn.Module | None = None,
        q_b_proj: nn.Linear | None = None,
        kv_a_proj_with_mqa: nn.Linear,
        kv_a_layernorm: nn.Module,
        kv_b_proj: nn.Linear,
        o_proj: nn.Linear,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        mesh: CPMesh,
        **kwargs: Any,
    ) -> Self:
        """Build the layer from unsharded projections, keeping their Parameters, cut to this rank.

        Args:
            q_proj: `[N*(P+R), hidden]` of a layer without a query latent; else the next three.
            q_a_proj: `[q_lora_rank, hidden]`.
            q_a_layernorm: Norm of the query latent, used as it is.
            q_b_proj: `[N*(P+R), q_lora_rank]`.
            kv_a_proj_with_mqa: `[L+R, hidden]`.
            kv_a_layernorm: Norm of the latent, used as it is.
            kv_b_proj: `[N*(P+V), L]`.
            o_proj: `[hidden, N*V]`.
            qk_nope_head_dim: P.
            qk_rope_head_dim: R.
            mesh: The ranks.
            **kwargs: Further arguments of the constructor (``layer_idx``, ``decode``, ...).

        Raises:
            ConfigError: If not exactly one way of projecting queries is given, or a bias on a
                projection to heads.
        """
        direct = q_proj is not None
        parts = (q_a_proj, q_a_layernorm, q_b_proj)
        to_heads = q_proj if direct else q_b_proj
        if to_heads is None or any((part is not None) == direct for part in parts):
            raise ConfigError(
                "q_proj together with, or without all of, q_a_proj, q_a_layernorm and q_b_proj",
                "queries are projected directly or through a latent of their own",
                "pass q_proj, or the other three",
            )
        for name, linear in (("the query projection", to_heads), ("kv_b_proj", kv_b_proj)):
            if linear.bias is not None:
                raise ConfigError(
                    f"{name} with a bias",
                    "projections from a latent to heads have none, and it would be left out",
                    "pass the layer of a model of the DeepSeek family",
                )
        head_dim = qk_nope_head_dim + qk_rope_head_dim
        num_heads = to_heads.out_features // head_dim
        value_dim = o_proj.in_features // num_heads
        with torch.device("meta"):
            layer = cls(
                o_proj.out_features,
                num_heads,
                None if q_a_proj is None else q_a_proj.out_features,
                kv_b_proj.in_features,
                qk_nope_head_dim,
                qk_rope_head_dim,
                value_dim,
                bias=o_proj.bias is not None,
                mesh=mesh,
                **kwargs,
            )
        heads = layer.heads
        rows = heads.group if layer.replicate else heads.own
        mine = layer.q_proj if direct else layer.q_b_proj
        assert mine is not None
        adopt(mine, to_heads, dim=0, rows=rows, head_dim=head_dim)
        adopt(layer.kv_b_proj, kv_b_proj, dim=0, rows=rows, head_dim=qk_nope_head_dim + value_dim)
        adopt(layer.o_proj, o_proj, dim=1, rows=heads.own, head_dim=value_dim)
        layer.q_a_proj, layer.q_a_layernorm = q_a_proj, q_a_layernorm
        layer.kv_a_proj_with_mqa, layer.kv_a_layernorm = kv_a_proj_with_mqa, kv_a_layernorm
        return layer.train(kv_b_proj.training)

"""`CachedAttention`: what the attention layers over a spread cache have in common.

rows    = project(x)                   # everything but the queries, which depend on the way
decode  rows -> out  [T_decode, n, V]
prefill rows -> out  [T_prefill, n, V]
y       = o_proj(out)                  # all-reduce over tp
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cplayers.attention.cached import require_spread
from cplayers.attention.combine import Combine
from cplayers.attention.gather_kv import CachedLayer
from cplayers.attention.heads import HeadShard
from cplayers.attention.linear import RowParallelLinear
from cplayers.attention.prefill import PCPPrefillAttention
from cplayers.cache import CacheSpec, PagedKVCache, StepPlan
from cplayers.cache.plan import Prefill
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh


class Rows(NamedTuple):
    """What a layer has projected for its rows.

    Attributes:
        x: What the queries are projected from `[T, hidden]`.
        cos: Rotary embedding `[T, R]`.
        sin: Likewise.
        planes: What the cache will store, `[T, heads, dim]` each.
    """

    x: Tensor
    cos: Tensor
    sin: Tensor
    planes: tuple[Tensor, ...]

    def part(self, start: int, stop: int) -> Rows:
        """Rows ``start..stop``; the same object where these are all."""
        if start == 0 and stop == len(self.x):
            return self
        x, cos, sin = (t[start:stop] for t in self[:3])
        return Rows(x, cos, sin, tuple([plane[start:stop] for plane in self.planes]))


class CachedAttention(nn.Module):
    """Base of the attention layers: the rows of a step, decoding and prefill apart.

    Attributes:
        mesh: The ranks.
        layer_idx: Layer index in the cache.
        heads: Query heads of this rank and of its group.
        value_dim: Dimension of a head's output.
        combine: How partial outputs are combined.
        backend: Local attention backend.
        prefill: Core for prompts.
        o_proj: Output projection.
    """

    mesh: CPMesh
    layer_idx: int
    heads: HeadShard
    value_dim: int
    combine: Combine
    backend: str
    prefill: PCPPrefillAttention
    o_proj: RowParallelLinear

    @property
    @abstractmethod
    def cache_spec(self) -> CacheSpec:
        """What this layer stores per token on this rank."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: PagedKVCache,
        plan: StepPlan,
    ) -> Tensor:
        """Attend for this rank's rows of the step.

        Args:
            hidden_states: `[T, hidden_size]`, or with leading dimensions of size 1.
            position_embeddings: cos and sin of the rows' positions, `[T, R]` or `[1, T, R]` each,
                R the dimensions that are rotated.
            cache: This rank's cache; what the step adds to it is written.
            plan: The step, from ``cache.plan``.

        Returns:
            Same shape as ``hidden_states``, the same on all TP ranks.

        Raises:
            ConfigError: If the number of rows is not the plan's, or the cache not the mesh's.
        """
        require_spread(cache, self.mesh)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if x.shape[0] != plan.num_rows:
            raise ConfigError(
                f"hidden_states with {x.shape[0]} rows",
                f"the plan has {plan.num_rows} rows on this rank",
                "pass the rows plan.tokens of the packed step",
            )
        cos, sin = (t.reshape(-1, t.shape[-1]) for t in position_embeddings)
        rows, layer = self._project(x, cos, sin), CachedLayer(cache, plan, self.layer_idx)
        decode, outs = plan.num_decode, list[Tensor]()
        if decode:
            outs.append(self._decode(rows.part(0, decode), layer))
        if plan.prefill is not None:
            part = rows.part(decode, plan.num_rows)
            outs.append(self._prompt(part, layer, plan.prefill))
        if not outs:  # a step without tokens
            outs = [x.new_zeros(0, self.heads.num_own, self.value_dim)]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        y: Tensor = self.o_proj(out.flatten(1))
        return y.view(hidden_states.shape)

    @abstractmethod
    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> Rows:
        """What the cache stores of the rows, and what their queries are projected from."""

    @abstractmethod
    def _decode(self, rows: Rows, layer: CachedLayer) -> Tensor:
        """Own heads' output `[T, n, V]` of decode rows; writes them to the cache."""

    @abstractmethod
    def _prompt(self, rows: Rows, layer: CachedLayer, prefill: Prefill) -> Tensor:
        """The same of prefill rows."""

    def extra_repr(self) -> str:
        """What runs, and how it is spread."""
        size = self.mesh.size
        return (
            f"layer_idx={self.layer_idx}, combine={self.combine}, backend={self.backend}, "
            f"tp={size('tp')}, dcp={size('dcp')}, pcp={size('pcp')}"
        )

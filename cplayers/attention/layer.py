"""`CachedAttention`: what the attention layers over a spread cache have in common.

rows    = project(x)                   # everything but the queries, which depend on the way
decode  rows -> out  [T_decode, n, V]
prefill rows -> out  [T_prefill, n, V]
y       = o_proj(out)                  # all-reduce over tp
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cplayers.attention.combine import Combine
from cplayers.attention.costs import Sizes
from cplayers.attention.heads import HeadShard
from cplayers.attention.linear import RowParallelLinear
from cplayers.attention.planes import CachedLayer
from cplayers.attention.prefill import PCPPrefillAttention
from cplayers.attention.scoring import Scoring
from cplayers.cache import CacheSpec, PagedKVCache, StepPlan
from cplayers.cache.prefill import Prefill
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh
from cplayers.ops import Partial, add_sink, select, select_paged
from cplayers.ops.attend import require_fit


class Once:
    """A value that is computed when it is first asked for.

    Args:
        compute: How.
    """

    def __init__(self, compute: Callable[[], tuple[Tensor, ...]]) -> None:
        self._compute = compute
        self._value: tuple[Tensor, ...] | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        """The value."""
        if self._value is None:
            self._value = self._compute()
        return self._value


class Rows(NamedTuple):
    """What a layer projects for its rows.

    Attributes:
        x: What the queries are projected from `[T, hidden]`.
        cos: Rotary embedding `[T, R]`.
        sin: Likewise.
        planes: What the cache will store, `[T, heads, dim]` each; projected when it is asked for,
            so that queries can be on their way meanwhile.
    """

    x: Tensor
    cos: Tensor
    sin: Tensor
    planes: Callable[[], tuple[Tensor, ...]]

    def part(self, start: int, stop: int) -> Rows:
        """Rows ``start..stop``; the same object where these are all."""
        if start == 0 and stop == self.x.shape[0]:
            return self
        x, cos, sin = (t[start:stop] for t in self[:3])
        return Rows(x, cos, sin, lambda: tuple([plane[start:stop] for plane in self.planes()]))


def require_spread(cache: PagedKVCache, mesh: CPMesh) -> None:
    """Raise ConfigError unless ``cache`` is spread over the ranks of ``mesh``."""
    view, rank, size = cache.view_of_rank, mesh.rank, mesh.size
    has = (view.cp_rank, view.layout.cp_size, view.pcp_rank, view.pcp_size)
    wanted = (rank("dcp"), size("dcp"), rank("pcp"), size("pcp"))
    if has != wanted:
        raise ConfigError(
            f"a cache with cp_rank, cp_size, pcp_rank, pcp_size = {has}",
            f"this rank of {mesh} has {wanted}: it would miss keys, or count them twice",
            "build the cache from mesh.rank and mesh.size of 'dcp' and 'pcp'",
        )


class CachedAttention(nn.Module):
    """Base of the attention layers: the rows of a step, decoding and prefill apart.

    Attributes:
        mesh: The ranks.
        layer_idx: Layer index in the cache.
        heads: Query heads of this rank and of its group.
        value_dim: Dimension of a head's output.
        scoring: How keys are scored.
        combine: How partial outputs are combined.
        overlap: Whether that overlaps with attention.
        prefill: Core for prompts.
        sinks: Logit of a key without a value, one per own head `[n]`, or ``None``.
        o_proj: Output projection.
    """

    mesh: CPMesh
    layer_idx: int
    heads: HeadShard
    value_dim: int
    scoring: Scoring
    combine: Combine
    overlap: bool
    prefill: PCPPrefillAttention
    sinks: nn.Parameter | None
    o_proj: RowParallelLinear

    @property
    @abstractmethod
    def cache_spec(self) -> CacheSpec:
        """What this layer stores per token on this rank."""

    @property
    @abstractmethod
    def sizes(self) -> Sizes:
        """What this layer moves per token when queries travel or keys do."""

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
            ConfigError: If the number of rows is not the plan's, the cache not the mesh's or the
                layer's, or the backend cannot do it; alike on all ranks, before anything is
                written.
        """
        require_spread(cache, self.mesh)
        self._require_fit(cache, hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if x.shape[0] != plan.num_rows:
            raise ConfigError(
                f"hidden_states with {x.shape[0]} rows",
                f"the plan has {plan.num_rows} rows on this rank",
                "pass the rows plan.tokens of the packed step",
            )
        cos, sin = (t.reshape(-1, t.shape[-1]) for t in position_embeddings)
        if not cos.shape[0] == sin.shape[0] == x.shape[0]:  # `len` takes ten times as long
            raise ConfigError(
                f"position_embeddings of {len(cos)} and {len(sin)} rows",
                f"each of the {len(x)} rows has its own angles",
                "pass cos and sin of plan.positions",
            )
        rows, layer = self._project(x, cos, sin), CachedLayer(cache, plan, self.layer_idx)
        decode = plan.num_decode
        outs: list[Tensor] = []
        if decode:
            outs.append(self._with_sinks(self._decode(rows.part(0, decode), layer)))
        if plan.prefill is not None:
            part = rows.part(decode, plan.num_rows)
            outs.append(self._with_sinks(self._prompt(part, layer, plan.prefill)))
        if not outs:  # a step without tokens
            outs = [x.new_zeros(0, self.heads.num_own, self.value_dim)]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        y: Tensor = self.o_proj(out.flatten(1))
        return y.view(hidden_states.shape)

    def _require_fit(self, cache: PagedKVCache, x: Tensor) -> None:
        """Refuse what would fail amid a step, on those ranks only that have work to do."""
        if cache.spec != self.cache_spec or not 0 <= self.layer_idx < cache.num_layers:
            raise ConfigError(
                f"layer {self.layer_idx} that stores {self.cache_spec}",
                f"the cache has {cache.num_layers} layers of {cache.spec}",
                "build the cache from layer.cache_spec, with a layer for each",
            )
        if cache.dtype != x.dtype:
            raise ConfigError(
                f"hidden states in {x.dtype}",
                f"the cache is in {cache.dtype}, and attention has one dtype",
                "build the cache in the dtype of the model",
            )
        for backend in {self.scoring.backend, self.prefill.backend} - {"auto"}:
            for key_dim, value_dim, shared in self._forms():
                k = x.new_empty(1, 1, key_dim)
                v = k[..., :value_dim] if shared else x.new_empty(1, 1, value_dim)
                require_fit(backend, k, k, v, self.scoring.softcap)

    @abstractmethod
    def _forms(self) -> list[tuple[int, int, bool]]:
        """Dimensions of keys and values that it reads, and whether values are a part of keys."""

    def explain(self, plan: StepPlan) -> str:
        """Which strategy the prefill of a step takes, what each would send, and why.

        Args:
            plan: The step.
        """
        return self.prefill.explain(plan, self.sizes, self.scoring.window)

    def local_backends(self, new_tokens: int = 1) -> dict[str, str]:
        """Which backend attends on this rank; ``backend="auto"`` is one for each kind of rows.

        Args:
            new_tokens: Most new tokens of a sequence that decodes.

        Returns:
            Names for ``"decode"`` and ``"prefill"``. ``(paged)``: it looks up block tables, and
            does a whole step in one call.
        """
        weight, scoring, num_kv = self.o_proj.weight.detach(), self.scoring, self.heads.num_kv
        (key_dim, value_dim, shared), own = self._forms()[0], self._forms()[-1]
        q = weight.new_empty(1, self.heads.num_group, key_dim)
        k = weight.new_empty(num_kv, 1, key_dim)
        v = k[..., :value_dim] if shared else weight.new_empty(num_kv, 1, value_dim)
        paged = select_paged(q, k, v, new_tokens, scoring.softcap, scoring.backend)
        named = {"decode": scoring.backend, "prefill": self.prefill.backend}
        if paged is not None:
            named["decode"] = f"{paged.name} (paged)"
        elif scoring.backend == "auto":
            named["decode"] = select(q, k.transpose(0, 1), v.transpose(0, 1), scoring.softcap)
        if self.prefill.backend == "auto":
            q, k, v = (weight.new_empty(1, 1, dim) for dim in (own[0], *own[:2]))
            named["prefill"] = select(q, k, v, scoring.softcap)
        return named

    def _with_sinks(self, partial: Partial) -> Tensor:
        """The output, once all keys are in it: sinks are counted once, after the merge."""
        return partial.out if self.sinks is None else add_sink(partial, self.sinks).out

    @abstractmethod
    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> Rows:
        """What the cache stores of the rows, and what their queries are projected from.

        No collective may depend on when the former is asked for.
        """

    @abstractmethod
    def _decode(self, rows: Rows, layer: CachedLayer) -> Partial:
        """Own heads' attention of decode rows; writes them to the cache."""

    @abstractmethod
    def _prompt(self, rows: Rows, layer: CachedLayer, prefill: Prefill) -> Partial:
        """The same of prefill rows."""

    def extra_repr(self) -> str:
        """What runs, and how it is spread."""
        size = self.mesh.size
        return (
            f"layer_idx={self.layer_idx}, combine={self.combine}, backend={self.scoring.backend}, "
            f"tp={size('tp')}, dcp={size('dcp')}, pcp={size('pcp')}"
        )

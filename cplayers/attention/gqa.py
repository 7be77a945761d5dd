"""`DCPGQAAttention`: grouped-query attention over a KV cache that is spread over ranks.

Legend: T rows of this rank, N query heads of the model, n = N / tp own heads, K KV heads of this
rank, H head dim, k TP neighbours in a DCP group, p PCP ranks, g = k*p DCP ranks, e bytes a value.

    q, k, v = project(x)                              # q: own n heads, or k*n with TPA
    q, k    = rope(norm(q)), rope(norm(k))
    decode rows:  cache.write(k, v)
                  q = gather over the group           # nothing to do with TPA
                  out = combine(attend_cached(q))     # each rank: the keys it owns
    prefill rows: by the strategy of PCPPrefillAttention: queries travel as above, or keys do
    y = o_proj(out)                                   # all-reduce over tp

Communication of a decode step per layer, before o_proj (`cplayers.attention.costs` has prefill):

| q_proj | combine | collectives | sent per rank, bytes (p = 1: g = k)                            |
|--------|---------|-------------|----------------------------------------------------------------|
| gather | a2a     | 2           | (k-1)/k * T*kn*H*e  +  (g-1) * T*n*(H*e + 4)                    |
| tpa    | a2a     | 1           | (g-1) * T*n*(H*e + 4)                                          |
| gather | ag_rs   | 3           | (k-1)/k * T*kn*H*e  +  (g-1) * T*kn*4  +  (g-1) * T*n*H*4       |
| gather | ar      | 3           | (k-1)/k * T*kn*H*e  +  (g-1) * T*kn*4  +  2*(g-1)/g * T*kn*H*4  |

Every degree 1 is the plain layer: no collective, no copy.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from cplayers.attention.combine import Combine
from cplayers.attention.costs import Sizes
from cplayers.attention.gather_q import Visit, visit
from cplayers.attention.heads import head_shard
from cplayers.attention.layer import CachedAttention, Once, Rows
from cplayers.attention.linear import RowParallelLinear, adopt
from cplayers.attention.planes import CachedLayer, Planes
from cplayers.attention.prefill import PCPPrefillAttention
from cplayers.attention.scoring import Scoring
from cplayers.attention.tpa import TPAQProj
from cplayers.cache import GQASpec
from cplayers.cache.prefill import Prefill
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh, validate
from cplayers.ops import Partial, apply_rope, require_backend

QProj = Literal["gather", "tpa"]


class DCPGQAAttention(CachedAttention):
    """Grouped-query attention under TP, DCP and PCP.

    Args:
        hidden_size: Model width.
        num_heads: Query heads of the model (N).
        num_kv_heads: KV heads of the model.
        head_dim: Dimension of a head (H).
        layer_idx: Layer index in the cache.
        q_proj: ``"gather"`` projects own heads and gathers the group's when decoding; ``"tpa"``
            projects the group's heads on each of its ranks (`TPAQProj`).
        combine: How partial outputs are combined, see `cplayers.attention.combine`.
        overlap: Whether decode rows are attended to in two halves, the results of one travelling
            while the other is attended to; for ``"a2a"``, see `Visit.halves`.
        prefill: Core for prompts; by default a `PCPPrefillAttention` with strategy ``"auto"``.
        backend: Local attention backend, see `cplayers.ops.attend`.
        window: Sliding window in tokens: a query at p sees p - window + 1 .. p; ``None``: all.
        softcap: Soft cap on the logits, or ``None``.
        sinks: Whether each head has an attention sink, a learned logit in the denominator
            (gpt-oss).
        scale: Factor on the logits; ``head_dim ** -0.5`` by default.
        qk_norm: Epsilon of an RMS norm on each head of q and k (Qwen3), or ``None``.
        bias: Bias on the q, k and v projections (Qwen2).
        o_bias: Bias on the output projection.
        mesh: The ranks.

    Raises:
        ConfigError: If the heads cannot be laid out on the mesh, or are odd; on unknown choices.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        layer_idx: int,
        q_proj: QProj = "gather",
        combine: Combine = "a2a",
        overlap: bool = False,
        prefill: PCPPrefillAttention | None = None,
        backend: str = "auto",
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        scale: float | None = None,
        qk_norm: float | None = None,
        bias: bool = False,
        o_bias: bool = False,
        mesh: CPMesh,
    ) -> None:
        super().__init__()
        validate(
            mesh.topology,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            block_size=1,
            interleave_size=1,
            combine=combine,
            q_proj=q_proj,
            head_dim=head_dim,
            window=window,
        )
        require_backend(backend)
        if head_dim % 2:
            raise ConfigError(f"head_dim={head_dim}", "rope turns pairs", "make it even")
        self.hidden_size, self.head_dim, self.value_dim = hidden_size, head_dim, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.layer_idx, self.combine, self.mesh = layer_idx, combine, mesh
        self.overlap = overlap
        scale = head_dim**-0.5 if scale is None else scale
        self.scoring = Scoring(scale, softcap, window, backend)
        self.heads = head_shard(
            mesh.topology, mesh.rank("tp"), num_heads, num_kv_heads, replicate_q=q_proj == "tpa"
        )
        self.q_proj: nn.Linear | TPAQProj
        if q_proj == "tpa":
            self.q_proj = TPAQProj(hidden_size, num_heads, head_dim, bias=bias, mesh=mesh)
        else:
            self.q_proj = nn.Linear(hidden_size, self.heads.num_own * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, self.heads.num_kv * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, self.heads.num_kv * head_dim, bias=bias)
        self.o_proj = RowParallelLinear(
            self.heads.num_own * head_dim, hidden_size, bias=o_bias, mesh=mesh
        )
        self.sinks = nn.Parameter(torch.zeros(self.heads.num_own)) if sinks else None
        self.q_norm: nn.Module | None
        self.k_norm: nn.Module | None
        self.q_norm, self.k_norm = (
            None if qk_norm is None else nn.RMSNorm(head_dim, eps=qk_norm) for _ in "qk"
        )
        self.prefill = prefill or PCPPrefillAttention(backend=backend, mesh=mesh)

    @property
    def cache_spec(self) -> GQASpec:
        """What this layer stores per token on this rank."""
        return GQASpec(self.heads.num_kv, self.head_dim)

    @property
    def sizes(self) -> Sizes:
        """What this layer moves per token."""
        return Sizes(
            own_heads=self.heads.num_own,
            query_dim=self.head_dim,
            value_dim=self.head_dim,
            stored=2 * self.heads.num_kv * self.head_dim,
            itemsize=self.o_proj.weight.dtype.itemsize,
            combine=self.combine,
            replicated=isinstance(self.q_proj, TPAQProj),
        )

    def _forms(self) -> list[tuple[int, int, bool]]:
        return [(self.head_dim, self.head_dim, False)]

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> Rows:
        def planes() -> tuple[Tensor, ...]:
            k = self._heads(self.k_proj(x), self.k_norm, cos, sin)
            return k, self._split(self.v_proj(x))

        return Rows(x, cos, sin, Once(planes))

    def _decode(self, rows: Rows, layer: CachedLayer) -> Partial:
        return self._visit(rows, layer, None)

    def _prompt(self, rows: Rows, layer: CachedLayer, prefill: Prefill) -> Partial:
        strategy = self.prefill.choose(prefill, self.sizes, self.scoring.window)
        if strategy == "gather_q":
            return self._visit(rows, layer, prefill)
        project = self.q_proj.own if isinstance(self.q_proj, TPAQProj) else self.q_proj
        q = self._heads(project(rows.x), self.q_norm, rows.cos, rows.sin)
        scoring, expand = self.scoring, self._read_by_own
        return self.prefill.fetch(q, rows.planes(), prefill, strategy, scoring, expand, layer)

    def _visit(self, rows: Rows, layer: CachedLayer, prefill: Prefill | None) -> Partial:
        q = self._heads(self.q_proj(rows.x), self.q_norm, rows.cos, rows.sin)
        how = Visit(self.combine, isinstance(self.q_proj, TPAQProj), halves=self.overlap)
        return visit(q, rows.planes, layer, self.scoring, how, self.mesh, prefill)

    def _read_by_own(self, planes: Planes) -> tuple[Tensor, Tensor]:
        """Of this rank's KV heads those that its own query heads read."""
        keys, values = planes
        heads = self.heads.kv_read_by_own()
        return (keys, values) if heads is None else (keys[:, heads], values[:, heads])

    def _heads(self, flat: Tensor, norm: nn.Module | None, cos: Tensor, sin: Tensor) -> Tensor:
        """`[T, heads * H]` to `[T, heads, H]`, normed and rotated."""
        x = self._split(flat)
        return apply_rope(x if norm is None else norm(x), cos, sin)

    def _split(self, flat: Tensor) -> Tensor:
        """`[T, heads * H]` to `[T, heads, H]`."""
        return flat.view(flat.shape[0], flat.shape[1] // self.head_dim, self.head_dim)

    @classmethod
    def from_full(
        cls,
        *,
        q_proj: nn.Linear,
        k_proj: nn.Linear,
        v_proj: nn.Linear,
        o_proj: nn.Linear,
        head_dim: int,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        sinks: nn.Parameter | None = None,
        mode: QProj = "gather",
        mesh: CPMesh,
        **kwargs: Any,
    ) -> Self:
        """Build the layer from unsharded projections, keeping their Parameters, cut to this rank.

        Args:
            q_proj: `[N*H, hidden]`; with k_proj, v_proj, o_proj the plain layer's projections.
            k_proj: `[K*H, hidden]`.
            v_proj: `[K*H, hidden]`.
            o_proj: `[hidden, N*H]`.
            head_dim: Dimension of a head.
            q_norm: Norm on each query head, used as it is.
            k_norm: Norm on each key head, used as it is.
            sinks: Attention sinks of all heads `[N]`, or ``None``.
            mode: The layer's ``q_proj`` argument.
            mesh: The ranks.
            **kwargs: Further arguments of the constructor (``layer_idx``, ``combine``, ...).
        """
        hidden = q_proj.in_features
        with torch.device("meta"):
            layer = cls(
                hidden,
                q_proj.out_features // head_dim,
                k_proj.out_features // head_dim,
                head_dim,
                q_proj=mode,
                bias=q_proj.bias is not None,
                o_bias=o_proj.bias is not None,
                sinks=sinks is not None,
                mesh=mesh,
                **kwargs,
            )
        heads = layer.heads
        q_rows = heads.group if mode == "tpa" else heads.own
        adopt(layer.q_proj, q_proj, dim=0, rows=q_rows, head_dim=head_dim)
        adopt(layer.k_proj, k_proj, dim=0, rows=heads.kv, head_dim=head_dim)
        adopt(layer.v_proj, v_proj, dim=0, rows=heads.kv, head_dim=head_dim)
        adopt(layer.o_proj, o_proj, dim=1, rows=heads.own, head_dim=head_dim)
        layer.q_norm, layer.k_norm, layer.sinks = q_norm, k_norm, sinks
        if sinks is not None:
            sinks.data = sinks.data[slice(*heads.own)].clone()
        return layer.train(q_proj.training)

    @classmethod
    def from_hf(
        cls, module: nn.Module, mesh: CPMesh, *, q_proj: QProj = "gather", **kwargs: Any
    ) -> Self:
        """Build the layer from an unsharded attention module of transformers' Llama family.

        Args:
            module: With q_proj, k_proj, v_proj, o_proj, head_dim, layer_idx, scaling, and q_norm
                and k_norm where the architecture has them. Its Parameters are kept and cut.
            mesh: The ranks.
            q_proj: The layer's ``q_proj`` argument.
            **kwargs: Further arguments of the constructor.
        """
        plain: Any = module
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "head_dim", "sinks")
        known: dict[str, Any] = {name: getattr(plain, name, None) for name in names}
        known |= {"layer_idx": plain.layer_idx, "scale": plain.scaling}
        return cls.from_full(mode=q_proj, mesh=mesh, **known, **kwargs)

    def extra_repr(self) -> str:
        """What runs, and how it is spread."""
        return (
            f"heads {self.heads.own[0]}..{self.heads.own[1] - 1} of {self.num_heads}, "
            f"kv {self.heads.kv[0]}..{self.heads.kv[1] - 1} of {self.num_kv_heads}, "
            f"head_dim={self.head_dim}, {super().extra_repr()}"
        )

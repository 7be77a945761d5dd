"""`DCPMLAAttention`: multi-head latent attention over a cache that is spread over ranks.

The cache holds one row per token for all heads, so tensor parallelism keeps a copy of it on every
rank; decode context parallelism spreads it.

Legend: T rows of this rank, N query heads of the model, n = N / tp own heads, L latent rank,
R rotary, P other dimensions of a head, V its values, k TP neighbours in a DCP group, p PCP ranks,
g = k*p DCP ranks, e bytes a value.

    kv     = (norm(latent), rope(k_pe))  of kv_a_proj(x)      # [T, L + R], alike on all TP ranks
    q      = (nope, rope(pe))  of q_proj(x), or q_b_proj(norm(q_a_proj(x)))
    decode rows:  cache.write(kv)
      gather_q     q = gather_heads((nope W_UK, pe))          # into the latent: L + R wide
                   out = W_UV combine(attend_cached(q))
      replicate_q  the group's heads are projected here: nothing is gathered
                   out = combine(W_UV attend_cached(q))       # L-wide results never travel
      gather_kv    out = W_UV attend(q, latents of all ranks, piece by piece)
    prefill rows: by the strategy of PCPPrefillAttention; where keys travel they are latents,
                  expanded here to keys and values, or q absorbed where its rows are few
    y = o_proj(out)                                           # all-reduce over tp

Communication of a decode step per layer, before o_proj (p = 1: g = k):

| decode      | combine | calls | sent per rank, bytes                                        |
|-------------|---------|-------|-------------------------------------------------------------|
| gather_q    | a2a     | 2     | (k-1) * T*n*(L+R)*e + (g-1) * T*n*(L*e + 4)                 |
| gather_q    | ag_rs   | 3     | (k-1) * T*n*(L+R)*e + (g-1) * T*(kn*4 + n*L*4)              |
| gather_q    | ar      | 3     | (k-1) * T*n*(L+R)*e + (g-1) * T*kn*4 + 2*(g-1)/g * T*kn*L*4 |
| replicate_q | a2a     | 1     | (g-1) * T*n*(V*e + 4)                                       |
| replicate_q | ag_rs   | 2     | (g-1) * T*(kn*4 + n*V*4)                                    |
| gather_kv   |         | 1 per piece | (g-1) * (largest share of the keys) * (L+R)*e         |

One token of DeepSeek-R1 (N 128, L 512, R 64, bf16) at tp = dcp = 8: gather_q sends 129 KB of
queries and 115 KB of results, gather_kv over 131,072 tokens 132 MB. Every degree 1 sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn

from cplayers.attention.combine import Combine
from cplayers.attention.costs import Sizes
from cplayers.attention.gather_kv import attend_context
from cplayers.attention.gather_q import Visit, visit
from cplayers.attention.layer import Rows
from cplayers.attention.mla_projections import MLAProjections
from cplayers.attention.planes import CachedLayer, Expand
from cplayers.attention.prefill import PCPPrefillAttention
from cplayers.attention.scoring import Scoring
from cplayers.cache import StepPlan
from cplayers.cache.layouts import require_positive
from cplayers.cache.prefill import Choice, Prefill
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh, validate
from cplayers.ops import Partial, merge_stream, require_backend, yarn_mscale

Decode = Literal["gather_q", "replicate_q", "gather_kv", "auto"]


class OwnForm(NamedTuple):
    """Attention of own heads in the cheaper form, see `cplayers.attention.latent`.

    Attributes:
        q: `[T, n, P + R]` or `[T, n, L + R]`.
        expand: What turns stored rows into the keys and values that ``q`` reads.
        finish: What turns the output into values `[T, n, V]`.
    """

    q: Tensor
    expand: Expand
    finish: Callable[[Tensor], Tensor]


class DCPMLAAttention(MLAProjections):
    """Multi-head latent attention under TP, DCP and PCP.

    Submodules have the names of transformers' DeepSeek layers. This rank has its own heads of
    ``q_proj`` (or ``q_b_proj``), ``kv_b_proj`` and ``o_proj``; with ``replicate_q`` it has those of
    its DCP group of the first two.

    Args:
        hidden_size: Model width.
        num_heads: Query heads of the model (N).
        q_lora_rank: Rank of the query's own latent; ``None`` projects queries directly.
        kv_lora_rank: Rank of the latent that is cached (L).
        qk_nope_head_dim: Dimensions of a head's query and key without position (P).
        qk_rope_head_dim: Rotary dimensions (R), even.
        v_head_dim: Dimension of a head's values (V).
        layer_idx: Layer index in the cache.
        decode: What travels when decoding, see the module's table: ``"gather_q"``,
            ``"replicate_q"``, ``"gather_kv"``, or ``"auto"``, which takes gather_q or gather_kv
            per step, whichever sends fewer bytes.
        combine: How partial outputs are combined, see `cplayers.attention.combine`.
        overlap: Whether decode rows are attended to in two halves, the results of one travelling
            while the other is attended to; for ``"a2a"``, see `Visit.halves`.
        prefill: Core for prompts; its ``workspace_tokens`` also bound the pieces of gather_kv.
        backend: Local attention backend, see `cplayers.ops.attend`.
        softcap: Soft cap on the logits, or ``None``.
        scale: Factor on the logits; by default ``(P + R) ** -0.5``, times the square of
            ``yarn_mscale(yarn_factor, yarn_mscale_all_dim)``.
        yarn_factor: YaRN's scaling factor of the context; 1 without YaRN.
        yarn_mscale_all_dim: DeepSeek's ``mscale_all_dim``; 0 leaves the scale as it is.
        rope_interleave: Whether rotary pairs are neighbours, as DeepSeek stores them; otherwise
            they are half the rotary dimensions apart.
        norm_eps: Epsilon of the RMS norms of the latents.
        bias: Bias on q_a_proj, kv_a_proj_with_mqa and o_proj.
        mesh: The ranks.

    Raises:
        ConfigError: If the heads cannot be laid out on the mesh, or R is odd; on unknown choices.
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
        layer_idx: int,
        decode: Decode = "gather_q",
        combine: Combine = "a2a",
        overlap: bool = False,
        prefill: PCPPrefillAttention | None = None,
        backend: str = "auto",
        softcap: float | None = None,
        scale: float | None = None,
        yarn_factor: float = 1.0,
        yarn_mscale_all_dim: float = 0.0,
        rope_interleave: bool = True,
        norm_eps: float = 1e-6,
        bias: bool = False,
        mesh: CPMesh,
    ) -> None:
        validate(
            mesh.topology,
            num_heads=num_heads,
            num_kv_heads=None,
            block_size=1,
            interleave_size=1,
            combine=combine,
        )
        require_backend(backend)
        require_decode(decode)
        for name, dim in (
            ("q_lora_rank", 1 if q_lora_rank is None else q_lora_rank),
            ("kv_lora_rank", kv_lora_rank),
            ("qk_nope_head_dim", qk_nope_head_dim),
            ("qk_rope_head_dim", qk_rope_head_dim),
            ("v_head_dim", v_head_dim),
        ):
            require_positive(name, dim)
        if qk_rope_head_dim % 2:
            raise ConfigError(
                f"qk_rope_head_dim={qk_rope_head_dim}", "rope turns pairs", "make it even"
            )
        super().__init__(
            hidden_size,
            num_heads,
            q_lora_rank,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            replicate=decode == "replicate_q",
            rope_interleave=rope_interleave,
            norm_eps=norm_eps,
            bias=bias,
            mesh=mesh,
        )
        self.layer_idx, self.decode, self.combine = layer_idx, decode, combine
        self.overlap = overlap
        if scale is None:
            scale = (self.nope_dim + self.rope_dim) ** -0.5
            scale *= yarn_mscale(yarn_factor, yarn_mscale_all_dim) ** 2
        self.scoring = Scoring(scale, softcap, None, backend)
        self.sinks = None
        self.prefill = prefill or PCPPrefillAttention(backend=backend, mesh=mesh)

    @property
    def sizes(self) -> Sizes:
        """What this layer moves per token."""
        wide = self.kv_lora_rank + self.rope_dim
        return Sizes(
            own_heads=self.heads.num_own,
            query_dim=wide,
            value_dim=self.value_dim if self.replicate else self.kv_lora_rank,
            stored=wide,
            itemsize=self.o_proj.weight.dtype.itemsize,
            combine=self.combine,
            replicated=self.replicate,
        )

    def decode_strategy(self, plan: StepPlan) -> str:
        """How a step's decode rows are attended to; ``"auto"`` resolved.

        Args:
            plan: The step.

        Returns:
            The same on all ranks, as it depends on what is alike on all of them.
        """
        if self.decode != "auto":
            return self.decode
        if plan.is_static:  # its keys are known by block tables alone
            return "gather_q"
        topology, sizes = self.mesh.topology, self.sizes
        if sizes not in plan.decode_choices:
            keys = sizes.fetch(topology, new=0, cached=plan.decode_context.width())
            queries = sizes.visit(topology, plan.num_decode)
            fewest = "gather_kv" if keys < queries else "gather_q"
            sent = ("gather_q", queries), ("gather_kv", keys)
            plan.decode_choices[sizes] = Choice(fewest, sent, "fewest bytes")
        return plan.decode_choices[sizes].strategy

    def _decode(self, rows: Rows, layer: CachedLayer) -> Partial:
        if self.decode_strategy(layer.plan) != "gather_kv":
            return self._visit(rows, layer, None)
        layer.cache.write(layer.plan, self.layer_idx, layer.plan.decode_writes, *rows.planes())
        form, context = self._own_form(rows), layer.plan.decode_context
        workspace = self.prefill.workspace_tokens
        merged = merge_stream(
            attend_context(form.q, layer, context, form.expand, self.scoring, self.mesh, workspace)
        )
        assert merged is not None, "a row that decodes sees itself"
        return Partial(form.finish(merged.out), merged.lse)

    def _prompt(self, rows: Rows, layer: CachedLayer, prefill: Prefill) -> Partial:
        strategy = self.prefill.choose(prefill, self.sizes, self.scoring.window)
        if strategy == "gather_q":
            return self._visit(rows, layer, prefill)
        form = self._own_form(rows)
        out, lse = self.prefill.fetch(
            form.q, rows.planes(), prefill, strategy, self.scoring, form.expand, layer
        )
        return Partial(form.finish(out), lse)

    def _visit(self, rows: Rows, layer: CachedLayer, prefill: Prefill | None) -> Partial:
        """The queries go into the latent and visit the stored rows of every rank."""
        up = self._up(own=not self.replicate)
        q = up.absorb(*self._queries(rows, own=not self.replicate))
        before = up.values if self.replicate else None
        how = Visit(self.combine, self.replicate, before, self.overlap)
        out, lse = visit(q, rows.planes, layer, self.scoring, how, self.mesh, prefill)
        return Partial(out if self.replicate else up.values(out), lse)

    def _own_form(self, rows: Rows) -> OwnForm:
        """The cheaper form for these rows; the choice is this rank's own, both are exact."""
        up, (nope, rope) = self._up(own=True), self._queries(rows, own=True)
        if up.absorbs(len(rows.x)):
            return OwnForm(up.absorb(nope, rope), self.cache_spec.keys_values, up.values)
        return OwnForm(torch.cat([nope, rope], dim=-1), up.expand, lambda out: out)

    @classmethod
    def from_hf(cls, module: nn.Module, mesh: CPMesh, **kwargs: Any) -> Self:
        """Build the layer from an unsharded attention module of transformers' DeepSeek family.

        Args:
            module: With the projections and norms of `from_full`, qk_nope_head_dim,
                qk_rope_head_dim, layer_idx, scaling and config. Its Parameters are kept and cut.
            mesh: The ranks.
            **kwargs: Further arguments of the constructor (``decode``, ``combine``, ...).
        """
        plain: Any = module
        names = [
            *("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa"),
            *("kv_a_layernorm", "kv_b_proj", "o_proj", "qk_nope_head_dim", "qk_rope_head_dim"),
        ]
        known: dict[str, Any] = {name: getattr(plain, name, None) for name in names}
        known |= {"layer_idx": plain.layer_idx, "scale": plain.scaling}
        known["rope_interleave"] = getattr(plain.config, "rope_interleave", True)
        return cls.from_full(mesh=mesh, **known, **kwargs)

    def extra_repr(self) -> str:
        """What runs, and how it is spread."""
        return (
            f"heads {self.heads.own[0]}..{self.heads.own[1] - 1} of {self.num_heads}, "
            f"latent {self.kv_lora_rank} + {self.rope_dim}, decode={self.decode}, "
            f"{super().extra_repr()}"
        )


def require_decode(decode: str) -> None:
    """Raise ConfigError unless ``decode`` names a way of decoding."""
    if decode not in get_args(Decode):
        names = ", ".join(get_args(Decode))
        raise ConfigError(
            f"decode={decode!r}", "rows are decoded in a known way", f"choose one of {names}"
        )

"""`parallelize`: swap context-parallel attention into a transformers model, in place."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from transformers import PreTrainedModel

from cplayers.attention import Combine, PCPPrefillAttention
from cplayers.attention.gqa import QProj
from cplayers.attention.mla import require_decode
from cplayers.attention.prefill import WORKSPACE_TOKENS
from cplayers.cache import CacheConfig
from cplayers.errors import ConfigError
from cplayers.hf.attention import HFGQAAttention, HFMLAAttention
from cplayers.hf.dense import FilterFn, shard_dense
from cplayers.hf.families import Family, attention_modules, family_of, refuse_length_dependent_rope
from cplayers.hf.model import ContextParallelModel
from cplayers.hf.state import CPState
from cplayers.mesh import CPMesh, validate

Model = TypeVar("Model", bound=PreTrainedModel)


def parallelize(
    model: Model,
    mesh: CPMesh,
    *,
    cache: CacheConfig | None = None,
    q_proj: QProj = "gather",
    combine: Combine = "a2a",
    overlap: bool = False,
    decode: str | None = None,
    prefill: str = "auto",
    workspace_tokens: int = WORKSPACE_TOKENS,
    backend: str = "auto",
    filter_fn: FilterFn | None = None,
    chunk_size: int | None = None,
) -> Model:
    """Make ``model`` run context-parallel on ``mesh``; it is then called alike on all ranks.

    The attention modules are replaced, their Parameters kept and cut to this rank. MLPs, routed
    experts and lm_head are sharded over TP where it divides them. With PCP above 1 each rank
    computes its zigzag share of a prompt through the whole network.

    Example:
        >>> mesh = CPMesh(Topology(pcp=2, dcp=2))             # under torchrun, 2 ranks
        >>> model = parallelize(AutoModelForCausalLM.from_pretrained(path), mesh)
        >>> model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64)
        >>> print(model.cp.report())

    Args:
        model: A causal LM of a known architecture, whole, on every rank. Changed in place.
        mesh: The ranks.
        cache: Cache settings; by default blocks and interleave of 16 tokens, growing as needed.
        q_proj: ``"gather"`` or ``"tpa"``, see `DCPGQAAttention`; with latent attention ``"tpa"`` is
            ``decode="replicate_q"``.
        combine: ``"a2a"``, ``"ag_rs"`` or ``"ar"``, see `cplayers.attention.combine`.
        overlap: Whether decode rows are attended to in two halves, the results of one travelling
            while the other is attended to, see `DCPGQAAttention`.
        decode: For latent attention (MLA) only: ``"gather_q"``, ``"replicate_q"``, ``"gather_kv"``
            or ``"auto"``, see `DCPMLAAttention`. ``None`` is ``"auto"``, or as ``q_proj`` says.
        prefill: Strategy of `PCPPrefillAttention`.
        workspace_tokens: Bound on the cached tokens that a prompt chunk gathers at a time, over all
            ranks, see `PCPPrefillAttention`.
        backend: Local attention, see `cplayers.ops.attend`.
        filter_fn: ``filter_fn(module, name)`` is False for MLPs, experts or the lm_head to leave
            replicated.
        chunk_size: Compute a call with more new tokens than this in a row, such as a long prompt,
            in several steps of at most so many tokens of each row, which bounds the memory of a
            step. ``None``: in one.

    Returns:
        The same object, now also a `ContextParallelModel`; ``model.cp`` tells what happened.

    Raises:
        ConfigError: If the architecture is unknown or does not fit the mesh, or options contradict
            each other, on all ranks alike and before anything is changed.
    """
    if isinstance(model, ContextParallelModel):
        raise ConfigError(
            "a model that is parallelized already", "weights are cut once", "load the model again"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(
            f"chunk_size={chunk_size}",
            "a chunk has at least one token of each row",
            "pass at least 1, in practice thousands, or None to compute prompts at once",
        )
    family = family_of(model)
    cache = cache or CacheConfig()
    config: Any = model.config
    modules = attention_modules(model, family)
    masking = [family.masking(module) for _, module in modules]
    for window in {options.get("window") for options in masking}:
        validate(
            mesh.topology,
            num_heads=config.num_attention_heads,
            num_kv_heads=None if family.latent else config.num_key_value_heads,
            block_size=cache.block_size,
            interleave_size=cache.interleave_size,
            combine=combine,
            q_proj=q_proj,
            window=window,
        )
    refuse_length_dependent_rope(config, mesh)
    query: dict[str, Any] = _query_option(family, q_proj, decode)
    attention = HFMLAAttention if family.latent else HFGQAAttention
    core: dict[str, Any] = {"workspace_tokens": workspace_tokens, "backend": backend, "mesh": mesh}
    layers: list[Any] = []
    for (name, module), masks in zip(modules, masking, strict=True):
        layer = attention.from_hf(
            module,
            mesh,
            combine=combine,
            overlap=overlap,
            prefill=PCPPrefillAttention(prefill, **core),
            backend=backend,
            **query,
            **masks,
        )
        model.set_submodule(name, layer)
        layers.append(layer)
    dense = shard_dense(model, family, mesh, filter_fn)
    base = type(model)
    model.__class__ = type(f"ContextParallel{base.__name__}", (ContextParallelModel, base), {})
    cast("Any", model).cp = CPState(mesh, cache, layers, dense, family, chunk_size)
    return model


def _query_option(family: Family, q_proj: str, decode: str | None) -> dict[str, str]:
    """The layer's argument that says how queries meet the cache."""
    if not family.latent:
        if decode is not None:
            raise ConfigError(
                f"decode={decode!r} for {family.model}",
                "it says how latent attention (MLA) decodes; this is grouped-query attention",
                "leave decode out; q_proj='tpa' is what decode='replicate_q' is for MLA",
            )
        return {"q_proj": q_proj}
    if q_proj == "tpa" and decode not in (None, "replicate_q"):
        raise ConfigError(
            f"q_proj='tpa' with decode={decode!r}",
            "q_proj='tpa' is decode='replicate_q'",
            "leave out one of the two",
        )
    if decode is None:
        decode = "replicate_q" if q_proj == "tpa" else "auto"
    require_decode(decode)
    return {"decode": decode}

"""Typed schemas of what can be configured, one per config group.

A schema has the settings of one class: the constructor's parameters that have a default, with the
same names, types and defaults. Objects that exist only at run time (``RUNTIME``) and the shape of
the model, which has no default, are passed when it is instantiated.

    instantiate(cfg.mesh)                 -> Topology
    instantiate(cfg.cache)                -> CacheConfig
    instantiate(cfg.serving)              -> ServingConfig
    instantiate(cfg.prefill)(mesh=mesh)   -> PCPPrefillAttention
    instantiate(cfg.attention)(hidden_size, num_heads, num_kv_heads, head_dim,
                               layer_idx=i, mesh=mesh)  -> DCPGQAAttention
    with attention=mla, (hidden_size, num_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim,
                         qk_rope_head_dim, v_head_dim, layer_idx=i, mesh=mesh)
                                                        -> DCPMLAAttention
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

RUNTIME = ("layer_idx", "mesh", "prefill")
"""Parameters that are not settings: where a layer stands, on which ranks, and with which core."""


@dataclass
class TopologyConf:
    """Settings of `cplayers.mesh.Topology`: the degrees of parallelism, stated here only."""

    _target_: str = "cplayers.mesh.Topology"
    _convert_: str = "all"
    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    dp: int = 1


@dataclass
class CacheConf:
    """Settings of `cplayers.cache.CacheConfig`."""

    _target_: str = "cplayers.cache.CacheConfig"
    _convert_: str = "all"
    block_size: int = 16
    interleave_size: int = 16
    num_blocks: int | None = None


@dataclass
class GQAConf:
    """Settings of `cplayers.attention.DCPGQAAttention`, as a factory of layers."""

    _target_: str = "cplayers.attention.DCPGQAAttention"
    _convert_: str = "all"
    _partial_: bool = True
    q_proj: str = "gather"
    combine: str = "a2a"
    overlap: bool = False
    backend: str = "auto"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    qk_norm: float | None = None
    bias: bool = False
    o_bias: bool = False


@dataclass
class MLAConf:
    """Settings of `cplayers.attention.DCPMLAAttention`, as a factory of layers."""

    _target_: str = "cplayers.attention.DCPMLAAttention"
    _convert_: str = "all"
    _partial_: bool = True
    decode: str = "gather_q"
    combine: str = "a2a"
    overlap: bool = False
    backend: str = "auto"
    softcap: float | None = None
    scale: float | None = None
    yarn_factor: float = 1.0
    yarn_mscale_all_dim: float = 0.0
    rope_interleave: bool = True
    norm_eps: float = 1e-6
    bias: bool = False


@dataclass
class PrefillConf:
    """Settings of `cplayers.attention.PCPPrefillAttention`, as a factory."""

    _target_: str = "cplayers.attention.PCPPrefillAttention"
    _convert_: str = "all"
    _partial_: bool = True
    strategy: str = "auto"
    workspace_tokens: int = 16384
    backend: str = "auto"


@dataclass
class ServingConf:
    """Settings of `cplayers.serving.ServingConfig`; the KV budget has no default."""

    _target_: str = "cplayers.serving.ServingConfig"
    _convert_: str = "all"
    num_blocks: int = MISSING
    block_size: int = 16
    interleave_size: int = 16
    sizes: tuple[int, ...] = (1, 2, 4)
    crossovers: dict[int, int | None] = field(default_factory=dict)
    chunk_tokens: int = 256
    steps: Any = 4  # an int or a mapping, for which Hydra has no union
    share: float = 0.25
    same_processors: bool = False
    stretch: int = 4
    headroom: int = 64
    patience: int = 50
    max_running: int = 64


SCHEMAS = {
    "mesh/schema": TopologyConf,
    "cache/schema": CacheConf,
    "attention/schema_gqa": GQAConf,
    "attention/schema_mla": MLAConf,
    "prefill/schema": PrefillConf,
    "serving/schema": ServingConf,
}
"""Schema by group and name, as the YAML files refer to them."""


def register_configs() -> None:
    """Make the schemas known to Hydra, before `hydra.main`. Calling it again is harmless."""
    store = ConfigStore.instance()
    for path, schema in SCHEMAS.items():
        group, name = path.split("/")
        store.store(group=group, name=name, node=schema, provider="cplayers.conf")

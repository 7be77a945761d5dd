"""Composable context-parallel attention layers for long-context inference.

Importing this package starts no CUDA context and no process group, and imports neither Hydra
(`cplayers.conf`) nor transformers (`cplayers.hf`).
"""

from cplayers.attention import (
    DCPGQAAttention,
    DCPMLAAttention,
    PCPPrefillAttention,
    TPAQProj,
)
from cplayers.cache import (
    CacheConfig,
    GQASpec,
    InterleavedLayout,
    MLASpec,
    PagedKVCache,
    ZigzagLayout,
)
from cplayers.errors import (
    CacheFullError,
    ConfigError,
    CPLayersError,
    RankFailedError,
    StateError,
    TransferError,
)
from cplayers.mesh import CPMesh, Topology

__version__ = "0.1.0"

__all__ = [
    "CPLayersError",
    "CPMesh",
    "CacheConfig",
    "CacheFullError",
    "ConfigError",
    "DCPGQAAttention",
    "DCPMLAAttention",
    "GQASpec",
    "InterleavedLayout",
    "MLASpec",
    "PCPPrefillAttention",
    "PagedKVCache",
    "RankFailedError",
    "StateError",
    "TPAQProj",
    "Topology",
    "TransferError",
    "ZigzagLayout",
]

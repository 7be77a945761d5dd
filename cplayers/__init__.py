"""Composable context-parallel attention layers for long-context inference.

Importing this package starts no CUDA context and no process group, and imports neither Hydra
(`cplayers.conf`) nor transformers (`cplayers.hf`). Names are looked up when they are first used, so
that the ``cplayers`` command answers without torch where it can.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_ROOMS = ("errors", "mesh", "cache", "attention")  # searched in this order


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"cplayers.{name}")
    if name in __all__:
        for room in _ROOMS:
            module = import_module(f"cplayers.{room}")
            if name in vars(module):
                globals()[name] = found = vars(module)[name]
                return found
    raise AttributeError(f"module 'cplayers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

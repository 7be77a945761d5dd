"""Where tokens live: layouts, block pool, paged cache and the plan of a step."""

from cplayers.cache.blocks import BlockPool, PoolStats
from cplayers.cache.layouts import InterleavedLayout, Layout, ZigzagLayout
from cplayers.cache.paged import PagedKVCache
from cplayers.cache.plan import StepPlan
from cplayers.cache.spec import (
    CacheConfig,
    CacheSpec,
    GQASpec,
    MLASpec,
    Plane,
    bytes_per_token,
)

__all__ = [
    "BlockPool",
    "CacheConfig",
    "CacheSpec",
    "GQASpec",
    "InterleavedLayout",
    "Layout",
    "MLASpec",
    "PagedKVCache",
    "Plane",
    "PoolStats",
    "StepPlan",
    "ZigzagLayout",
    "bytes_per_token",
]

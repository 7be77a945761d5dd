"""Where tokens live: layouts, block pool, paged cache and the plan of a step."""

from cplayers.cache.blocks import BlockPool, PoolStats
from cplayers.cache.header import ShardHeader
from cplayers.cache.landing import Landing
from cplayers.cache.layouts import InterleavedLayout, Layout, ZigzagLayout
from cplayers.cache.paged import PagedKVCache
from cplayers.cache.plan import StepPlan
from cplayers.cache.shard import BlockShard
from cplayers.cache.shard_file import load_shard, save_shard
from cplayers.cache.spec import (
    CacheConfig,
    CacheSpec,
    GQASpec,
    MLASpec,
    Plane,
    bytes_per_token,
)
from cplayers.cache.static import StaticDecode
from cplayers.cache.transfer import Holding, Move, moves

__all__ = [
    "BlockPool",
    "BlockShard",
    "CacheConfig",
    "CacheSpec",
    "GQASpec",
    "Holding",
    "InterleavedLayout",
    "Landing",
    "Layout",
    "MLASpec",
    "Move",
    "PagedKVCache",
    "Plane",
    "PoolStats",
    "ShardHeader",
    "StaticDecode",
    "StepPlan",
    "ZigzagLayout",
    "bytes_per_token",
    "load_shard",
    "moves",
    "save_shard",
]

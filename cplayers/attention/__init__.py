"""Context-parallel attention layers and the pieces they are composed of."""

from cplayers.attention.cached import attend_cached, gather_heads
from cplayers.attention.combine import Combine, combine
from cplayers.attention.gather_kv import CachedLayer
from cplayers.attention.gqa import DCPGQAAttention
from cplayers.attention.heads import HeadShard, head_shard
from cplayers.attention.linear import GatheredLinear, RowParallelLinear
from cplayers.attention.mla import DCPMLAAttention, Decode
from cplayers.attention.prefill import PCPPrefillAttention, PrefillResult
from cplayers.attention.tokens import gather_rows, take_rows
from cplayers.attention.tpa import TPAQProj

__all__ = [
    "CachedLayer",
    "Combine",
    "DCPGQAAttention",
    "DCPMLAAttention",
    "Decode",
    "GatheredLinear",
    "HeadShard",
    "PCPPrefillAttention",
    "PrefillResult",
    "RowParallelLinear",
    "TPAQProj",
    "attend_cached",
    "combine",
    "gather_heads",
    "gather_rows",
    "head_shard",
    "take_rows",
]

"""Context-parallel attention layers and the pieces they are composed of."""

from cplayers.attention.combine import Combine, combine, start_combine
from cplayers.attention.costs import Sizes, combine_bytes
from cplayers.attention.gather_kv import attend_context, attend_new
from cplayers.attention.gather_q import Visit, attend_cached, send_queries, visit
from cplayers.attention.gqa import DCPGQAAttention
from cplayers.attention.heads import HeadShard, head_shard
from cplayers.attention.linear import GatheredLinear, RowParallelLinear
from cplayers.attention.mla import DCPMLAAttention, Decode
from cplayers.attention.planes import CachedLayer
from cplayers.attention.prefill import PCPPrefillAttention
from cplayers.attention.scoring import Scoring
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
    "RowParallelLinear",
    "Scoring",
    "Sizes",
    "TPAQProj",
    "Visit",
    "attend_cached",
    "attend_context",
    "attend_new",
    "combine",
    "combine_bytes",
    "gather_rows",
    "head_shard",
    "send_queries",
    "start_combine",
    "take_rows",
    "visit",
]

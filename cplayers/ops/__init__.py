"""Tensor maths without process groups: partial attention, its merge, spans, backends, rotary."""

from __future__ import annotations

from cplayers.ops.attend import (
    attend,
    attend_paged,
    available_backends,
    require_backend,
    select,
    select_paged,
)
from cplayers.ops.backends import PagedKeys
from cplayers.ops.partial import (
    Partial,
    add_sink,
    empty,
    merge,
    merge_stacked,
    merge_stream,
    scale_weights,
    weigh,
)
from cplayers.ops.reference import attention_reference
from cplayers.ops.rope import apply_rope, yarn_mscale
from cplayers.ops.spans import Spans, Tile, spans, tile_rows

__all__ = [
    "PagedKeys",
    "Partial",
    "Spans",
    "Tile",
    "add_sink",
    "apply_rope",
    "attend",
    "attend_paged",
    "attention_reference",
    "available_backends",
    "empty",
    "merge",
    "merge_stacked",
    "merge_stream",
    "require_backend",
    "scale_weights",
    "select",
    "select_paged",
    "spans",
    "tile_rows",
    "weigh",
    "yarn_mscale",
]

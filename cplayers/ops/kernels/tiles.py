"""How a span attention is cut into programs: plain ints, chosen without a device.

A program holds ``block_m`` query rows: ``heads`` query heads of one KV head for each of ``tokens``
rows, so that they share the keys it reads. A head dimension that is no power of two is cut into two
products, 576 = 512 + 64 and 96 = 64 + 32, since padding it would multiply zeros.

`MAX_ROWS` keeps every product on the tensor-core instructions that sm_80 and sm_90 have in common.
From 64 rows on Triton would take Hopper's asynchronous ones, for which the assemblers of CUDA 12
are known to produce wrong code when an operand is in registers, as the weights here are (CUDA 13.3
release notes; Triton issue 9433).
"""

from __future__ import annotations

from typing import NamedTuple

from cplayers.errors import ConfigError

MIN_ROWS, MAX_ROWS = 16, 32
"""Fewest rows of a tensor-core product, and most rows of a program."""

MAX_DIM, MAX_VALUE_DIM = 576, 512
"""Largest head and value dimension: what is known to fit into registers and shared memory."""

MIN_SPLIT_KEYS = 256
"""Fewest keys of a split: below, writing and merging partials costs more than reading keys."""

MAX_SPLITS = 64
"""Most splits of the keys."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs that are aimed at per multiprocessor. Chosen from shared memory, not yet measured."""


class TileShape(NamedTuple):
    """Compile-time sizes of the kernel.

    Attributes:
        heads: Query heads of a program, all of one KV head.
        tokens: Query rows of each of them.
        block_m: ``heads * tokens`` padded to a power of two.
        block_n: Keys of one step of the loop.
        block_d: First part of the head dimension, a power of two.
        block_rest: The rest of it, padded to a power of two; 0 where there is none.
        block_v: Value dimension, padded to a power of two.
        warps: Warps of a program.
        stages: Depth of the loop's software pipeline.
    """

    heads: int
    tokens: int
    block_m: int
    block_n: int
    block_d: int
    block_rest: int
    block_v: int
    warps: int
    stages: int


def tile_shape(
    *,
    head_dim: int,
    value_dim: int,
    group: int,
    rows_per_request: int,
    itemsize: int,
    tile_rows: int | None = None,
) -> TileShape:
    """Sizes for a problem.

    Args:
        head_dim: H.
        value_dim: V.
        group: Query heads per KV head, G.
        rows_per_request: Query rows that usually share keys; 1 when decoding.
        itemsize: Bytes per element of the cache.
        tile_rows: Most rows of a program, 16 or 32; ``None``: chosen.

    Raises:
        ConfigError: A dimension is too large, or ``tile_rows`` is neither 16 nor 32.
    """
    if not (1 <= head_dim <= MAX_DIM and 1 <= value_dim <= MAX_VALUE_DIM):
        raise ConfigError(
            f"H={head_dim}, V={value_dim}",
            f"H is 1 to {MAX_DIM}, and V 1 to {MAX_VALUE_DIM}",
            'use backend="math"',
        )
    if tile_rows not in (None, MIN_ROWS, MAX_ROWS):
        raise ConfigError(
            f"tile_rows={tile_rows}",
            f"a program holds {MIN_ROWS} or {MAX_ROWS} rows",
            "choose one of them, or None",
        )
    block_d, block_rest = split_dim(head_dim)
    block_v = max(16, ceil_power(value_dim))
    wide = max(block_d, block_v)
    if itemsize > 2:  # fp32 products take no tensor cores, and their operands more registers
        most = tile_rows or MIN_ROWS
        block_n, warps, stages = (16, 8, 2) if wide <= 256 else (16, 8, 1)
    else:
        most = tile_rows or MAX_ROWS
        # Looking slots up takes a stage of its own: with 3 the next keys are on their way.
        block_n, stages = (64 if wide <= 256 else 32), 3
        warps = 8 if wide > 128 else 4
    heads = min(group, most)
    tokens = max(1, min(rows_per_request, most // heads))
    block_m = max(MIN_ROWS, ceil_power(heads * tokens))
    return TileShape(heads, tokens, block_m, block_n, block_d, block_rest, block_v, warps, stages)


def split_dim(dim: int) -> tuple[int, int]:
    """A dimension as a power of two and a padded rest: 576 is (512, 64), 96 (64, 32), 128 (128, 0).

    Small ones are padded as a whole, to at least 16, the least depth of a tensor-core product.
    """
    if dim <= 16 or dim == ceil_power(dim):
        return max(16, ceil_power(dim)), 0
    first = ceil_power(dim) // 2
    rest = max(16, ceil_power(dim - first))
    return (2 * first, 0) if rest >= first else (first, rest)


def split_count(programs: int, max_keys: int, processors: int) -> int:
    """Into how many parts the keys are split, so that few rows occupy a whole device.

    Args:
        programs: Programs without a split.
        max_keys: Most keys that a row may see, an upper bound.
        processors: Multiprocessors of the device.
    """
    wanted = ceil_div(PROGRAMS_PER_PROCESSOR * processors, max(1, programs))
    return max(1, min(wanted, max_keys // MIN_SPLIT_KEYS, MAX_SPLITS))


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def ceil_power(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()

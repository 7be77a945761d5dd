"""A cache of one long context, in consecutive or in shuffled blocks, and a plain read of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from benchmarks.results import READ
from benchmarks.sites import Contestant
from cplayers import CPMesh, InterleavedLayout, PagedKVCache, Topology
from cplayers.cache import CacheSpec, StepPlan

SEQ = "context"
CHUNK = 8192
"""Tokens that are written at a time."""


def filled(
    spec: CacheSpec,
    layout: InterleavedLayout,
    keys: int,
    mesh: CPMesh | None = None,
    *,
    new: int = 1,
    shuffled: bool = False,
) -> PagedKVCache:
    """A cache of one layer and one sequence of ``keys - new`` tokens; ``new`` more fill it.

    It is no larger than the context, so that its planes are read as a whole by a plain read. With
    ``shuffled`` no two blocks that follow each other in the sequence lie side by side, but by
    chance.
    """
    mesh = mesh or CPMesh(Topology())
    at = {"cp_rank": mesh.rank("dcp"), "pcp_rank": mesh.rank("pcp"), "pcp_size": mesh.size("pcp")}
    cache = PagedKVCache(spec, layout, 1, layout.blocks(keys), **at)
    block = layout.block_size * layout.cp_size  # tokens of a block on all ranks
    holders = _occupy(cache, block) if shuffled else []
    cache.add(SEQ)
    rows, start = Rows(spec), 0
    while start < keys - new:
        if holders and start % block == 0:
            cache.free(holders.pop())
        # The first token is a prompt. The others follow as decode rows do, whole on every rank.
        most = block - start % block if shuffled else CHUNK - start % CHUNK
        count = min(most, keys - new - start) if start else 1
        plan = cache.plan([(SEQ, count)], max_decode_tokens=CHUNK)
        for writes in (plan.decode_writes, *plan.prefill_writes):
            cache.write(plan, 0, writes, *rows(start, count))
        cache.commit(plan)
        start += count
    for holder in holders:
        cache.free(holder)
    return cache


def _occupy(cache: PagedKVCache, block: int) -> list[Hashable]:
    """Take the pool with sequences of a block each, in random order: one to free at a time."""
    holders: list[Hashable] = [("holder", i) for i in range(cache.pool.num_blocks)]
    for holder in holders:
        cache.add(holder)
    for first in range(0, len(holders), CHUNK):
        cache.commit(cache.plan([(holder, block) for holder in holders[first : first + CHUNK]]))
    random.Random(1).shuffle(holders)
    return holders


class Rows:
    """Rows of a context by position: random, and alike wherever they are made."""

    def __init__(self, spec: CacheSpec) -> None:
        generator = torch.Generator().manual_seed(2)
        self._base = [
            torch.randn(CHUNK, plane.heads, plane.dim, generator=generator) for plane in spec.planes
        ]

    def __call__(self, first: int, count: int) -> list[Tensor]:
        """Rows ``first..first + count - 1`` of each plane, within one chunk."""
        chunk, start = divmod(first, CHUNK)
        # Each chunk differs from the others: by its scale, which is cheaper than new random rows.
        scale = 0.5 + (chunk * 0.618034) % 1.0
        return [base[start : start + count] * scale for base in self._base]


def planes(cache: PagedKVCache) -> list[Tensor]:
    """All slots of the layer in place, `[heads, slots, dim]` a plane, contiguous."""
    slots = cache.pool.num_blocks * cache.layout.block_size
    return [plane.transpose(0, 1) for plane in cache.view(0, 0, slots)]


def one_token(cache: PagedKVCache) -> StepPlan:
    """The plan of the context's last token."""
    return cache.plan([(SEQ, 1)])


def reads(tensors: list[Tensor]) -> dict[str, Contestant]:
    """Several reductions over contiguous tensors; the fastest of them is the limit.

    Which is fastest depends on the machine: some are vectorised better, some use more threads.
    """

    def over(reduce: Callable[[Tensor], object]) -> Callable[[], object]:
        return lambda: [reduce(tensor) for tensor in tensors]

    width = {tensor.shape[-1]: torch.ones(tensor.shape[-1]) for tensor in tensors}

    def by_ones(tensor: Tensor) -> Tensor:
        return tensor.view(-1, tensor.shape[-1]) @ width[tensor.shape[-1]]

    def as_integers(tensor: Tensor) -> Tensor:
        return tensor.view(torch.int64).sum()

    return {
        f"{READ}, sum": Contestant(over(torch.sum)),
        f"{READ}, largest": Contestant(over(torch.max)),
        f"{READ}, times ones": Contestant(over(by_ones)),
        f"{READ}, sum as int64": Contestant(over(as_integers)),
    }

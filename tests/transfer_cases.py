"""Groups of caches for tests of transfer: filled with values that tell where they belong."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cplayers.cache import BlockShard, GQASpec, InterleavedLayout, MLASpec, PagedKVCache

LAYERS = 2
LATENT = 5, 2  # of MLA
HEAD_DIM = 3
SALT = 0.5


@dataclass(frozen=True)
class Side:
    """A group of ranks that hold sequences together.

    Attributes:
        layout: cp_size, interleave_size, block_size.
        tp: Runs into which the KV heads of the model are cut; each is held by cp_size ranks.
        copies: Ranks that hold the same, as over PCP.
        model_heads: KV heads of the model; 0 for latent attention.
    """

    layout: tuple[int, int, int]
    tp: int = 1
    copies: int = 1
    model_heads: int = 2

    @property
    def ranks(self) -> int:
        return self.layout[0] * self.tp * self.copies

    def place(self, rank: int) -> tuple[int, int]:
        """Context rank and first KV head."""
        heads = max(1, self.model_heads) // self.tp
        return rank % self.layout[0], rank // self.layout[0] % self.tp * heads

    def heads(self, rank: int) -> range:
        first = self.place(rank)[1]
        return range(first, first + max(1, self.model_heads) // self.tp)

    def cache(self, rank: int, num_blocks: int, dtype=torch.float64) -> PagedKVCache:
        spec = MLASpec(*LATENT)
        if self.model_heads:
            spec = GQASpec(self.model_heads // self.tp, HEAD_DIM)
        return PagedKVCache(
            spec, InterleavedLayout(*self.layout), LAYERS, num_blocks, self.place(rank)[0], dtype
        )


class Value(NamedTuple):
    """Where a stored number belongs."""

    plane: int
    position: int
    layer: int
    head: int
    dim: int

    def number(self) -> float:
        """Small enough for float64 to be exact; the sequence's salt is added to it."""
        place = (self.position * LAYERS + self.layer) * 8 + self.head
        return float((place * 16 + self.dim) * 2 + self.plane)


def fill(cache: PagedKVCache, side: Side, rank: int, seq: str, new: int, salt: float) -> None:
    """Compute ``new`` tokens of ``seq``; all copies and ranks do this alike."""
    start = cache.length(seq)
    plan = cache.plan([(seq, new)], max_decode_tokens=0)
    for layer in range(LAYERS):
        planes = []
        for index, plane in enumerate(cache.spec.planes):
            rows = [
                [
                    [
                        Value(index, start + t, layer, head, dim).number() + salt
                        for dim in range(plane.dim)
                    ]
                    for head in side.heads(rank)
                ]
                for t in range(new)
            ]
            planes.append(
                torch.tensor(rows, dtype=torch.float64).reshape(new, plane.heads, plane.dim)
            )
        for writes in plan.prefill_writes:
            cache.write(plan, layer, writes, *planes)
    cache.commit(plan)


def check(cache: PagedKVCache, side: Side, rank: int, seq: str, oldest: int, salt: float) -> int:
    """Every token from ``oldest`` on is where plain counting says; returns how many are here."""
    table, (_, interleave, block_size) = cache.block_table(seq), side.layout
    local = found = 0
    for position in range(cache.length(seq)):
        if position // interleave % side.layout[0] != side.place(rank)[0]:
            continue
        block, offset = divmod(local, block_size)
        local += 1
        if position < oldest:
            continue
        found += 1
        for layer in range(LAYERS):
            stored = cache.view(layer, table[block] * block_size + offset, 1)
            for index, (plane, values) in enumerate(zip(cache.spec.planes, stored, strict=True)):
                expected = [
                    Value(index, position, layer, head, dim).number() + salt
                    for head in side.heads(rank)
                    for dim in range(plane.dim)
                ]
                assert values.flatten().tolist() == expected, (seq, rank, position, layer, index)
    return found


def snapshot(cache: PagedKVCache) -> object:
    """Everything that a refused import must leave alone."""
    pool = cache.pool
    return (
        cache.seqs,
        [(seq, cache.length(seq), cache.block_table(seq)) for seq in cache.seqs],
        bytes(pool._state),
        list(pool._refs),
        dict(pool._units),
        list(pool._reusable),
        [plane.clone() for layer in cache.storage._layers for plane in layer],
    )


def same(before: object, after: object) -> bool:
    *facts, planes = before
    *now, stores = after
    return facts == now and all(torch.equal(a, b) for a, b in zip(planes, stores, strict=True))


class Case(NamedTuple):
    """A drawn pair of sides and a sequence."""

    source: Side
    target: Side
    length: int
    oldest: int


def draw(seed: int, most_ranks: int = 9, most_tokens: int = 90) -> Case:
    """A pair of sides of one model, with at most ``most_ranks`` ranks each."""
    rng = random.Random(seed)
    model_heads = rng.choice([0, 1, 2, 4])

    def side() -> Side:
        while True:
            tp = rng.choice([n for n in (1, 2, 4) if max(1, model_heads) % n == 0])
            made = Side(
                (rng.randint(1, 5), rng.choice([1, 2, 3, 4, 7]), rng.choice([1, 2, 3, 4, 8])),
                tp,
                rng.choice([1, 1, 2]),
                model_heads,
            )
            if made.ranks <= most_ranks:
                return made

    length = rng.choice([0, 1, rng.randint(2, 12), rng.randint(1, most_tokens)])
    oldest = rng.choice([0, 0, rng.randint(0, length)])
    return Case(side(), side(), length, oldest)


def group(side: Side, num_blocks: int = 120) -> list[PagedKVCache]:
    """The caches of a side, one per rank."""
    return [side.cache(rank, num_blocks) for rank in range(side.ranks)]


def exported(
    case: Case, tokens: list[int] | None = None, model_heads: int | None = None
) -> list[BlockShard]:
    """The shards of a sequence that was computed in two steps, and partly forgotten."""
    shards = []
    for rank, cache in enumerate(group(case.source)):
        cache.add("other")
        fill(cache, case.source, rank, "other", 7, 9.0)  # so that blocks do not begin at 0
        cache.add("a", tokens)
        fill(cache, case.source, rank, "a", case.length // 2, SALT)
        fill(cache, case.source, rank, "a", case.length - case.length // 2, SALT)
        cache.forget("a", case.oldest)
        first_head = case.source.place(rank)[1]
        shards.append(cache.export_blocks("a", first_head=first_head, model_heads=model_heads))
    return shards

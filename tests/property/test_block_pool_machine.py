"""The paged cache as a state machine, on all ranks of a group, against lists of tokens.

A token's identity is what the cache stores for it, so that whatever a plan lets a row see can be
told from what it should see.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from cplayers.cache import GQASpec, InterleavedLayout, PagedKVCache, StepPlan
from cplayers.cache.blocks import FREE, REUSABLE, USED
from cplayers.cache.context import Context, Piece
from cplayers.cache.reads import Read
from cplayers.errors import CacheFullError, ConfigError, StateError
from cplayers.ops import PagedKeys

NUM_BLOCKS = 10
MOST_SEQUENCES = 6
RANDOMS = st.randoms(use_true_random=False)


@dataclass
class Model:
    """What a sequence holds, and what of its prompt is announced and still to come."""

    tokens: list[int]
    announced: list[int] = field(default_factory=list)
    oldest: int = 0  # tokens before this position were forgotten

    def visible(self, position: int, window: int | None) -> list[int]:
        first = 0 if window is None else max(0, position + 1 - window)
        return self.tokens[first : position + 1]


class CacheMachine(RuleBasedStateMachine):
    """Adds, steps that count or fail, forks, cuts, forgets and frees sequences, evicts content."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[int, Model] = {}
        self.names = 0
        self.fresh_token = 10_000

    @initialize(
        pcp=st.integers(1, 3),
        places=st.integers(0, 2),
        interleave=st.integers(1, 5),
        block=st.sampled_from([1, 2, 3]),
    )
    def build(self, pcp: int, places: int, interleave: int, block: int) -> None:
        """``places`` of the TP axis share the cache with the PCP ranks; 0: dcp = 1."""
        self.pcp, self.size = pcp, max(1, pcp * places)
        self.layout = InterleavedLayout(self.size, interleave, block)
        self.ranks = (
            [(cp, cp % pcp) for cp in range(self.size)]
            if places
            else [(0, rank) for rank in range(pcp)]
        )
        self.caches = [
            PagedKVCache(
                GQASpec(1, 1),
                self.layout,
                1,
                NUM_BLOCKS,
                cp,
                torch.float64,
                pcp_rank=rank,
                pcp_size=pcp,
            )
            for cp, rank in self.ranks
        ]
        for cache in self.caches:
            for plane in cache.view(0, 0, NUM_BLOCKS * block):
                plane.fill_(math.nan)

    def alike(self, results: list[object]) -> object:
        assert all(result == results[0] for result in results)
        return results[0]

    def name(self) -> int:
        self.names += 1
        return self.names

    @precondition(lambda self: len(self.models) < MOST_SEQUENCES)
    @rule()
    def add(self) -> None:
        name = self.name()
        self.alike([cache.add(name) for cache in self.caches])
        self.models[name] = Model([])

    @precondition(lambda self: len(self.models) < MOST_SEQUENCES)
    @rule(
        variant=st.integers(0, 2),
        split=st.integers(0, 30),
        length=st.integers(1, 36),
        whole=st.booleans(),
    )
    def add_prompt(self, variant: int, split: int, length: int, whole: bool) -> None:
        """Prompts agree below their smaller split, and all along if of one variant.

        They are computed at once, or in later steps.
        """
        prompt = [i if i < split else 100 * variant + i for i in range(length)]
        name = self.name()
        matched = self.alike([cache.add(name, prompt) for cache in self.caches])
        assert isinstance(matched, int)
        assert matched < length
        assert matched % self.layout.unit_tokens == 0
        # That the tokens agree is seen by `content_is_the_models`.
        self.models[name] = Model(prompt[:matched], prompt[matched:])
        if whole:
            self.take([(name, length - matched)], "commit", split, 2, None, 6)

    @precondition(lambda self: self.models)
    @rule(
        rng=RANDOMS,
        fate=st.sampled_from(["commit", "commit", "commit", "fail", "replan"]),
        seed=st.integers(0, 99),
        most=st.sampled_from([16, 0, 2]),
        window=st.none() | st.integers(1, 20),
        workspace=st.sampled_from([100, 1, 6]),
    )
    def step(
        self,
        rng: random.Random,
        fate: str,
        seed: int,
        most: int,
        window: int | None,
        workspace: int,
    ) -> None:
        names = rng.sample(sorted(self.models), rng.randint(1, min(3, len(self.models))))
        requests = [(name, rng.randint(0, 12)) for name in names]
        self.take(requests, fate, seed, most, window, workspace)

    def take(
        self,
        requests: list[tuple[int, int]],
        fate: str,
        seed: int,
        most: int,
        window: int | None,
        workspace: int,
    ) -> None:
        needed = self.alike([cache.blocks_for(requests) for cache in self.caches])
        available = self.caches[0].pool.num_available
        assert isinstance(needed, int)
        if needed > available:
            for cache in self.caches:
                with pytest.raises(CacheFullError):
                    cache.plan(requests)
            return
        tokens = {name: self.next_tokens(name, new) for name, new in requests}
        packed = [token for name, _ in requests for token in tokens[name]]
        plans = self.plans(requests, most)
        if fate != "commit":  # each rank fails before or after it has written
            skip = random.Random(seed)
            self.write(plans, packed, exchange=seed % 2 == 0, skipped=lambda: skip.random() < 0.5)
            if fate == "fail":
                return
            plans = self.plans(requests, most)
        self.write(plans, packed, exchange=seed % 2 == 0)
        for name, new in requests:
            model = self.models[name]
            model.tokens += tokens[name]
            del model.announced[:new]
        self.check_answers(plans, requests, most, window, workspace)
        for cache, plan in zip(self.caches, plans, strict=True):
            cache.commit(plan)
            assert available - cache.pool.num_available <= needed

    def plans(self, requests: list[tuple[int, int]], most: int) -> list[StepPlan]:
        return [cache.plan(requests, max_decode_tokens=most) for cache in self.caches]

    def next_tokens(self, name: int, count: int) -> list[int]:
        tokens = self.models[name].announced[:count]
        while len(tokens) < count:
            self.fresh_token += 1
            tokens.append(self.fresh_token)
        return tokens

    def write(
        self,
        plans: list[StepPlan],
        packed: list[int],
        exchange: bool,
        skipped: Callable[[], bool] = lambda: False,
    ) -> None:
        """New keys go to their owners by the exchange over PCP, or all ranks gather them."""
        k = torch.tensor(packed, dtype=torch.float64).reshape(-1, 1, 1)
        pieces = [k[plan.tokens[plan.num_decode :]] for plan in plans]
        for i, (cache, plan) in enumerate(zip(self.caches, plans, strict=True)):
            if skipped():
                continue
            decode = k[plan.tokens[: plan.num_decode]]
            cache.write(plan, 0, plan.decode_writes, decode, -decode)
            if plan.prefill is None:
                continue
            first = i - i % self.pcp
            neighbours = range(first, first + self.pcp)
            if exchange and self.size > 1:
                rows = [self.sent(plans[j], pieces[j], i - first) for j in neighbours]
                arrived = torch.cat(rows)
                cache.write(plan, 0, plan.prefill.exchange.writes, arrived, -arrived)
                continue
            for j, writes in zip(neighbours, plan.prefill_writes, strict=True):
                piece = k.new_full((plan.prefill.width, 1, 1), math.nan)
                piece[: len(pieces[j])] = pieces[j]
                cache.write(plan, 0, writes, piece, -piece)

    def sent(self, plan: StepPlan, piece: Tensor, target: int) -> Tensor:
        """What a rank sends to one of its PCP neighbours."""
        assert plan.prefill is not None
        rows = plan.prefill.exchange.send[target]
        return piece[rows] if len(piece) else piece.new_full((len(rows), 1, 1), math.nan)

    def check_answers(
        self,
        plans: list[StepPlan],
        requests: list[tuple[int, int]],
        most: int,
        window: int | None,
        workspace: int,
    ) -> None:
        """What each row sees through every way of reading is what its sequence holds."""
        rows: dict[bool, dict[int, tuple[int, int]]] = {True: {}, False: {}}
        gone: set[bool] = set()  # whether a row of either kind sees forgotten tokens
        cached, token = {}, 0
        for name, new in requests:
            model = self.models[name]
            cached[name] = len(model.tokens) - new
            decoding = cached[name] > 0 and new <= most
            first = 0 if window is None else max(0, cached[name] + 1 - window)
            if new and first < model.oldest:
                gone.add(decoding)
            for position in range(cached[name], cached[name] + new):
                rows[decoding][token] = name, position
                token += 1
        for decoding, queries in rows.items():
            if not decoding and plans[0].prefill is None:
                assert not queries
            elif decoding in gone:
                for plan in plans:
                    with pytest.raises(StateError, match="were forgotten"):
                        self.reads(plan, decoding, window)
                    with pytest.raises(StateError, match="were forgotten"):
                        self.context(plan, decoding).pieces(workspace, window)
            else:
                seen = {
                    token: self.models[name].visible(position, window)
                    for token, (name, position) in queries.items()
                }
                self.check_reads(plans, decoding, window, [sorted(s) for s in seen.values()])
                if not decoding:  # new keys of chunks do not come from the cache
                    for token, (name, position) in queries.items():
                        del seen[token][-(position + 1 - cached[name]) :]
                wanted = {token: sorted(s) for token, s in seen.items()}
                self.check_context(plans, decoding, window, workspace, wanted)

    @staticmethod
    def reads(plan: StepPlan, decoding: bool, window: int | None) -> Sequence[Read]:
        if decoding:
            return plan.reads(window)
        assert plan.prefill is not None
        return plan.prefill.reads(window)

    @staticmethod
    def context(plan: StepPlan, decoding: bool) -> Context:
        if decoding:
            return plan.decode_context
        assert plan.prefill is not None
        return plan.prefill.context

    def check_reads(
        self, plans: list[StepPlan], decoding: bool, window: int | None, wanted: list[list[int]]
    ) -> None:
        """Rows that come to the keys see all of them, each on one DCP rank."""
        found: list[list[list[int]]] = []
        for cache, plan in zip(self.caches, plans, strict=True):
            seen: list[list[int]] = [[] for _ in wanted]
            for read in self.reads(plan, decoding, window):
                keys, values = (
                    p.flatten() for p in cache.storage.read(0, read, cache.layout.block_size)
                )
                assert keys.equal(-values)
                for i, (lo, hi) in enumerate(zip(read.lo.tolist(), read.hi.tolist(), strict=True)):
                    seen[read.row0 + i] += keys[lo:hi].tolist()
            found.append(seen)
            part = plan if decoding else plan.prefill
            assert part is not None
            assert self.looked_up(cache, part.paged(window)) == seen
        if self.size == 1:  # every PCP rank has all keys
            assert all([sorted(row) for row in seen] == wanted for seen in found)
        else:
            joined = [sorted(chain.from_iterable(parts)) for parts in zip(*found, strict=True)]
            assert joined == wanted

    @staticmethod
    def looked_up(cache: PagedKVCache, keys: PagedKeys) -> list[list[int]]:
        """The same keys by way of the block tables."""
        stored, size = cache.storage.stores(0)[0].flatten(), keys.block_size
        seen = []
        for request, lo, hi in zip(keys.request, keys.lo.tolist(), keys.hi.tolist(), strict=True):
            at = torch.arange(lo, hi)
            slots = keys.block_table[request].long()[at // size] * size + at % size
            seen.append(stored[slots].tolist())
        return seen

    def check_context(
        self,
        plans: list[StepPlan],
        decoding: bool,
        window: int | None,
        workspace: int,
        wanted: dict[int, list[int]],
    ) -> None:
        """Keys that come to the rows of a rank, put in order, or one rank's after another's."""
        by_rank = [self.context(plan, decoding).pieces(workspace, window) for plan in plans]
        self.alike([[piece.width for piece in pieces] for pieces in by_rank])
        members = len(plans) if self.size > 1 else 1
        ordered: list[dict[int, list[int]]] = [{} for _ in plans]
        in_parts: list[dict[int, list[int]]] = [{} for _ in plans]
        for number in range(len(by_rank[0])):
            for i, plan in enumerate(plans):
                group = range(members) if self.size > 1 else [i]
                parts = [self.part(self.caches[j], by_rank[j][number]) for j in group]
                piece, gathered = by_rank[i][number], torch.cat(parts)
                rows = plan.tokens.tolist()
                rows = rows[: plan.num_decode] if decoding else rows[plan.num_decode :]
                keys = gathered[piece.order]
                for row, lo, hi in zip(rows, piece.lo.tolist(), piece.hi.tolist(), strict=True):
                    ordered[i].setdefault(row, []).extend(keys[lo:hi].tolist())
                for part, shard in zip(parts, piece.shards, strict=True):
                    for row, lo, hi in zip(rows, shard.lo.tolist(), shard.hi.tolist(), strict=True):
                        in_parts[i].setdefault(row, []).extend(part[lo:hi].tolist())
        for i, plan in enumerate(plans):
            rows = plan.tokens.tolist()
            rows = rows[: plan.num_decode] if decoding else rows[plan.num_decode :]
            for row in rows:
                assert sorted(ordered[i].get(row, [])) == wanted[row]
                assert sorted(in_parts[i].get(row, [])) == wanted[row]

    @staticmethod
    def part(cache: PagedKVCache, piece: Piece) -> Tensor:
        """A rank's keys of a piece, NaN in the padding."""
        rows = torch.full((piece.width,), math.nan, dtype=torch.float64)
        for slot, length, row in piece.reads:
            rows[row : row + length] = cache.view(0, slot, length)[0].flatten()
        return rows

    @precondition(lambda self: 0 < len(self.models) < MOST_SEQUENCES)
    @rule(rng=RANDOMS)
    def fork(self, rng: random.Random) -> None:
        source, name = rng.choice(sorted(self.models)), self.name()
        for cache in self.caches:
            cache.fork(source, name)
        model = self.models[source]
        self.models[name] = Model(list(model.tokens), oldest=model.oldest)

    @precondition(lambda self: self.models)
    @rule(rng=RANDOMS)
    def free(self, rng: random.Random) -> None:
        name = rng.choice(sorted(self.models))
        for cache in self.caches:
            cache.free(name)
        del self.models[name]

    @precondition(lambda self: self.models)
    @rule(rng=RANDOMS)
    def truncate(self, rng: random.Random) -> None:
        name = rng.choice(sorted(self.models))
        model = self.models[name]
        length = rng.randint(0, len(model.tokens))
        for cache in self.caches:
            if length < model.oldest:
                with pytest.raises(ConfigError, match="were forgotten"):
                    cache.truncate(name, length)
            else:
                cache.truncate(name, length)
        if length < model.oldest:
            return
        if length < len(model.tokens):
            del model.tokens[length:]
            model.announced = []

    @precondition(lambda self: self.models)
    @rule(rng=RANDOMS)
    def forget(self, rng: random.Random) -> None:
        name = rng.choice(sorted(self.models))
        model = self.models[name]
        position = rng.randint(0, len(model.tokens) + 2)
        held = sum(block >= 0 for block in self.caches[0].block_table(name))
        for cache in self.caches:
            cache.forget(name, position)
        model.oldest = max(model.oldest, min(position, len(model.tokens)))
        left = sum(block >= 0 for block in self.caches[0].block_table(name))
        assert left <= held

    @rule()
    def evict(self) -> None:
        """Somebody else needs all blocks, for a while."""
        for cache in self.caches:
            cache.pool.release(cache.pool.allocate(cache.pool.num_available))
            assert not cache.pool._reusable

    @invariant()
    def content_is_the_models(self) -> None:
        """Every rank holds its own tokens of every sequence, from the oldest on."""
        if not self.models:
            return
        size, every = self.layout.block_size, self.layout.interleave_size
        for (rank, _), cache in zip(self.ranks, self.caches, strict=True):
            keys, values = (plane.flatten() for plane in cache.view(0, 0, NUM_BLOCKS * size))
            for name, model in self.models.items():
                assert cache.length(name) == len(model.tokens)
                table = cache.block_table(name)
                own = [
                    (position, token)
                    for position, token in enumerate(model.tokens)
                    if position // every % self.layout.cp_size == rank
                ]
                kept = [(i, t) for i, (position, t) in enumerate(own) if position >= model.oldest]
                assert all(table[i // size] >= 0 for i, _ in kept)
                slots = [table[i // size] * size + i % size for i, _ in kept]
                assert keys[slots].tolist() == [token for _, token in kept]
                assert (-values[slots]).tolist() == [token for _, token in kept]

    @invariant()
    def blocks_are_counted(self) -> None:
        """References are those of the block tables, and no table has a block too many."""
        if not hasattr(self, "caches"):
            return
        for cache in self.caches:
            pool = cache.pool
            refs = [0] * NUM_BLOCKS
            for name, model in self.models.items():
                table = cache.block_table(name)
                held = [block for block in table if block >= 0]
                assert len(table) == self.layout.blocks(len(model.tokens))
                assert len(held) == len(set(held))
                assert held == list(table[len(table) - len(held) :]), "only the front is gone"
                assert len(table) - len(held) == self.whole_blocks_before(model.oldest)
                for block in held:
                    refs[block] += 1
            assert [pool.refs(block) for block in range(NUM_BLOCKS)] == refs
            used = sum(count > 0 for count in refs)
            assert (pool.num_used, pool.num_available) == (used, NUM_BLOCKS - used)
            assert cache.seqs == tuple(self.models)

    def whole_blocks_before(self, position: int) -> int:
        """Blocks that are full on every rank once ``position`` tokens were dealt."""
        every, ranks = self.layout.interleave_size, self.layout.cp_size
        dealt = [p // every % ranks for p in range(position)]
        return min(dealt.count(rank) // self.layout.block_size for rank in range(ranks))

    @invariant()
    def ranks_are_alike(self) -> None:
        """All pools are in the same state, which agrees with itself."""
        if not hasattr(self, "caches"):
            return
        pools = [cache.pool for cache in self.caches]
        self.alike([[cache.block_table(name) for name in self.models] for cache in self.caches])
        self.alike([(p._state, p._refs, list(p._reusable), p._units, p._hash_of) for p in pools])
        self.alike([pool.stats for pool in pools])
        pool = pools[0]
        for block, state in enumerate(pool._state):
            expected = USED if pool.refs(block) else REUSABLE if pool.is_hashed(block) else FREE
            assert state == expected
        assert set(pool._reusable) == {b for b, s in enumerate(pool._state) if s == REUSABLE}
        assert pool._hash_of == {b: h for h, unit in pool._units.items() for b in unit}


CacheMachine.TestCase.settings = settings(deadline=None)
TestCacheMachine = CacheMachine.TestCase

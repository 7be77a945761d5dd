"""The paged cache as a state machine, on all ranks of a group, against lists of tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cplayers.cache import GQASpec, InterleavedLayout, PagedKVCache, StepPlan
from cplayers.cache.blocks import FREE, REUSABLE, USED
from cplayers.errors import CacheFullError

NUM_BLOCKS = 10


@dataclass
class Model:
    """What a sequence holds, and what of its prompt is announced and still to come."""

    tokens: list[int]
    announced: list[int] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Adds, steps that count or fail, forks, cuts and frees sequences, alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[int, Model] = {}
        self.names = 0
        self.fresh_token = 10_000

    @initialize(
        ranks=st.integers(1, 3), interleave=st.integers(1, 5), block=st.sampled_from([1, 2, 3])
    )
    def build(self, ranks: int, interleave: int, block: int) -> None:
        self.layout = InterleavedLayout(ranks, interleave, block)
        self.caches = [
            PagedKVCache(GQASpec(1, 1), self.layout, 1, NUM_BLOCKS, rank, torch.float64)
            for rank in range(ranks)
        ]

    def alike(self, results: list[object]) -> object:
        assert all(result == results[0] for result in results)
        return results[0]

    def name(self) -> int:
        self.names += 1
        return self.names

    @rule()
    def add(self) -> None:
        name = self.name()
        self.alike([cache.add(name) for cache in self.caches])
        self.models[name] = Model([])

    @rule(variant=st.integers(0, 2), split=st.integers(0, 30), length=st.integers(1, 36))
    def add_prompt(self, variant: int, split: int, length: int) -> None:
        """Prompts agree below their smaller split, and all along if of one variant."""
        prompt = [i if i < split else 100 * variant + i for i in range(length)]
        name = self.name()
        matched = self.alike([cache.add(name, prompt) for cache in self.caches])
        assert isinstance(matched, int)
        assert matched < length
        assert matched % self.layout.unit_tokens == 0
        # That the tokens agree is seen by `content_is_the_models`.
        self.models[name] = Model(prompt[:matched], prompt[matched:])

    @precondition(lambda self: self.models)
    @rule(
        data=st.data(),
        fate=st.sampled_from(["commit", "commit", "commit", "fail", "replan"]),
        seed=st.integers(0, 99),
    )
    def step(self, data: st.DataObject, fate: str, seed: int) -> None:
        names = data.draw(
            st.lists(st.sampled_from(sorted(self.models)), min_size=1, max_size=3, unique=True)
        )
        requests = [(name, data.draw(st.integers(0, 12))) for name in names]
        needed = self.alike([cache.blocks_for(requests) for cache in self.caches])
        available = self.caches[0].pool.num_available
        assert isinstance(needed, int)
        if needed > available:
            for cache in self.caches:
                with pytest.raises(CacheFullError):
                    cache.plan(requests)
            return
        tokens = {name: self.next_tokens(name, new) for name, new in requests}
        plans = [cache.plan(requests) for cache in self.caches]
        packed = [token for name, _ in requests for token in tokens[name]]
        if fate != "commit":  # each rank fails before or after it has written
            rng = random.Random(seed)
            for cache, plan in zip(self.caches, plans, strict=True):
                if rng.random() < 0.5:
                    self.write(cache, plan, packed)
            if fate == "fail":
                return
            plans = [cache.plan(requests) for cache in self.caches]
        for cache, plan in zip(self.caches, plans, strict=True):
            self.write(cache, plan, packed)
            cache.commit(plan)
            assert available - cache.pool.num_available <= needed
        for name, new in requests:
            model = self.models[name]
            model.tokens += tokens[name]
            del model.announced[:new]

    def next_tokens(self, name: int, count: int) -> list[int]:
        tokens = self.models[name].announced[:count]
        while len(tokens) < count:
            self.fresh_token += 1
            tokens.append(self.fresh_token)
        return tokens

    def write(self, cache: PagedKVCache, plan: StepPlan, packed: list[int]) -> None:
        k = torch.tensor(packed, dtype=torch.float64).reshape(-1, 1, 1)[plan.tokens]
        decode, prompt = k[: plan.num_decode], k[plan.num_decode :]
        cache.write(plan, 0, plan.decode_writes, decode, -decode)
        for writes in plan.prefill_writes:
            cache.write(plan, 0, writes, prompt, -prompt)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source, name = data.draw(st.sampled_from(sorted(self.models))), self.name()
        for cache in self.caches:
            cache.fork(source, name)
        self.models[name] = Model(list(self.models[source].tokens))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.models)))
        for cache in self.caches:
            cache.free(name)
        del self.models[name]

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.models)))
        model = self.models[name]
        length = data.draw(st.integers(0, len(model.tokens)))
        for cache in self.caches:
            cache.truncate(name, length)
        if length < len(model.tokens):
            del model.tokens[length:]
            model.announced = []

    @invariant()
    def content_is_the_models(self) -> None:
        """Every rank reads back its own tokens of every sequence."""
        if not self.models:
            return
        size = self.layout.block_size
        for rank, cache in enumerate(self.caches):
            keys, values = (plane.flatten() for plane in cache.view(0, 0, NUM_BLOCKS * size))
            for name, model in self.models.items():
                assert cache.length(name) == len(model.tokens)
                table = cache.block_table(name)
                own = [
                    token
                    for position, token in enumerate(model.tokens)
                    if position // self.layout.interleave_size % self.layout.cp_size == rank
                ]
                slots = [table[i // size] * size + i % size for i in range(len(own))]
                assert keys[slots].tolist() == own
                assert (-values[slots]).tolist() == own

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
                assert len(table) == self.layout.blocks(len(model.tokens)) == len(set(table))
                for block in table:
                    refs[block] += 1
            assert [pool.refs(block) for block in range(NUM_BLOCKS)] == refs
            used = sum(count > 0 for count in refs)
            assert (pool.num_used, pool.num_available) == (used, NUM_BLOCKS - used)
            assert cache.seqs == tuple(self.models)

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

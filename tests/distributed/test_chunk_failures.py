"""A step with chunks that fails in the middle changes nothing, and can be repeated.

Two layers share a cache. The step fails in every module of either layer, before every collective,
and while keys go round the ring, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import attention_cases as plain
import mla_cases as latent
import pytest
from attention_cases import check_close
from test_gqa_layer import Fault, committed_is_kept, fail
from torch import Tensor, nn, no_grad

from cplayers.attention import gather_rows
from cplayers.mesh import Ring, Topology

Setup = plain.Setup | latent.Setup
Place = tuple[str, int]
COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "shift")
SPREAD = {"interleave": 2, "max_decode_tokens": 2, "workspace_tokens": 8}
PROMPT = range(60)
BEFORE = (("a", 21), ("b", 2))
STEP = (("a", 9), ("new", 5), ("c", 7), ("b", 1))
AFTER = (("c", 1), ("a", 9), ("new", 2))


class Model:
    """Two layers on one cache; the second reads what the first gives."""

    def __init__(self, setup: Setup) -> None:
        module: Any = latent if isinstance(setup, latent.Setup) else plain
        self.live = latent.poisoned(module.build(setup))
        second = replace(setup, layer_idx=1)
        self.layers = [self.live.layer, module.build_layer(second, self.live.mesh)]

    def forward(self, requests: tuple[tuple[str, int], ...], *, commit: bool) -> Tensor:
        live = self.live
        plan = live.plan(requests)
        x, angles = live.inputs(plan)
        with no_grad():
            for layer in self.layers:
                x = x + layer(x, angles, live.cache, plan)
        if not commit:
            return x
        live.cache.commit(plan)
        live.steps += 1
        return gather_rows(x, plan, live.mesh)

    def modules(self) -> list[nn.Module]:
        return [
            m for layer in self.layers for _, m in layer.named_children() if list(m.parameters())
        ]

    def state(self) -> dict[str, Any]:
        """All that a step may change when it counts."""
        cache, pool = self.live.cache, self.live.cache.pool
        sequences = {
            seq: (cache.length(seq), cache.block_table(seq), [*cache._sequences.get(seq).hashes])
            for seq in cache.seqs
        }
        blocks = [*pool._refs], bytes(pool._state), dict(pool._units), dict(pool._hash_of)
        return {"sequences": sequences, "blocks": blocks, "used": pool.num_used}

    def stored(self) -> list[Tensor]:
        """What the cache holds, 7 in slots not written yet."""
        cache = self.live.cache
        slots = cache.pool.num_blocks * cache.layout.block_size
        return [p.nan_to_num(7.0) for layer in (0, 1) for p in cache.view(layer, 0, slots)]


@contextmanager
def failing(target: Any, names: tuple[str, ...], number: int) -> Iterator[list[int]]:
    """Raise at the n-th call of any of the methods; gives the number of calls."""
    calls = [0]

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if calls[0] == number:
                raise Fault("a layer fails")
            calls[0] += 1
            return real(*args, **kwargs)

        return call

    real = {name: getattr(target, name) for name in names}
    for name in names:
        setattr(target, name, watched(real[name]))
    try:
        yield calls
    finally:
        for name in names:
            if isinstance(target, type):
                setattr(target, name, real[name])
            else:
                delattr(target, name)


@contextmanager
def fault_at(model: Model, place: Place) -> Iterator[None]:
    kind, number = place
    if kind == "module":
        hook = model.modules()[number].register_forward_pre_hook(fail)
        yield
        hook.remove()
    elif kind == "collective":
        with failing(model.live.mesh, COLLECTIVES, number):
            yield
    else:  # the next keys are under way
        with failing(Ring, ("wait",), number):
            yield


def places_of(model: Model) -> list[Place]:
    """Where the step may fail."""
    mesh, called = model.live.mesh, set()
    for i, module in enumerate(model.modules()):  # of some, only the weight is used
        module.register_forward_pre_hook(lambda *_, i=i: called.add(i))
    with failing(mesh, COLLECTIVES, -1) as collectives, failing(Ring, ("wait",), -1) as hops:
        model.forward(STEP, commit=False)
    return [
        *(("module", i) for i in sorted(called)),
        *(("collective", i) for i in range(collectives[0])),
        *(("hop", i) for i in range(hops[0])),
    ]


def begun(setup: Setup) -> Model:
    """Content that can be found again, and a fork whose last block is half full."""
    model = Model(setup)
    model.live.cache.add("a", PROMPT)
    model.forward(BEFORE, commit=True)
    model.live.cache.fork("a", "c")
    model.live.cache.add("new")
    return model


def repeat_after_failures(setup: Setup) -> tuple[list[str], list[Place], list[Any], list[Any]]:
    """What failures changed, where they were, and what an unharmed and a harmed model give."""
    unharmed, harmed = begun(setup), begun(setup)
    places, changed = places_of(begun(setup)), []
    for i, place in enumerate(places):
        state, stored = harmed.state(), harmed.stored()
        guard = harmed.live.mesh.guard() if i % 2 else nullcontext()
        with fault_at(harmed, place), pytest.raises(Fault), guard:
            harmed.forward(STEP, commit=False)
        after = harmed.state()
        changed += [f"{name} at {place}" for name in state if state[name] != after[name]]
        if not committed_is_kept(harmed.live, stored, harmed.stored()):
            changed.append(f"content at {place}")
    results = [
        [model.forward(STEP, commit=True), model.forward(AFTER, commit=True), model.state()]
        for model in (unharmed, harmed)
    ]
    return changed, places, *results


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "topology",
    [Topology(tp=4, dcp=4), Topology(tp=2, pcp=2, dcp=4)],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["gather_q", "gather_kv", "ring"])
@pytest.mark.parametrize("kind", ["grouped", "latent"])
def test_a_failed_step_with_chunks_changes_nothing_and_can_be_repeated(
    ranks: Any, topology: Topology, strategy: str, kind: str
) -> None:
    setup: Setup
    if kind == "grouped":
        setup = plain.Setup(topology, 4, 1, window=11, sinks=True, prefill=strategy, **SPREAD)
    else:
        setup = latent.Setup(topology, 4, q_lora_rank=5, prefill=strategy, **SPREAD)
    answers = ranks(9).run(repeat_after_failures, setup, n=topology.world_size)
    for changed, places, unharmed, repeated in answers:
        assert not changed
        assert {"module", "collective"} <= {kind for kind, _ in places}
        assert ("hop" in {kind for kind, _ in places}) == (strategy == "ring")
        assert places == answers[0][1]
        assert unharmed[2] == repeated[2] == answers[0][3][2]
        assert unharmed[2]["blocks"][2], "some content can be found again"
        for got, want, same in zip(repeated[:2], unharmed[:2], answers[0][3][:2], strict=True):
            assert got.equal(want)
            assert got.equal(same)


def test_the_two_layers_are_two_layers_of_dense_attention(ranks: Any) -> None:
    """Or the test above might compare nothing with nothing."""
    setup = plain.Setup(Topology(tp=2, pcp=2, dcp=4), 4, 1, prefill="ring", **SPREAD)
    got = ranks(9).run(one_prompt, setup, n=4)[0]
    dense = plain.Dense(setup)
    x = plain.new_tokens(setup, 0, 30)
    for _ in range(2):
        x = x + dense._attend(x)
    check_close(got, x)


def one_prompt(setup: Setup) -> Tensor:
    return Model(setup).forward((("a", 30),), commit=True)

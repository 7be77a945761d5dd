"""DCPGQAAttention on named cases from the field, and what it does when a step goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import (
    Dense,
    Live,
    Script,
    Setup,
    build,
    check_close,
    check_script,
    new_tokens,
    run_script,
)
from torch import Tensor, nn

from cplayers.attention import DCPGQAAttention, PCPPrefillAttention
from cplayers.cache import InterleavedLayout, PagedKVCache
from cplayers.errors import ConfigError, StateError
from cplayers.mesh import CPMesh, Topology

FOUR = [
    Topology(tp=4, dcp=4),
    Topology(pcp=4),
    Topology(pcp=4, dcp=4),
    Topology(tp=2, pcp=2, dcp=2),
    Topology(tp=2, pcp=2, dcp=4),
]


def prompts(*lengths: int) -> tuple[str, tuple[tuple[str, int], ...]]:
    return "step", tuple(zip("abcdefgh", lengths, strict=False))


# Named cases


def test_context_shorter_than_one_interleave_leaves_ranks_empty(ranks: Any) -> None:
    """vLLM, skip of empty context: N 4, I 16, context 10; ranks 1 to 3 hold nothing. No hang."""
    for topology in (Topology(tp=4, dcp=4), Topology(pcp=4, dcp=4)):
        setup = Setup(topology, 4, 1, interleave=16, block=16)
        check_script(ranks, setup, (prompts(10), prompts(1), prompts(3), prompts(9)))


def visible_keys(setup: Setup) -> list[list[int]]:
    """Per step, how many keys of this rank each decode row sees."""
    live = build(setup)
    seen = []
    for requests in ((("a", 2),), (("a", 4),)):
        plan = live.plan(requests)
        seen.append((plan.spans.hi - plan.spans.lo)[: plan.num_decode].tolist())
        live.forward(plan)
        live.cache.commit(plan)
        live.steps += 1
    return seen


def test_several_new_tokens_over_a_sharded_cache(ranks: Any) -> None:
    """vLLM-Ascend 11492 and 11849: N 2, I 1, length 6 of which 4 are new."""
    setup = Setup(Topology(tp=2, dcp=2), 4, 1, interleave=1)
    seen = ranks(9).run(visible_keys, setup, n=2)
    assert [steps[1] for steps in seen] == [[2, 2, 3, 3], [1, 2, 2, 3]]
    for combine in ("a2a", "ag_rs", "ar"):
        check_script(ranks, replace(setup, combine=combine), (prompts(2), prompts(4), prompts(2)))


@pytest.mark.parametrize("topology", FOUR, ids=str)
def test_one_batch_equals_separate_calls(ranks: Any, topology: Topology) -> None:
    """vLLM 42674 and 48456: new tokens [1, 1, 7] in one batch, over cached context and without."""
    for context in ((5, 3, 11), ()):
        before = (prompts(*context),) if context else ()
        script: Script = (*before, prompts(1, 1, 7))
        batch = check_script(ranks, Setup(topology, 4, 1, interleave=2), script)[-1]
        for index, rows in enumerate(batch.split([1, 1, 7])):
            alone = ranks(9).run(run_one, topology, context, index, n=topology.world_size)[0]
            check_close(alone, rows.double(), batch.abs().max())


def run_one(topology: Topology, context: tuple[int, ...], index: int) -> Tensor:
    """Request ``index`` of the batch of [1, 1, 7] in a step of its own."""
    live = OneOfBatch(**vars(build(Setup(topology, 4, 1, interleave=2))))
    if context:
        live.step(prompts(*context)[1])
    live.rows = slice(*((0, 1), (1, 2), (2, 9))[index])
    return live.step((("abc"[index], (1, 1, 7)[index]),))[0]


class OneOfBatch(Live):
    """Takes the hidden states of some rows of the batch of 9 tokens."""

    rows: slice | None = None

    def inputs(self, plan: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        _, position_embeddings = super().inputs(plan)
        if self.rows is None:
            return super().inputs(plan)
        packed = new_tokens(self.setup, self.steps, 9)[self.rows]
        return packed[plan.tokens].to(self.setup.dtype), position_embeddings


@pytest.mark.parametrize("topology", FOUR, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((1, 2, 3, 30), id="torch-and-lucidrains"),
        pytest.param((7, 7, 18), id="ring-flash-attention-51"),
        pytest.param((2, 0, 2), id="vLLM-Ascend-11807"),
        pytest.param((1, 3, 2), id="vLLM-Ascend-6491"),
    ],
)
def test_packed_lengths(ranks: Any, topology: Topology, lengths: tuple[int, ...]) -> None:
    """As prompts, then as new tokens over cached context."""
    setup = Setup(topology, 4, 1, interleave=3)
    check_script(ranks, setup, (prompts(*lengths), prompts(*lengths[::-1]), prompts(1, 1, 1)))


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_o_proj_after_context_parallelism(ranks: Any, dcp: int) -> None:
    """TensorRT-LLM 10350: TP 2 x CP 2; heads reach the o_proj slice that holds their columns."""
    setup = Setup(Topology(tp=2, pcp=2, dcp=dcp), 8, 1, o_bias=True, bias=True)
    check_script(ranks, setup, (prompts(9, 2), prompts(1, 2), prompts(1, 1)))


def test_32_query_heads_read_2_kv_heads_globally(ranks: Any) -> None:
    """SGLang 34161 and 32858: TP 4, DCP 4 after replicating K/V."""
    setup = Setup(Topology(tp=4, dcp=4), 32, 2, q_proj="tpa")
    check_script(ranks, setup, (prompts(9, 2), prompts(1, 2), prompts(1, 1)))


def test_a_step_of_fewer_tokens_touches_nobody_else(ranks: Any) -> None:
    """vLLM-Ascend 5647: a step of 8 tokens, then one of 3; the others decode on unharmed."""
    setup = Setup(Topology(tp=4, dcp=4), 4, 1, block=2)
    script = (prompts(3, 3, 2), ("step", (("b", 3),)), prompts(1, 1, 1))
    check_script(ranks, setup, script)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("topology", FOUR, ids=str)
def test_low_precision_is_as_good_as_one_rank(
    ranks: Any, topology: Topology, dtype: torch.dtype
) -> None:
    """Within twice the error that the unsharded layer has in the same type."""
    script = (prompts(30, 5, 17), prompts(1, 4, 2), prompts(1, 1, 1))
    setup = Setup(topology, 8, 1, hidden=32, interleave=2, dtype=dtype)
    exact = Dense(setup).run(script)
    sharded = ranks(9).run(run_script, setup, script, n=4)
    alone = ranks(9).run(run_script, replace(setup, topology=Topology()), script, n=1)[0]
    errors = [
        sum(float((o.double() - e).norm()) for (o, _), e in zip(run, exact, strict=True))
        for run in (alone, *sharded)
    ]
    assert errors[0] > 0
    assert max(errors[1:]) <= 2 * errors[0]


# Errors


def state(live: Live) -> tuple[Any, ...]:
    """Lengths and block tables, and what the cache holds."""
    cache = live.cache
    slots = cache.pool.num_blocks * cache.layout.block_size
    stored = [plane.clone() for layer in (0, 1) for plane in cache.view(layer, 0, slots)]
    return {seq: (cache.length(seq), cache.block_table(seq)) for seq in cache.seqs}, stored


def same_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[0] == b[0] and all(x.equal(y) for x, y in zip(a[1], b[1], strict=True))


def wrong_rows(live: Live, extra: int) -> None:
    plan = live.plan((("a", 2), ("new", 9)))
    x, position_embeddings = live.inputs(plan)
    x = torch.cat([x, x[:1]]) if extra > 0 else x[:-1]
    live.layer(x, position_embeddings, live.cache, plan)


def too_many_rows(live: Live) -> None:
    wrong_rows(live, 1)


def too_few_rows(live: Live) -> None:
    wrong_rows(live, -1)


def stale_decode_plan(live: Live) -> None:
    plan = live.plan((("a", 2),))
    live.plan((("a", 1),))
    live.forward(plan)


def stale_prompt_plan(live: Live) -> None:
    plan = live.plan((("new", 9),))
    live.plan((("a", 1), ("new", 2)))
    live.forward(plan)


def stale_after_truncate(live: Live) -> None:
    plan = live.plan((("a", 2),))
    live.cache.truncate("a", 3)
    live.cache.add("unused")
    live.forward(plan)


def committed_plan(live: Live) -> None:
    plan = live.plan((("new", 0),))
    live.cache.commit(plan)
    live.cache.commit(plan)


def refusal(setup: Setup, misuse: Callable[[Live], None]) -> tuple[type, str, bool]:
    """The error of a misuse, and whether the stored content is as before."""
    live = build(setup)
    live.step((("a", 7), ("b", 2)))
    before = state(live)
    try:
        misuse(live)
    except (ConfigError, StateError) as error:
        kept = all(x.equal(y) for x, y in zip(before[1], state(live)[1], strict=True))
        return type(error), str(error), kept
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("topology", [Topology(tp=4, dcp=4), Topology(tp=2, pcp=2, dcp=4)], ids=str)
@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (too_many_rows, ConfigError, "the plan has"),
        (too_few_rows, ConfigError, "the plan has"),
        (stale_decode_plan, StateError, "stale"),
        (stale_prompt_plan, StateError, "stale"),
        (stale_after_truncate, StateError, "stale"),
        (committed_plan, StateError, "stale"),
    ],
)
def test_misuse_of_a_step_is_refused_alike(
    ranks: Any, topology: Topology, misuse: Callable[[Live], None], error: type, message: str
) -> None:
    for kind, text, kept in ranks(9).run(refusal, Setup(topology, 4, 1), misuse, n=4):
        assert kind is error and message in text
        assert kept


def construct(topology: Topology, overrides: dict[str, Any]) -> None:
    arguments = {"num_heads": 8, "num_kv_heads": 1, "head_dim": 6, "layer_idx": 0}
    DCPGQAAttention(10, **{**arguments, **overrides}, mesh=CPMesh(topology))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"combine": "sum"}, r"combine='sum'.*'ag_rs', 'a2a', 'ar'"),
        ({"q_proj": "replicate"}, r"q_proj='replicate'.*'gather', 'tpa'"),
        ({"num_heads": 6}, r"num_heads=6, tp=4: .*multiple of tp"),
        ({"num_kv_heads": 3}, r"num_heads=8, num_kv_heads=3: .*use num_kv_heads from"),
        ({"num_kv_heads": 4}, r"num_kv_heads=4, tp=4, dcp=2.*q_proj='tpa'"),
        ({"num_heads": 0}, r"num_heads=0"),
        ({"head_dim": 0}, r"head_dim=0"),
        ({"head_dim": 5}, r"head_dim=5: .*pairs.*even"),
        ({"backend": "fast"}, r'backend="fast": no such backend.*auto or one of'),
    ],
)
def test_an_impossible_layer_is_refused_at_construction(
    ranks: Any, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):  # all ranks raised it, or run says otherwise
        ranks(9).run(construct, Topology(tp=4, dcp=2), overrides, n=4)


def test_an_unknown_prefill_strategy_or_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy='gather'.*auto, gather_q"):
        PCPPrefillAttention("gather", mesh=CPMesh(Topology()))
    with pytest.raises(ConfigError, match=r'backend="fast": no such backend'):
        PCPPrefillAttention(backend="fast", mesh=CPMesh(Topology()))


@pytest.mark.parametrize(("cp_rank", "cp_size", "pcp_size"), [(0, 2, 1), (1, 2, 1), (0, 1, 2)])
def test_a_cache_spread_over_other_ranks_is_refused(
    cp_rank: int, cp_size: int, pcp_size: int
) -> None:
    layer = DCPGQAAttention(8, 2, 1, 4, layer_idx=0, mesh=CPMesh(Topology()))
    layout = InterleavedLayout(cp_size, 1, 4)
    cache = PagedKVCache(layer.cache_spec, layout, 1, 8, cp_rank, pcp_size=pcp_size)
    cache.add("a")
    plan = cache.plan([("a", 4)])
    rows = plan.num_rows
    with pytest.raises(ConfigError, match=r"cp_size.*would miss keys, or count them twice"):
        layer(torch.ones(rows, 8), (torch.ones(rows, 4), torch.zeros(rows, 4)), cache, plan)
    assert not any(plane.any() for plane in cache.view(0, 0, 32))


class Fault(RuntimeError):
    pass


def fail(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise Fault("a layer fails")


def repeat_after_failure(setup: Setup, guarded: bool) -> tuple[bool, Tensor, Tensor]:
    """Whether committed content survived a failed step, and its repetition beside one unharmed."""
    results = []
    survived = True
    for failures in (0, 3):
        live = build(setup)
        live.step((("a", 7), ("b", 2)))
        live.cache.fork("a", "c")
        requests = (("a", 2), ("new", 5), ("c", 3))
        for attempt in range(failures):
            before = state(live)
            where = (live.layer.o_proj, live.layer.k_proj, live.layer.q_proj)[attempt]
            hook = where.register_forward_pre_hook(fail)
            plan = live.plan(requests)
            with pytest.raises(Fault):
                if guarded:
                    with live.mesh.guard():
                        live.forward(plan)
                else:
                    live.forward(plan)
            hook.remove()
            after = state(live)
            before[0].setdefault("new", (0, ()))
            survived &= after[0] == before[0] and committed_is_kept(live, before[1], after[1])
        results.append(live.step(requests)[0])
    return survived, *results


def committed_is_kept(live: Live, before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether every slot of a committed token holds what it held."""
    layout, rank = live.cache.layout, live.mesh.rank("dcp")
    for seq in live.cache.seqs:
        positions = torch.arange(live.cache.length(seq))
        held = layout.local_index(positions)[layout.owner(positions) == rank].tolist()
        table = live.cache.block_table(seq)
        size = layout.block_size
        slots = [table[i // size] * size + i % size for i in held]
        if not all(x[slots].equal(y[slots]) for x, y in zip(before, after, strict=True)):
            return False
    return True


@pytest.mark.parametrize("guarded", [False, True], ids=["bare", "guarded"])
@pytest.mark.parametrize("topology", [Topology(), *FOUR], ids=str)
def test_a_failed_step_changes_nothing_and_can_be_repeated(
    ranks: Any, topology: Topology, guarded: bool
) -> None:
    setup = Setup(topology, 4, 1, interleave=2)
    answers = ranks(9).run(repeat_after_failure, setup, guarded, n=topology.world_size)
    for survived, unharmed, repeated in answers:
        assert survived
        assert repeated.equal(unharmed)
        assert repeated.equal(answers[0][2])


# The layer as a module


def describe(setup: Setup) -> tuple[str, bool]:
    layer = build(setup).layer
    return layer.extra_repr(), layer.training


def test_extra_repr_says_what_runs_and_where(ranks: Any) -> None:
    setup = Setup(Topology(tp=4, dcp=2), 8, 2)
    texts = [text for text, _ in ranks(9).run(describe, setup, n=4)]
    assert [text.split(", head_dim")[0] for text in texts] == [
        "heads 0..1 of 8, kv 0..0 of 2",
        "heads 2..3 of 8, kv 0..0 of 2",
        "heads 4..5 of 8, kv 1..1 of 2",
        "heads 6..7 of 8, kv 1..1 of 2",
    ]
    assert all("combine=a2a" in text and "tp=4, dcp=2, pcp=1" in text for text in texts)


def leading_dimensions() -> bool:
    live = build(Setup(Topology(tp=2, dcp=2)))
    live.step((("a", 5),))
    plan = live.plan((("a", 2),))
    x, (cos, sin) = live.inputs(plan)
    flat = live.layer(x, (cos, sin), live.cache, plan)
    batched = live.layer(x[None], (cos[None], sin[None]), live.cache, plan)
    return batched.shape == (1, *flat.shape) and bool(batched[0].equal(flat))


def test_leading_dimensions_of_size_1_are_kept(ranks: Any) -> None:
    assert ranks(9).run(leading_dimensions, n=2) == [True, True]

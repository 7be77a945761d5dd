"""Models with latent attention on several ranks equal transformers' own; experts and refusals."""

from __future__ import annotations

import copy
import itertools
import re

import parity_mla
import pytest
import torch
from parity_mla import LayoutMLA, TinyMLA, left_padded, relative_error
from torch import Tensor, nn

from cplayers import ConfigError, RankFailedError
from cplayers.hf.experts import ShardedExperts
from cplayers.hf.families import FAMILIES

TOLERANCE = 1e-4  # relative to the largest logit; fp32 against float64

SWEPT = [
    TinyMLA("deepseek_v2", 16, 2),
    TinyMLA("deepseek_v2", 12, 0),
    TinyMLA("deepseek_v2", 6, 5),
    TinyMLA("deepseek_v3", 16, 1),
    TinyMLA("deepseek_v3", 12, 4),
    TinyMLA("deepseek_v3", 6, 4),
    TinyMLA("deepseek_v3", 12, 4, "half-split"),
]
SAMPLED = [
    *SWEPT,
    TinyMLA("deepseek_v2", 12, 3, "q_lora"),
    TinyMLA("deepseek_v3", 12, 2, "q_proj"),
    TinyMLA("glm4_moe_lite", 12, 3),
    TinyMLA("axk1", 12, 2),
    TinyMLA("youtu", 12, 1),
]
DECODES = ("gather_q", "replicate_q", "gather_kv", "auto")
COMBINES = ("a2a", "ag_rs", "ar")
INTERLEAVES = (1, 3, 16)
BLOCKS = (4, 16)
SAMPLE, OFFSET = 67, 53  # few, that meet what is asserted below


def layouts(tiny: TinyMLA) -> list[LayoutMLA]:
    """Every valid degree with every way to decode; combines, interleaves and blocks take turns."""
    model = SAMPLED.index(tiny)
    return [
        LayoutMLA(
            *degrees,
            INTERLEAVES[(2 * (model + way) + at) % 3],
            BLOCKS[(model + at) % 2],
            COMBINES[(model + way + at) % 3],
            decode=decode,
        )
        for way, decode in enumerate(DECODES)
        for at, degrees in enumerate(parity_mla.degrees(tiny.heads, None, "gather"))
    ]


def sampled(tiny: TinyMLA) -> list[LayoutMLA]:
    return layouts(tiny)[OFFSET * SAMPLED.index(tiny) % SAMPLE :: SAMPLE]


def check(ranks, tiny: TinyMLA, chosen: list[LayoutMLA]) -> None:
    expected = parity_mla.expect(tiny)
    for size, group in itertools.groupby(sorted(chosen, key=lambda x: x.ranks), lambda x: x.ranks):
        part = list(group)
        results = ranks(8).run(parity_mla.compare, tiny, part, expected, n=size, timeout=3600)
        for rank, result in enumerate(results):
            for layout, (error, wrong) in zip(part, result, strict=True):
                assert wrong == 0, f"{layout} on rank {rank}: {wrong} greedy tokens differ"
                assert error < TOLERANCE, f"{layout} on rank {rank}: relative error {error:.1e}"
        assert all(result == results[0] for result in results), f"{part}: ranks differ"


@pytest.mark.parametrize("tiny", SAMPLED, ids=str)
def test_sampled_layouts_equal_transformers(ranks, tiny: TinyMLA) -> None:
    check(ranks, tiny, sampled(tiny))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("tiny", SWEPT, ids=str)
def test_every_layout_equals_transformers(ranks, tiny: TinyMLA) -> None:
    check(ranks, tiny, layouts(tiny))


def test_the_sweep_covers_what_it_claims() -> None:
    every = [(tiny, layout) for tiny in SWEPT for layout in layouts(tiny)]
    for tiny in SWEPT:
        for degrees in parity_mla.degrees(tiny.heads, None, "gather"):
            met = [x for t, x in every if t == tiny and (x.tp, x.dcp, x.pcp) == degrees]
            assert {x.decode for x in met} == set(DECODES)
            assert {x.combine for x in met} == set(COMBINES)
            assert {x.interleave_size for x in met} == set(INTERLEAVES)
    ways = {(x.decode, x.combine, x.interleave_size, x.block_size) for _, x in every}
    assert ways == set(itertools.product(DECODES, COMBINES, INTERLEAVES, BLOCKS))
    chosen = [x for tiny in SAMPLED for x in sampled(tiny)]
    assert {(x.decode, x.combine) for x in chosen} == set(itertools.product(DECODES, COMBINES))
    assert {(x.interleave_size, x.block_size) for x in chosen} == set(
        itertools.product(INTERLEAVES, BLOCKS)
    )
    assert {x.ranks for x in chosen} == set(range(1, 9))
    assert {x.decode for x in chosen if 1 < x.pcp < x.dcp} == set(DECODES), "DCP over both axes"
    assert {t.family for t in SAMPLED} == set(parity_mla.SETTINGS)
    assert len(parity_mla.SETTINGS) == sum(family.latent for family in FAMILIES)


@pytest.mark.parametrize("tiny", SAMPLED, ids=str)
def test_the_models_attend_to_few_tokens(tiny: TinyMLA) -> None:
    model, ids = tiny.build(), parity_mla.prompts()[-1][None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for weights in model(ids, output_attentions=True).attentions:
            assert weights[0, :, 100:].amax(-1).mean() > 0.3  # equal weights: below 0.01


# Caches

V2, V3 = SWEPT[1], SWEPT[4]
LAYOUTS = [
    LayoutMLA(1, 1, 1, 3, 4, decode="auto"),
    LayoutMLA(1, 1, 2, 16, 16, decode="gather_q"),
    LayoutMLA(1, 2, 2, 1, 4, "ag_rs", decode="gather_q"),
    LayoutMLA(2, 2, 1, 3, 16, decode="replicate_q"),
    LayoutMLA(4, 2, 1, 3, 4, "ar", decode="gather_kv"),
    LayoutMLA(2, 4, 2, 3, 4, decode="auto"),
]
GREEDY = {"max_new_tokens": 12, "do_sample": False}
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(1, 96, (1, count), generator=torch.Generator().manual_seed(seed))


def whole(tiny: TinyMLA, ids: Tensor) -> Tensor:
    """Logits of a sequence by transformers' own model in float64."""
    with torch.no_grad():
        return tiny.build().double()(ids).logits[0]


def columns(logits: Tensor, count: int) -> Tensor:
    return logits[:, -count:]


def go_on(tiny: TinyMLA, layout: LayoutMLA, first: list[Tensor], more: Tensor, workspace: int):
    """Logits of a second prompt and of three tokens after it, and the collectives of the prompt."""
    model = layout.parallelize(tiny.build(), workspace_tokens=workspace)
    ids, mask = left_padded(first)
    cache = model(ids, attention_mask=mask).cache
    mask = torch.cat([mask, torch.ones_like(more)], dim=1)
    with model.cp.mesh.traffic.capture() as sent:
        out = [model(more[:, :-3], attention_mask=mask[:, :-3], cache=cache).logits]
    calls = {key: count for key, (count, _) in sent.totals().items()}
    for left in (3, 2, 1):
        seen = mask[:, : mask.shape[1] - left + 1]
        new = more[:, more.shape[1] - left, None]
        out.append(model(new, attention_mask=seen, cache=cache).logits)
    cache.free()
    assert model.cp.cache.pool.num_used == 0
    return torch.cat(out, dim=1), calls


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("tiny", "workspace"), [(V2, 32), (V3, 32), (V3, 16384)], ids=str)
@by_layout
def test_a_long_second_prompt_continues_the_cache(ranks, layout, tiny, workspace) -> None:
    first = [tokens(205, 1)[0], tokens(90, 2)[0], tokens(1, 3)[0]]
    more = torch.cat([tokens(43, seed) for seed in (4, 5, 6)])
    results = ranks(8).run(go_on, tiny, layout, first, more, workspace, n=layout.ranks)
    for row, (prompt, new) in enumerate(zip(first, more, strict=True)):
        right = whole(tiny, torch.cat([prompt, new])[None])[-43:]
        for got, _ in results:
            assert relative_error(got[row], right) < TOLERANCE
    assert all(torch.equal(got, results[0][0]) for got, _ in results)
    pieces = -(-sum(map(len, first)) // workspace)
    for _, calls in results:
        gathers = calls.get(("dcp", "all_gather"), 0)  # of two layers
        if layout.dcp == 1 or pieces == 1:
            assert gathers == 2 * (layout.dcp > 1)
        else:
            assert gathers >= 2 * pieces


def generate(tiny: TinyMLA, layout: LayoutMLA, ids: Tensor, mask: Tensor, options: dict):
    model = layout.parallelize(tiny.build())
    out = model.generate(ids, attention_mask=mask, **options)
    assert model.cp.cache.pool.num_used == 0
    return out


@pytest.mark.parametrize("tiny", [V2, V3], ids=str)
@by_layout
def test_generate_equals_transformers(ranks, layout, tiny) -> None:
    ids, mask = left_padded([tokens(n, n)[0] for n in (30, 5, 1)])
    expected = tiny.build().generate(ids, attention_mask=mask, **GREEDY)
    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        rows = slice(None) if not options else slice(0, 1)  # transformers looks up one row
        args = tiny, layout, ids[rows], mask[rows], GREEDY | options
        for got in ranks(8).run(generate, *args, n=layout.ranks):
            assert torch.equal(got, expected[rows])


def fork_and_crop(tiny: TinyMLA, layout: LayoutMLA, prompt: Tensor, questions: list[Tensor]):
    """Logits after each question from a copy of the prompt's cache; then from a cropped one."""
    model = layout.parallelize(tiny.build())
    cache = model(prompt).cache
    out = []
    for question in questions:
        branch = copy.deepcopy(cache)
        out.append(model(question, cache=branch).logits[0])
    branch.crop(-questions[-1].shape[1])
    out.append(model(questions[0], cache=branch).logits[0])
    branch.free()
    cache.crop(-5)
    out.append(model(prompt[:, -5:], cache=cache).logits[0])
    cache.free()
    return out


@by_layout
def test_a_cache_is_copied_and_cropped(ranks, layout) -> None:
    prompt, questions = tokens(37, 1), [tokens(20, 2), tokens(4, 3)]
    whole_of = [whole(V3, torch.cat([prompt, q], dim=1))[-q.shape[1] :] for q in questions]
    expected = [*whole_of, whole_of[0], whole(V3, prompt)[-5:]]
    for result in ranks(8).run(fork_and_crop, V3, layout, prompt, questions, n=layout.ranks):
        for got, right in zip(result, expected, strict=True):
            assert relative_error(got, right) < TOLERANCE


def in_bf16(tiny: TinyMLA, layout: LayoutMLA, ids: Tensor) -> Tensor:
    return layout.parallelize(tiny.build().bfloat16())(ids).logits[0]


@pytest.mark.parametrize(
    "tiny", [TinyMLA("deepseek_v2", 6, 2, "dense"), TinyMLA("youtu", 12, 1)], ids=str
)
def test_bf16_is_as_exact_as_the_plain_model_in_bf16(ranks, tiny) -> None:
    ids, plain = tokens(60, 1), tiny.build().bfloat16()
    with torch.no_grad():
        low, right = plain(ids).logits[0], plain.double()(ids).logits[0]

    def distance(got: Tensor) -> float:
        return float((got.double() - right).pow(2).mean().sqrt())

    for layout in (LAYOUTS[0], LAYOUTS[3]):
        for got in ranks(8).run(in_bf16, tiny, layout, ids, n=layout.ranks):
            assert got.dtype == torch.bfloat16
            assert distance(got) < 2 * distance(low)


# Experts

MIXTURE = LayoutMLA(4, 2, 1, decode="auto")


def run_experts(layout: LayoutMLA, how: str, ids: Tensor):
    """Logits; what became of the experts; and the all-reduces of a step."""
    model = V3.build()
    experts = model.model.layers[1].mlp.experts
    before = dict(experts.named_parameters())
    model.set_experts_implementation(how)
    model = layout.parallelize(model)
    assert experts is model.model.layers[1].mlp.experts
    assert isinstance(experts, ShardedExperts)
    kept = all(p is before[name] for name, p in experts.named_parameters())
    shapes = {name: (*p.shape, p.untyped_storage().nbytes()) for name, p in before.items()}
    with model.cp.mesh.traffic.capture() as sent:
        logits = model(ids).logits[0]
    return logits, kept, shapes, sent.totals()["tp", "all_reduce"][0], model.cp.report()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("layout", [MIXTURE, LayoutMLA(3, 1, 1), LayoutMLA(2, 2, 2)], ids=str)
def test_experts_are_split_in_every_implementation(ranks, layout, how) -> None:
    ids, part = tokens(29, 1), {2: 16, 3: 8, 4: 8}[layout.tp]  # 12, 8 and 6 of 24, padded
    right = whole(V3, ids)
    for result in ranks(8).run(run_experts, layout, how, ids, n=layout.ranks):
        logits, kept, shapes, reduces, report = result
        assert relative_error(logits, right) < TOLERANCE
        assert kept, "a Parameter was replaced"
        assert shapes == {
            "gate_up_proj": (8, 2 * part, 48, 8 * 2 * part * 48 * 4),
            "down_proj": (8, 48, part, 8 * 48 * part * 4),
        }
        # two layers of attention, a dense MLP, shared experts, routed experts
        assert reduces == 5
        assert f"4 modules sharded over tp={layout.tp}" in report
        assert "replicated" not in report


class OtherExperts(nn.Module):
    """Stands for quantised experts, or an adapter around them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        return self.inner(*args)


def keep_experts(how: str, ids: Tensor):
    tiny = TinyMLA("deepseek_v3", 12, 4, "odd experts") if how == "size" else V3
    model, options = tiny.build(), {}
    with torch.no_grad():
        right = model(ids).logits[0].double()
    mlp = model.model.layers[1].mlp
    if how == "class":
        mlp.experts = OtherExperts(mlp.experts)
    elif how == "layout":
        mlp.experts.is_transposed = True
    elif how == "bias":
        mlp.experts.bias = nn.Parameter(torch.zeros(1))
    elif how == "filter":
        options["filter_fn"] = lambda module, name: not name.endswith("experts")
    model = MIXTURE.parallelize(model, **options)
    mlp.experts.__dict__.pop("is_transposed", None)
    lines = [line.strip() for line in model.cp.report().splitlines() if "replicated" in line]
    return relative_error(model(ids).logits[0], right) if how != "layout" else 0.0, lines


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("size", ["1 experts replicated: intermediate size 22 is not divisible by tp=4"] * 2),
        ("class", ["1 experts replicated: OtherExperts is not the known class DeepseekV3Experts"]),
        ("layout", ["1 experts replicated: its weights are laid out in another way"]),
        ("bias", ["1 experts replicated: it has the Parameters bias, down_proj, gate_up_proj"]),
        ("filter", ["1 experts replicated: left out by filter_fn"] * 2),
    ],
)
def test_experts_that_cannot_be_split_are_whole_and_reported(ranks, how, why) -> None:
    for error, lines in ranks(8).run(keep_experts, how, tokens(29, 1), n=4):
        assert error < TOLERANCE
        assert len(lines) == len(why)
        for line, right in zip(lines, why, strict=True):
            assert right.removeprefix("1 ") in line


def fail_in_experts(layout: LayoutMLA):
    model = layout.parallelize(V3.build())

    def fail(*_):
        if torch.distributed.get_rank() == 1:
            raise ValueError("an expert broke")

    model.model.layers[1].mlp.experts.act_fn.register_forward_hook(fail)
    try:
        model(tokens(5, 1))
    except (ValueError, RankFailedError) as error:
        return type(error).__name__, str(error)
    raise AssertionError("the step went on although a rank failed")


def test_a_rank_that_fails_among_experts_is_named(ranks) -> None:
    waiting, failed = ranks(8).run(fail_in_experts, LayoutMLA(2, 1, 1), n=2)
    assert failed == ("ValueError", "an expert broke")
    assert waiting[0] == "RankFailedError"
    assert "rank 1 failed" in waiting[1] and "an expert broke" in waiting[1]


# Report and refusals


def alone(options: dict) -> LayoutMLA:
    """One rank, with ``q_proj`` from the options."""
    return LayoutMLA(1, 1, 1, q_proj=options.pop("q_proj", "gather"))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"decode": None}, "auto"),
        ({"decode": None, "q_proj": "tpa"}, "replicate_q"),
        ({"decode": "replicate_q", "q_proj": "tpa"}, "replicate_q"),
        ({"decode": "gather_kv"}, "gather_kv"),
        ({"decode": "gather_q"}, "gather_q"),
    ],
)
def test_the_report_says_how_latent_attention_decodes(options, line) -> None:
    model = alone(options := dict(options)).parallelize(V3.build(), workspace_tokens=64, **options)
    text = model.cp.report()
    assert f"\ndecode     {line}; prefill auto, workspace 64 tokens\n" in text
    assert re.search(r"attention  2 layers: heads 0\.\.11 of 12, latent 16 \+ 16", text)
    assert "256 bytes per token on its owner" in text  # 2 layers of (16 + 16) * 4 bytes
    assert "\nbackends   decode: native (paged), prefill: cpu\n" in text
    assert len(text.splitlines()) == 6


class Doubled(nn.Linear):
    """Stands for an adapter: its Parameters are not all of it."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("tiny", "part"),
    [
        *((V3, part) for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
        *((V2, part) for part in ("q_proj", "kv_b_proj", "o_proj")),
        (TinyMLA("axk1", 12, 2), "q_b_proj"),
    ],
    ids=str,
)
def test_adapters_are_refused_before_anything_changes(tiny, part) -> None:
    model, ids = tiny.build(), tokens(5, 1)
    getattr(model.model.layers[1].self_attn, part).__class__ = Doubled
    with torch.no_grad():
        before = model(ids).logits
        with pytest.raises(ConfigError, match=rf"layers\.1\.self_attn\.{part} of type Doubled"):
            LAYOUTS[0].parallelize(model)
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": "gather"}, "decode='gather'.*gather_q, replicate_q, gather_kv, auto"),
        ({"q_proj": "tpa", "decode": "gather_q"}, "q_proj='tpa' with decode='gather_q'"),
        ({"q_proj": "tpa", "decode": "auto"}, "q_proj='tpa' with decode='auto'"),
        ({"q_proj": "both", "decode": None}, "q_proj='both'"),
        ({"workspace_tokens": 0}, "workspace_tokens=0"),
        ({"prefill": "ring of fire"}, "prefill strategy='ring of fire'"),
        ({"backend": "none"}, 'backend="none"'),
    ],
    ids=str,
)
def test_options_that_cannot_work_change_nothing(options, message) -> None:
    model = V3.build()
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=message):
        alone(options := dict(options)).parallelize(model, **options)
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == before
    assert [type(module) for module in model.modules()] == kinds


def test_decode_is_refused_for_grouped_query_attention() -> None:
    from parity import Layout, Tiny

    with pytest.raises(ConfigError, match=r"decode='auto' for LlamaForCausalLM.*MLA"):
        Layout(1, 1, 1).parallelize(Tiny("llama", 8, 2).build(), decode="auto")


def impossible(layout: LayoutMLA) -> str:
    with pytest.raises(ConfigError) as caught:
        layout.parallelize(V3.build())
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (LayoutMLA(5, 1, 1), "num_heads=12, tp=5: num_heads is a multiple of tp"),
        (LayoutMLA(8, 8, 1), "num_heads=12, tp=8"),
    ],
    ids=str,
)
def test_heads_that_do_not_divide_are_refused_alike(ranks, layout, message) -> None:
    results = ranks(8).run(impossible, layout, n=layout.ranks)
    assert len(set(results)) == 1
    assert message in results[0]


def test_what_a_split_model_cannot_give_is_refused() -> None:
    model, ids = LAYOUTS[0].parallelize(V3.build()), tokens(5, 1)
    with pytest.raises(ConfigError, match="output_router_logits=True"):
        model(ids, output_router_logits=True)
    with pytest.raises(ConfigError, match="use_mtp=True: multi-token prediction"):
        model.generate(ids, use_mtp=True, **GREEDY)
    assert model.cp.cache.pool.num_used == 0

"""Models with sliding windows, caps, sinks and mixtures on ranks equal transformers' own."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import parity
import parity_windows
import pytest
import torch
from parity import relative_error
from parity_windows import WINDOW, LayoutWindow, TinyWindow
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from cplayers import ConfigError, CPMesh, Topology
from cplayers.cache import CacheConfig
from cplayers.hf import parallelize
from cplayers.hf.cache import CROP_TOKENS
from cplayers.hf.families import FAMILIES

TOLERANCE = 1e-4  # relative to the largest logit; fp32 against float64

SWEPT = [
    TinyWindow("mistral"),
    TinyWindow("gemma2", kv_heads=2),
    TinyWindow("gemma3_text"),
    TinyWindow("gpt_oss", seed=1),
    TinyWindow("qwen3_moe", kv_heads=2),
    TinyWindow("qwen3_moe", variant="window"),
    TinyWindow("qwen2"),
    TinyWindow("gpt_oss", variant="all windows"),
]
DEGREES = [(1, 1, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), (2, 4, 2)]
CHUNKS = (None, 1, 7, 16)
STRATEGIES = ("auto", "gather_q", "gather_kv", "ring")
CACHES = [(1, 4), (3, 4), (16, 16), (2, 16)]
COMBINES = ("a2a", "ag_rs", "ar")
SAMPLE, STEP = 9, 4  # few, that meet what is asserted below


def layouts(tiny: TinyWindow) -> list[LayoutWindow]:
    """Every degree with every chunk size; strategies, combines, caches and q_proj take turns.

    With two KV heads, DCP over TP neighbours needs ``q_proj="tpa"``.
    """
    model = SWEPT.index(tiny)
    found = []
    for at, (tp, dcp, pcp) in enumerate(DEGREES):
        for way, chunk_size in enumerate(CHUNKS):
            turn = model + at + way
            tpa = tp > 1 and (tiny.kv_heads * (dcp // pcp) > tp or turn % 2 == 1)
            found.append(
                LayoutWindow(
                    tp,
                    dcp,
                    pcp,
                    *CACHES[(turn + model) % 4],
                    COMBINES[turn % 3],
                    "tpa" if tpa and dcp > pcp else "gather",
                    chunk_size,
                    STRATEGIES[(model + 2 * at + way) % 4],
                )
            )
    return found


def sampled(tiny: TinyWindow) -> list[LayoutWindow]:
    return layouts(tiny)[STEP * SWEPT.index(tiny) % SAMPLE :: SAMPLE]


def check(ranks, tiny: TinyWindow, chosen: list[LayoutWindow]) -> None:
    expected = parity_windows.expect(tiny)
    for size, group in itertools.groupby(sorted(chosen, key=lambda x: x.ranks), lambda x: x.ranks):
        part = list(group)
        results = ranks(4).run(parity.compare, tiny, part, expected, n=size, timeout=3600)
        for rank, result in enumerate(results):
            for layout, (error, wrong) in zip(part, result, strict=True):
                assert wrong == 0, f"{layout} on rank {rank}: {wrong} greedy tokens differ"
                assert error < TOLERANCE, f"{layout} on rank {rank}: relative error {error:.1e}"
        assert all(result == results[0] for result in results), f"{part}: ranks differ"


@pytest.mark.parametrize("tiny", SWEPT, ids=str)
def test_sampled_layouts_equal_transformers(ranks, tiny: TinyWindow) -> None:
    check(ranks, tiny, sampled(tiny))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("tiny", SWEPT, ids=str)
def test_every_layout_equals_transformers(ranks, tiny: TinyWindow) -> None:
    check(ranks, tiny, layouts(tiny))


def test_the_sweep_covers_what_it_claims() -> None:
    every = [(tiny, layout) for tiny in SWEPT for layout in layouts(tiny)]
    assert {(x.tp, x.dcp, x.pcp, x.chunk_size, x.prefill) for _, x in every} >= set(
        (*degrees, chunk, strategy)
        for degrees, chunk, strategy in itertools.product(DEGREES, CHUNKS, STRATEGIES)
    )
    ways = {(x.q_proj, x.interleave_size, x.combine) for _, x in every if x.dcp > x.pcp}
    assert len(ways) >= 12
    chosen = [x for tiny in SWEPT for x in sampled(tiny)]
    assert {(x.tp, x.dcp, x.pcp) for x in chosen} == set(DEGREES)
    assert {(x.interleave_size, x.block_size) for x in chosen} == set(CACHES)
    assert {x.chunk_size for x in chosen} == set(CHUNKS)
    assert {x.prefill for x in chosen if x.pcp > 1} == set(STRATEGIES)
    assert {x.combine for x in chosen if x.dcp > 1} == set(COMBINES)
    assert {x.q_proj for x in chosen} == {"gather", "tpa"}
    assert {tiny.family for tiny in SWEPT} == set(parity_windows.SETTINGS)
    with_windows = {f.name.lower() for f in FAMILIES if f.windows != "none"}
    known = {tiny.family.replace("_text", "").replace("_", "") for tiny in SWEPT}
    assert with_windows - known == {"qwen3"}  # windows as Qwen2 has them


@pytest.mark.parametrize("tiny", SWEPT, ids=str)
def test_what_the_models_are_tested_for_changes_their_logits(tiny: TinyWindow) -> None:
    ids = torch.cat([parity_windows.prompts()[-1], torch.arange(1, 13)])[None]
    changes: list[dict[str, Any]] = []
    if tiny != TinyWindow("qwen3_moe", kv_heads=2):  # which has no window
        changes += [{"sliding_window": WINDOW + 1}, {"sliding_window": WINDOW - 1}]
    if tiny.family in ("gemma2", "gemma3_text"):
        changes += [{"final_logit_softcapping": None}]
        changes += [{"query_pre_attn_scalar": 8}]
    if tiny.family == "gemma2":
        changes += [{"attn_logit_softcapping": None}]
    with torch.no_grad():
        right = tiny.build().double()(ids).logits
        for change in changes:
            other = tiny.build(**change).double()(ids).logits
            assert relative_error(other, right) > 100 * TOLERANCE, change


# What is given back


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(1, 96, (1, count), generator=torch.Generator().manual_seed(seed))


def go_far(tiny: TinyWindow, layout: LayoutWindow, ids: Tensor, steps: int):
    """Logits of a prompt's last tokens, of ``steps`` more, and once more after a crop."""
    model = layout.parallelize(tiny.build())
    first = model(ids[:, :-steps], logits_to_keep=5)
    logits, cache, used = [first.logits], first.cache, [model.cp.cache.pool.num_used]
    for at in range(steps, 0, -1):
        logits.append(model(ids[:, ids.shape[1] - at, None], cache=cache).logits)
        used.append(model.cp.cache.pool.num_used)
    with pytest.raises(ConfigError, match=r"crop of 257 tokens.*at most 8 tokens.*at most 256"):
        cache.crop(-CROP_TOKENS - 1)
    assert cache.get_seq_length() == ids.shape[1]
    assert not any(cache.is_sliding)
    cache.crop(-100)
    cache.crop(100 - CROP_TOKENS)
    with pytest.raises(ConfigError, match=r"crop of 1 tokens.*at most 0 tokens"):
        cache.crop(-1)
    logits.append(model(ids[:, -CROP_TOKENS:], cache=cache).logits)
    blocks = model.cp.cache.layout.blocks(ids.shape[1])
    cache.free()
    assert model.cp.cache.pool.num_used == 0
    return torch.cat(logits, dim=1)[0], used, blocks


FAR = [
    LayoutWindow(1, 1, 1, 3, 4),
    LayoutWindow(1, 2, 2, 3, 4, chunk_size=100),
    LayoutWindow(2, 2, 1, 1, 4, chunk_size=64),
    LayoutWindow(2, 4, 2, 2, 4),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", FAR, ids=str)
@pytest.mark.parametrize("tiny", [SWEPT[0], SWEPT[7]], ids=str)
def test_what_is_out_of_every_window_is_given_back(ranks, tiny, layout) -> None:
    ids, steps = tokens(500, 3), 20
    with torch.no_grad():
        right = tiny.build().double()(ids).logits[0]
    expected = torch.cat([right[-steps - 5 :], right[-CROP_TOKENS:]])
    for got, used, blocks in ranks(4).run(go_far, tiny, layout, ids, steps, n=layout.ranks):
        assert relative_error(got, expected) < TOLERANCE
        kept = -(-(WINDOW + CROP_TOKENS) // (4 * layout.dcp))
        unit = 3 if layout.interleave_size == 3 else 1  # blocks that share an interleaved piece
        assert max(used) <= kept + unit + 1 < blocks - 10
        assert used[0] == pytest.approx(used[-1], abs=2)


def test_layers_that_see_all_keep_all() -> None:
    model = LayoutWindow(1, 1, 1, 4, 4).parallelize(SWEPT[3].build())
    cache = model(tokens(500, 1)).cache
    assert model.cp.window is None
    assert model.cp.cache.pool.num_used == 125
    cache.crop(-400)
    assert cache.get_seq_length() == 100


def generate(tiny: TinyWindow, layout: LayoutWindow, ids: Tensor, mask: Tensor, options: dict):
    model = layout.parallelize(tiny.build())
    out = model.generate(ids, attention_mask=mask, **options)
    assert model.cp.cache.pool.num_used == 0
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", [FAR[0], FAR[1], FAR[3]], ids=str)
@pytest.mark.parametrize("tiny", SWEPT[:5], ids=str)
def test_generate_equals_transformers(ranks, tiny, layout) -> None:
    if tiny.kv_heads > 1:
        layout = replace(layout, q_proj="tpa")
    ids, mask = parity.left_padded([tokens(n, n)[0] for n in (310, 5, 1)])
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = tiny.build().generate(ids, attention_mask=mask, **options)
    for got in ranks(4).run(generate, tiny, layout, ids, mask, options, n=layout.ranks):
        assert torch.equal(got, expected)
    expected = tiny.build().generate(ids[:1], **options)
    options |= {"prompt_lookup_num_tokens": 3}
    for got in ranks(4).run(generate, tiny, layout, ids[:1], mask[:1], options, n=layout.ranks):
        assert torch.equal(got, expected)


# What the layers get


@pytest.mark.parametrize("tiny", SWEPT, ids=str)
def test_no_mask_is_built(tiny: TinyWindow, monkeypatch) -> None:
    model = LayoutWindow(1, 1, 1).parallelize(tiny.build())
    built = []
    for name in ("sdpa_mask", "eager_mask"):
        monkeypatch.setattr(f"transformers.masking_utils.{name}", lambda *_, **__: built.append(1))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    out = model(tokens(9, 1).repeat(2, 1), attention_mask=mask)
    model(tokens(2, 2).view(2, 1), cache=out.cache)
    assert not built


@pytest.mark.parametrize(
    ("tiny", "windows"),
    [
        (SWEPT[0], [8, 8]),
        (SWEPT[1], [8, None]),
        (SWEPT[2], [8, None]),
        (SWEPT[3], [8, None]),
        (SWEPT[4], [None, None]),
        (SWEPT[5], [8, 8]),
        (SWEPT[6], [None, 8]),
    ],
    ids=str,
)
def test_windows_are_those_of_the_config_and_reported(tiny, windows) -> None:
    model = LayoutWindow(1, 1, 1).parallelize(tiny.build())
    assert [layer.scoring.window for layer in model.cp.layers] == windows
    assert model.cp.window == (8 if None not in windows else None)
    text, count = model.cp.report(), sum(window is not None for window in windows)
    assert (f"\nwindows    8 tokens in {count} of 2 layers\n" in text) == bool(count)
    assert ("given back" in text) == (count == 2)


def gpt_oss_experts(how: str, width: int, ids: Tensor):
    model = TinyWindow("gpt_oss", seed=1).build(intermediate_size=width)
    model.set_experts_implementation(how)
    experts = model.model.layers[1].mlp.experts
    before = dict(experts.named_parameters())
    model = LayoutWindow(2, 2, 1).parallelize(model)
    kept = all(p is before[name] for name, p in experts.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    return model(ids).logits[0], kept, shapes, model.cp.report()


@pytest.mark.parametrize(
    ("how", "width", "part"),
    [
        *(
            (how, width, part)
            for how in ("eager", "grouped_mm", "batched_mm")
            for width, part in ((48, 24), (20, 16))  # 10, padded
        ),
        ("eager", 21, 21),
    ],
)
def test_experts_of_gpt_oss_are_split(ranks, how, width, part) -> None:
    ids = tokens(29, 1)
    with torch.no_grad():
        right = TinyWindow("gpt_oss", seed=1).build(intermediate_size=width).double()(ids).logits[0]
    for logits, kept, shapes, report in ranks(4).run(gpt_oss_experts, how, width, ids, n=2):
        assert relative_error(logits, right) < TOLERANCE
        assert kept
        assert shapes == {
            "gate_up_proj": (6, 48, 2 * part),
            "gate_up_proj_bias": (6, 2 * part),
            "down_proj": (6, part, 48),
            "down_proj_bias": (6, 48),
        }
        assert ("2 experts replicated: intermediate size 21" in report) == (width == 21)


# Refusals


def small(family: str, **settings: Any) -> Any:
    shape = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **shape | heads | ids | settings)
    return AutoModelForCausalLM.from_config(config)


def refused(model: Any, topology: Topology | None = None) -> str:
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError) as caught:
        parallelize(model, CPMesh(topology or Topology()), cache=CacheConfig())
    assert [type(module) for module in model.modules()] == kinds, "something was changed"
    return str(caught.value)


def test_masks_that_are_not_known_are_refused() -> None:
    model = small("gemma3_text", use_bidirectional_attention=True)
    assert "use_bidirectional_attention=True" in refused(model)
    model = small("qwen2")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    assert "layer_types with 'chunked_attention'" in refused(model)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert "layer_types[1]='sliding_attention' with sliding_window=None" in refused(model)
    assert "window=0" in refused(small("mistral", sliding_window=0))


def test_rope_that_depends_on_the_length_is_refused_of_any_type_of_layer(ranks) -> None:
    for message in ranks(4).run(refuse_dynamic_rope, n=2):
        assert "rope_type='dynamic' with pcp=2" in message


def refuse_dynamic_rope() -> str:
    rope = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    return refused(small("gemma3_text", rope_parameters=rope), Topology(pcp=2, dcp=2))


def test_padding_inside_of_windows_is_refused() -> None:
    ids = tokens(6, 1).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    mask[1, 4] = 0
    for tiny in SWEPT:
        model = LayoutWindow(1, 1, 1).parallelize(tiny.build())
        if not model.cp.has_windows:
            model(ids, attention_mask=mask)
            continue
        with pytest.raises(ConfigError, match="padding between tokens"):
            model(ids, attention_mask=mask)
        right = torch.ones_like(ids)
        right[1, 4:] = 0
        out = model(ids, attention_mask=right)
        more = torch.cat([right, torch.ones(2, 1).long()], 1)
        with pytest.raises(ConfigError, match="padding between tokens"):
            model(ids[:, :1], attention_mask=more, cache=out.cache)
        more[1, -1] = 0
        model(ids[:, :1], attention_mask=more, cache=out.cache)

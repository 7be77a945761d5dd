"""The planner: published figures, counts of other people, choices and their reasons."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cplayers import ConfigError, CPMesh, Topology
from cplayers.attention.costs import Sizes
from cplayers.cache import CacheConfig
from cplayers.planning import (
    Call,
    Choices,
    Hardware,
    KVMemory,
    Link,
    Load,
    ModelShape,
    Speeds,
    TimeModel,
    advise,
    candidates,
    check_layout,
    crossovers,
    hardware_presets,
    layouts,
    model_presets,
    weights_of,
)
from cplayers.planning.crossover import LIMIT, first
from cplayers.planning.measure import CPU, GPU, scale_of
from cplayers.planning.shape import MODELS
from cplayers.planning.times import causal_pairs
from cplayers.planning.traffic import Chunk, decode_calls, fetch_calls, sent, visit_calls

MILLION = 1 << 20
UNIFORM = Speeds(1e12, 1e11, {"*": Link(1e-5, 1e10)})

# Parameters as the models' authors state them, in billions.
PUBLISHED = {
    "deepseek-v3": 671,
    "deepseek-r1": 671,
    "kimi-k2": 1026,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "llama-3-405b": 406,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "smollm2-135m": 0.1345,
}


def test_published_figures_of_caches() -> None:
    r1 = ModelShape.load("deepseek-r1")
    for tp in (1, 8, 16):
        assert KVMemory(r1, Topology(tp=tp)).token_bytes == 70_272
    assert round(KVMemory(r1, Topology(tp=8)).nbytes(MILLION) / 1e9, 1) == 73.7
    assert round(KVMemory(r1, Topology(tp=8, dcp=8)).nbytes(MILLION) / 1e9, 1) == 9.2
    assert KVMemory(ModelShape.load("llama-3-70b"), Topology(tp=8)).token_bytes == 40_960


@pytest.mark.parametrize("name", model_presets())
def test_presets_have_as_many_parameters_as_their_authors_say(name: str) -> None:
    counted = weights_of(ModelShape.load(name), Topology()).total / 1e9
    assert counted == pytest.approx(PUBLISHED[name], rel=3e-3)


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "qwen3-30b-a3b", "smollm2-135m"])
def test_presets_count_the_matrices_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch sets this variable when transformers' loader imports its compiler; undone afterwards.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    for ours in ("_source", "_checked", "quantization_config"):
        fields.pop(ours, None)
    layers = fields["num_hidden_layers"] = 5  # the first three of DeepSeek-V3 are dense
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:layers]
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    matrices = {
        id(p): p.numel()
        for n, p in model.named_parameters()
        if p.dim() > 1 and not n.endswith("bias")
    }
    assert weights_of(ModelShape.from_config(fields), Topology()).total == sum(matrices.values())


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-120b"])
def test_presets_are_the_defaults_of_their_classes(name: str) -> None:
    from transformers import AutoConfig

    fields = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    config = AutoConfig.for_model(fields["model_type"])
    others = {"_source", "_checked", "architectures", "quantization_config"}
    sizes = fields.keys() - others - {"max_position_embeddings", "moe_layer_freq"}
    assert len(sizes) > 10
    assert {size: fields[size] for size in sizes} == {size: getattr(config, size) for size in sizes}


SMALL = {
    **dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    **dict(intermediate_size=128, vocab_size=100),
}


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 8}),
        ("gemma", {}),
        ("gemma2", {"sliding_window": 8}),
        ("gemma3_text", {"sliding_window": 8}),
        ("cohere2", {"sliding_window": 8}),
        ("smollm3", {}),
        ("starcoder2", {}),
        ("gpt_oss", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen2", {"sliding_window": 8}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 5}),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 20}),
        ("qwen3_moe", {"sliding_window": 8, "num_experts": 4, "num_experts_per_tok": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_config_leaves_out_is_as_its_class_has_it(
    model_type: str, more: dict[str, Any]
) -> None:
    from transformers import AutoConfig

    fields = {**SMALL, "num_hidden_layers": 13, **more}
    config = AutoConfig.for_model(model_type, **fields)
    shape = ModelShape.from_config({**fields, "model_type": model_type})
    assert shape.tied == config.tie_word_embeddings
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # one kind of layer: mistral has its window in all of them
        windowed = 13 if getattr(config, "sliding_window", None) else 0
    else:
        windowed = kinds.count("sliding_attention")
    assert shape.windowed_layers == windowed


def test_gemma_has_as_many_parameters_as_its_authors_say() -> None:
    # https://huggingface.co/google/gemma-2-2b: 2.61 billion; the file does not say that it is tied
    fields = {
        **dict(model_type="gemma2", hidden_size=2304, intermediate_size=9216, head_dim=256),
        **dict(num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4),
        **dict(vocab_size=256_000, sliding_window=4096),
    }
    shape = ModelShape.from_config(fields)
    assert weights_of(shape, Topology()).total / 1e9 == pytest.approx(2.61, abs=0.01)
    assert (shape.window, shape.windowed_layers) == (4096, 13)


def test_a_quantization_without_a_name_is_not_taken_for_bf16() -> None:
    fields = json.loads((MODELS / "qwen3-8b.json").read_text(encoding="utf-8"))
    shape = ModelShape.from_config({**fields, "quantization_config": {"bits": 8}})
    with pytest.raises(ConfigError, match=r"weights=unnamed: .*pass weights= one of"):
        candidates(shape, Hardware.load("h200"), 8, Load(100))


def test_weights_in_bytes() -> None:
    shape = ModelShape.load("deepseek-v3")
    weights = weights_of(shape, Topology())
    assert weights.nbytes("bf16") == 2 * weights.total
    outside = weights.embedding + weights.head + weights.router
    assert weights.nbytes("fp8") == weights.total + outside
    oss = weights_of(ModelShape.load("gpt-oss-120b"), Topology())
    assert oss.nbytes("mxfp4") == 2 * (oss.total - oss.experts) + oss.experts * 17 // 32
    # The checkpoint of gpt-oss-120b has 65.2 GB, biases and norms among them.
    assert oss.nbytes("mxfp4") / 1e9 == pytest.approx(65.2, abs=0.1)
    with pytest.raises(ConfigError, match="weights=int3: weights are counted in a known precision"):
        weights.nbytes("int3")


def test_a_step_reads_the_experts_in_use() -> None:
    shape = ModelShape.load("qwen3-235b-a22b")
    weights = weights_of(shape, Topology())
    assert shape.experts is not None
    others = weights.total - weights.experts - weights.embedding
    one = weights.read(shape, "bf16", 1)
    assert one == pytest.approx(2 * (others + weights.experts * 8 / 128))
    assert weights.read(shape, "bf16", 10_000) == pytest.approx(2 * (others + weights.experts))
    active = weights.multiplied(shape) + weights.head
    assert active / 1e9 == pytest.approx(21.6, abs=0.2)  # "A22B", without the embedding


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pcp=st.sampled_from([1, 2, 4]),
    rows=st.integers(1, 300),
    cached=st.integers(0, 5000),
    combine=st.sampled_from(["a2a", "ag_rs", "ar"]),
    replicated=st.booleans(),
    data=st.data(),
)
def test_collectives_add_up_to_the_costs_of_the_layers(
    tp: int,
    pcp: int,
    rows: int,
    cached: int,
    combine: str,
    replicated: bool,
    data: st.DataObject,
) -> None:
    topology = Topology(tp=tp, pcp=pcp)
    dcp = data.draw(st.sampled_from(topology.possible_dcp()))
    topology = Topology(tp=tp, pcp=pcp, dcp=dcp)
    sizes = Sizes(3, 16, 12, 40, 2, combine, replicated)
    assert sent(decode_calls(sizes, topology, rows)) == sizes.visit(topology, rows)
    chunk = Chunk.of(topology, rows)
    if dcp > 1 or pcp == 1:
        assert sent(visit_calls(sizes, topology, chunk)) == sizes.chunks_visit(topology, chunk)
    fetched = fetch_calls(sizes, topology, chunk, cached, 100)
    share = -(-cached // dcp)
    assert sent(fetched) == sizes.fetch(topology, new=chunk.width, cached=share)
    for call in decode_calls(sizes, topology, rows):
        assert topology.size(call.axis) > 1 and call.bytes > 0


@given(
    tokens=st.integers(0, 40),
    cached=st.integers(0, 40),
    window=st.none() | st.integers(1, 50),
)
def test_causal_pairs(tokens: int, cached: int, window: int | None) -> None:
    rows = range(cached, cached + tokens)
    assert causal_pairs(tokens, cached, window) == sum(min(p + 1, window or p + 1) for p in rows)


@given(
    dcp=st.integers(1, 5),
    interleave=st.integers(1, 7),
    block=st.integers(1, 9),
    context=st.integers(1, 300),
    sequences=st.integers(1, 4),
)
def test_the_longest_context_fits_and_one_more_token_does_not(
    dcp: int, interleave: int, block: int, context: int, sequences: int
) -> None:
    shape = ModelShape.from_config(
        {
            "hidden_size": 8,
            "num_hidden_layers": 3,
            "num_attention_heads": dcp,
            "num_key_value_heads": 1,
            "head_dim": 4,
            "intermediate_size": 8,
            "vocab_size": 8,
        }
    )
    memory = KVMemory(shape, Topology(tp=dcp, dcp=dcp), CacheConfig(block, interleave))
    free = memory.nbytes(context, sequences)
    longest = memory.max_context(sequences, free)
    assert longest >= context
    assert memory.nbytes(longest, sequences) <= free < memory.nbytes(longest + 1, sequences)
    assert memory.max_sequences(context, free) == sequences


def test_layouts_are_those_that_the_judge_accepts() -> None:
    shape = ModelShape.load("llama-3-8b")
    found = list(layouts(shape, 8))
    assert len(found) == len(set(found)) > 10
    for topology, replicate_q in found:
        assert topology.world_size == 8
        check_layout(shape, topology, CacheConfig(), replicate_q=replicate_q)
    refused = Topology(tp=8, dcp=2)  # 8 KV heads on 8 ranks leave nothing to share out
    assert (refused, True) in found and (refused, False) not in found
    with pytest.raises(ConfigError, match="q_proj='tpa'"):
        check_layout(shape, refused, CacheConfig())


def plan(model: str, gpus: int, context: int, concurrency: int, **more: Any) -> Any:
    load = Load(context, concurrency)
    return advise(ModelShape.load(model), Hardware.load("h200"), gpus, load, **more)


def test_a_sequence_that_outgrows_a_card_gets_dcp() -> None:
    found, advice = plan("deepseek-v3", 8, MILLION, 4)
    assert advice.best is found[0]
    assert advice.best.degrees == (8, 8, 1, 1)
    assert [c.degrees for c in found if c.fits and not c.replicate_q] == [(8, 8, 1, 1)]
    assert "One sequence outgrows a card" in advice.reasons[0]
    assert "73.7 GB" in advice.reasons[0] and "9.2 GB" in advice.reasons[0]
    assert "made for 163,840 positions" in advice.notes[0]
    budget = advice.best.budget
    assert budget.kv == 4 * 9_210_691_584
    assert budget.used <= budget.capacity == int(0.9 * 141e9)
    assert budget.max_context >= MILLION and budget.max_concurrency == 4


@pytest.mark.parametrize(
    ("model", "context", "concurrency"),
    [("deepseek-v3", 8192, 200), ("gpt-oss-20b", 8192, 1), ("deepseek-v3", 100, 1)],
)
def test_what_a_budget_says_to_hold_fits_and_one_more_does_not(
    model: str, context: int, concurrency: int
) -> None:
    def fits(of: Any, context: int, concurrency: int) -> bool:
        load = Load(context, concurrency)
        found = candidates(shape, hardware, 8, load)
        key = of.degrees, of.replicate_q
        return next(c.fits for c in found if (c.degrees, c.replicate_q) == key)

    shape, hardware = ModelShape.load(model), Hardware.load("h200")
    some = [c for c in candidates(shape, hardware, 8, Load(context, concurrency)) if c.fits][:3]
    assert some
    for c in some:
        most, longest = c.budget.max_concurrency, c.budget.max_context
        assert fits(c, context, most) and not fits(c, context, most + 1)
        assert fits(c, longest, concurrency) and not fits(c, longest + 1, concurrency)


def test_short_and_many_sequences_get_replicas() -> None:
    _, advice = plan("llama-3-8b", 8, 2048, 1024)
    assert advice.best is not None
    assert advice.best.topology.dp > 1 and advice.best.topology.dcp == 1
    assert any(reason.startswith("Requests share out: ") for reason in advice.reasons)


def test_a_target_for_the_first_token_gets_pcp() -> None:
    found, plain = plan("gpt-oss-120b", 4, 131_072, 8)
    assert plain.best.topology.pcp == 1
    quickest = min(c.first_token.total for c in found if c.fits)
    _, asked = plan("gpt-oss-120b", 4, 131_072, 8, ttft_s=1.01 * quickest)
    assert asked.best.topology.pcp > 1
    assert any(reason.startswith("Prompts cost most: pcp=") for reason in asked.reasons)
    _, neither = plan("gpt-oss-120b", 4, 131_072, 8, ttft_s=quickest / 2)
    assert neither.best is None and "keeps to the targets" in neither.reasons[0]


def test_when_nothing_fits_the_remedy_is_named() -> None:
    found, advice = plan("llama-3-405b", 2, 131_072, 1)
    assert advice.best is None and not any(c.fits for c in found)
    assert advice.reasons[0].startswith("Nothing fits: tp=2")
    [gpus] = [int(r.split()[0].removeprefix("gpus=")) for r in advice.reasons if "would do" in r]
    assert plan("llama-3-405b", gpus, 131_072, 1)[1].best is not None
    assert plan("llama-3-405b", gpus // 2, 131_072, 1)[1].best is None


def test_predictions_move_the_right_way() -> None:
    shape, hardware = ModelShape.load("llama-3-70b"), Hardware.load("h200")
    model = TimeModel(shape, Topology(tp=8), hardware.speeds(Topology(tp=8)))
    assert model.decode_step(1000).total < model.decode_step(100_000).total
    step = model.decode_step(1000)
    # one token reads all weights but the embedding: a bound from the data sheet
    least = (weights_of(shape, Topology(tp=8)).nbytes("bf16") - 2 * 128_256 * 8192) / 4.8e12
    assert step.products == pytest.approx(least / 0.8)
    apart = Hardware.load("h200").speeds(Topology(tp=16))
    assert apart.link("tp", "all_reduce").bandwidth < apart.link("pcp", "all_reduce").bandwidth
    split = Topology(tp=8, pcp=2)
    halves = TimeModel(shape, split, hardware.speeds(split))
    whole, half = model.first_token(65_536, 8192), halves.first_token(65_536, 8192)
    assert half.attention == pytest.approx(whole.attention / 2)
    assert half.products == pytest.approx(whole.products / 2, rel=0.01)


@pytest.mark.parametrize(("context", "measured"), [(1 << 17, 3.8), (MILLION, 77)])
def test_predictions_are_near_what_others_measured(context: int, measured: float) -> None:
    # Llama 3 405B, prompts in one step on 16 nodes of 8 H100: https://arxiv.org/abs/2411.01783
    shape, topology = ModelShape.load("llama-3-405b"), Topology(tp=8, pcp=16, dcp=16)
    speeds = Hardware.load("h100").speeds(topology)
    predicted = TimeModel(shape, topology, speeds).first_token(context, context).total
    assert predicted == pytest.approx(measured, rel=0.2)


# bytes on a card of weights and of 131,072 cached tokens, reckoned without this library
BY_HAND = {
    ("llama-3-70b", Topology(8, 2, 2)): (19_476_774_912, 2_684_354_560),
    ("llama-3-405b", Topology(16, 2)): (55_199_662_080, 4_227_858_432),
    ("qwen3-235b-a22b", Topology(4, 2, 2)): (118_553_837_568, 3_154_116_608),
    ("gpt-oss-120b", Topology()): (65_168_179_200, 9_663_676_416),
    ("deepseek-v3", Topology(8, 8)): (86_739_124_224, 1_151_336_448),
}


@pytest.mark.parametrize(("name", "topology"), BY_HAND, ids=str)
def test_bytes_of_a_card_are_those_reckoned_by_hand(name: str, topology: Topology) -> None:
    shape = ModelShape.load(name)
    weights = weights_of(shape, topology).nbytes(shape.precision)
    assert (weights, KVMemory(shape, topology).nbytes(1 << 17)) == BY_HAND[name, topology]


def test_whether_more_cards_would_do_takes_no_time() -> None:
    started = time.perf_counter()
    _, advice = plan("llama-3-405b", 1, MILLION, 1_000_000)
    assert advice.best is None and not any("would do" in reason for reason in advice.reasons)
    assert time.perf_counter() - started < 3  # a tenth of a second; with times for all, four


def test_plans_of_many_cards_are_quick() -> None:
    started = time.perf_counter()
    found, _ = plan("deepseek-v3", 256, MILLION, 4)
    assert len(found) > 200 and time.perf_counter() - started < 10  # one second


def test_a_prompt_of_many_chunks_is_as_long_as_the_sum_of_its_steps() -> None:
    shape, topology = ModelShape.load("gpt-oss-20b"), Topology(tp=2, dcp=2)
    model = TimeModel(shape, topology, Hardware.load("h200").speeds(topology))
    for prompt, chunk, error in ((1000, 64, 1e-12), (300_001, 100, 1e-3)):
        steps = [
            model.prompt_step(min(chunk, prompt - start), start)
            for start in range(0, prompt, chunk)
        ]
        expected = sum(step.total for step in steps)
        assert model.first_token(prompt, chunk).total == pytest.approx(expected, rel=error)


def test_plans_of_extremes_end() -> None:
    shape, hardware = _anything()
    started = time.perf_counter()
    assert candidates(shape, hardware, 8, Load(1 << 30, chunk=1))
    assert time.perf_counter() - started < 30  # half a second; a step for each token takes hours
    with pytest.raises(ConfigError, match="gpus above 1,024: layouts of up to 1,024 cards"):
        candidates(shape, hardware, 9_999_999_999_999, Load(100))
    for name in ("context", "concurrency", "chunk"):
        with pytest.raises(ConfigError, match=f"^{name} above 1,099,511,627,776: no cards hold"):
            Load(**{"context": 100, name: 10**400})


@pytest.mark.parametrize("kv_heads", [7, 64])
def test_heads_that_no_layout_can_split_are_refused_with_the_cause(kv_heads: int) -> None:
    shape = ModelShape("x", 64, 1, 32, kv_heads, 8, 8, 64, 64)
    with pytest.raises(ConfigError, match=f"num_kv_heads={kv_heads}: num_heads is a multiple"):
        advise(shape, Hardware.load("h200"), 8, Load(100))


def test_crossovers_are_where_the_model_says() -> None:
    shape = ModelShape("x", 64, 1, 32, 8, 128, 128, 64, 64)
    topology = Topology(pcp=2, dcp=2)
    found = crossovers(shape, topology, UNIFORM, dtype=torch.float32, chunk=256)
    assert found.a2a == 1  # fewer bytes and fewer collectives
    assert found.dcp is not None and found.gather_q is not None
    spread = TimeModel(shape, topology, UNIFORM, dtype=torch.float32)
    alone = TimeModel(shape, Topology(pcp=2), UNIFORM, dtype=torch.float32)
    for context in (found.dcp - 1, found.dcp):
        wins = spread.decode_attention(context).total < alone.decode_attention(context).total
        assert wins == (context == found.dcp)
    # by hand: half the keys, 8 KiB each, against an all-to-all of one row
    saved = 8192 / 2 / 1e11
    a2a = 1e-5 + 32 * (128 * 4 + 4) / 1e10
    assert found.dcp == pytest.approx(a2a / saved, abs=2 * 16)  # shares differ by an interleave
    with pytest.raises(ConfigError, match="they compare a DCP degree with DCP 1"):
        crossovers(shape, Topology(tp=2), UNIFORM)


def test_the_first_size_that_wins() -> None:
    for turn in (1, 2, 3, 7, 8, 1000, LIMIT):
        assert first(lambda size, turn=turn: size >= turn) == turn
    assert first(lambda size: False) is None


def test_devices_are_timed_on_far_more_than_a_launch() -> None:
    launch, card = 10e-6, Hardware.load("b200")  # the fastest of the presets, at its peak
    row = 2 * 8 * 128 * 2  # keys and values of 8 heads in bf16
    assert 2 * GPU.side**3 / card.flops > 40 * launch
    assert (GPU.keys[1] - GPU.keys[0]) * row / card.memory_bandwidth > 10 * launch
    assert 2 * (GPU.elements[1] - GPU.elements[0]) / card.link_bandwidth > 3 * launch
    assert CPU.side < GPU.side and scale_of(CPMesh(Topology())) == CPU
    assert scale_of(CPMesh(Topology(), "cuda")) == GPU


def test_what_was_measured_as_a_whole_has_one_latency() -> None:
    calls = [
        Call("dcp", "all_gather", 1000, combine="ag_rs"),
        Call("dcp", "reduce_scatter", 3000, combine="ag_rs"),
        Call("tp", "all_reduce", 500),
    ]
    links = {"*": Link(1.0, 1000.0), "ag_rs": Link(5.0, 1000.0)}
    assert Speeds(1, 1, links).talk(calls) == pytest.approx(5 + 4 + 1 + 0.5)
    assert Speeds(1, 1, {"*": links["*"]}).talk(calls) == pytest.approx(3 + 4.5)


def test_hardware_presets_state_their_sources() -> None:
    assert {"h200", "h100", "b200", "a100", "ascend-910c"} <= set(hardware_presets())
    for name in hardware_presets():
        hardware = Hardware.load(name)
        assert hardware.title and hardware.source and hardware.checked
        assert all(url.startswith("https://") for url in hardware.source)
    unconfirmed = Hardware.load("b200").unconfirmed
    assert unconfirmed.startswith("memory_bandwidth: ")
    _, advice = advise(ModelShape.load("qwen3-8b"), Hardware.load("b200"), 1, Load(100))
    assert f"Not confirmed for b200: {unconfirmed}." in advice.notes


def test_model_presets_state_their_sources() -> None:
    for name in model_presets():
        assert ModelShape.load(name).source.startswith("https://huggingface.co/")
        assert json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))["_checked"]


def test_shapes_from_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    text = (MODELS / "llama-3-8b.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(text)
    assert ModelShape.load(str(folder)).num_kv_heads == 8
    assert ModelShape.load(str(folder / "config.json")).name == str(folder / "config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0: hidden_size is an int of at least 1"),
        ({"num_hidden_layers": None}, "without num_hidden_layers: .*add num_hidden_layers"),
        ({"layer_types": ["linear_attention"] * 4}, "layers of type 'linear_attention'"),
    ],
)
def test_other_models_are_refused(change: dict[str, Any], message: str) -> None:
    fields = json.loads((MODELS / "qwen3-8b.json").read_text(encoding="utf-8"))
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config({**fields, **change})


def test_shared_experts_with_a_width_of_their_own_are_counted() -> None:
    # https://huggingface.co/Qwen/Qwen2-57B-A14B/blob/main/config.json; "57B", 57.4 in its report
    fields = {
        **dict(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28),
        **dict(num_key_value_heads=4, intermediate_size=18944, moe_intermediate_size=2560),
        **dict(shared_expert_intermediate_size=20480, num_experts=64, num_experts_per_tok=8),
        **dict(decoder_sparse_step=1, vocab_size=151_936),
    }
    counted = weights_of(ModelShape.from_config(fields), Topology()).total / 1e9
    assert counted == pytest.approx(57.4, abs=0.05)


@pytest.mark.parametrize(
    "change",
    [
        *({"layer_types": 5}, {"layer_types": ["full_attention"]}, {"architectures": 5}),
        *({"quantization_config": "fp8"}, {"max_position_embeddings": "x"}),
        *({"first_k_dense_replace": "a"}, {"mlp_only_layers": 3}, {"num_experts_per_tok": 129}),
        *({"tie_word_embeddings": "no"}, {"hidden_size": 10**400}, {"_source": 3}),
        *(
            {"interleave_moe_layer_step": 2},
            {"attn_layer_period": 8},
            {"num_hidden_layers": 1 << 20},
        ),
        *({"text_config": 1}, {"moe_layer_freq": [0, 1]}, {"sliding_window": True}),
    ],
    ids=lambda change: next(iter(change)),
)
def test_fields_that_cannot_be_counted_are_refused_by_name(change: dict[str, Any]) -> None:
    fields = json.loads((MODELS / "qwen3-30b-a3b.json").read_text(encoding="utf-8"))
    fields.pop("decoder_sparse_step", None)
    with pytest.raises(ConfigError, match=f"model=config.json with {next(iter(change))}="):
        ModelShape.from_config({**fields, **change})


def test_windows_of_a_pattern() -> None:
    fields = json.loads((MODELS / "llama-3-8b.json").read_text(encoding="utf-8"))
    shape = ModelShape.from_config({**fields, "sliding_window": 512, "sliding_window_pattern": 6})
    assert (shape.window, shape.windowed_layers) == (512, 32 - 5)


@pytest.mark.parametrize(
    "change",
    [
        *('"memory": 1e999', '"memory": 1e-300', '"memory": true', '"flops": NaN'),
        *('"memory": 80', '"flops": 989', '"network_bandwidth": 50', '"checked": 5'),
        *('"node_size": 0.5', '"node_size": true', '"source": 5', '"title": 5'),
    ],
)
def test_hardware_files_with_wrong_figures_are_refused(change: str, tmp_path: Path) -> None:
    card = {"flops": 1e15, "memory": 1e11, "memory_bandwidth": 1e12, "link_bandwidth": 1e11}
    file = tmp_path / "card.json"
    file.write_text(json.dumps(card))
    assert Hardware.load(str(file)).node_size == 8
    file.write_text(f"{json.dumps(card)[:-1]}, {change}}}")
    field = change.split(":")[0].strip('"')
    with pytest.raises(ConfigError, match=f"with {field}="):
        Hardware.load(str(file))


def test_files_that_are_not_json_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x"
    for data in (b"\x7fELF\xff", b"[" * 100_000, b"[]", b"1" * 5000):
        file.write_bytes(data)
        for load in (ModelShape.load, Hardware.load):
            with pytest.raises(ConfigError, match=r"it is not JSON|and no fields"):
                load(str(file))
    for load in (ModelShape.load, Hardware.load):
        with pytest.raises(ConfigError, match="or a path that exists"):
            load("x" * 5000)


def test_a_link_is_the_networks_where_a_replica_lies_on_two_nodes() -> None:
    hardware = Hardware("x", 1, 1, 1, 1e9, node_size=8, network_bandwidth=1e6)
    for topology, slow in (
        (Topology(tp=3, dp=2), False),
        (Topology(tp=3, dp=3), True),  # of ranks 6, 7 and 8 the last is on the second node
        (Topology(tp=8, dp=64), False),
        (Topology(tp=8, pcp=2, dp=4), False),
    ):
        assert (hardware.speeds(topology).link("tp", "x").bandwidth < 1e8) == slow
    assert hardware.speeds(Topology(tp=8, pcp=2)).link("pcp", "x").bandwidth < 1e8


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model=gpt9: .*use one of deepseek-r1, deepseek-v3"):
        ModelShape.load("gpt9")
    with pytest.raises(ConfigError, match=r"hardware=abacus: .*use one of h200"):
        Hardware.load("abacus")
    broken = tmp_path / "card.json"
    broken.write_text('{"flops": 1e12, "memory": -1}')
    with pytest.raises(ConfigError, match="memory=-1: memory is a number from 1e"):
        Hardware.load(str(broken))
    broken.write_text("[")
    with pytest.raises(ConfigError, match="it is not JSON"):
        Hardware.load(str(broken))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Load(0), "context=0: context is an int of at least 1"),
        (lambda: Load(10, output=10), "output=10 with context=10"),
        (
            lambda: candidates(*_anything(), 0, Load(100)),
            "gpus=0: at least one card computes",
        ),
        (
            lambda: candidates(*_anything(), 1, Load(100), Choices(utilization=1.5)),
            "utilization=1.5",
        ),
        (
            lambda: candidates(*_anything(), 1, Load(100), Choices(precision="int3")),
            "weights=int3",
        ),
    ],
)
def test_loads_that_make_no_sense_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def _anything() -> tuple[ModelShape, Hardware]:
    return ModelShape.load("llama-3-8b"), Hardware.load("h200")


def test_a_prediction_is_marked_as_one() -> None:
    found, _ = plan("llama-3-8b", 2, 4096, 1)
    data = json.loads(json.dumps(found[0].to_dict()))
    measured_or_by_formula = {
        *("tp", "dcp", "pcp", "dp", "q_proj", "fits", "weight_bytes", "kv_bytes"),
        *("kv_bytes_per_sequence", "sequences_per_replica"),
    }
    assert data.keys() - {"predicted"} == measured_or_by_formula
    assert {"ttft_s", "tpot_s", "workspace_bytes"} <= data["predicted"].keys()

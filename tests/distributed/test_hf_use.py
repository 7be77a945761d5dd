"""What users of transformers do to a model and its cache beside calling ``generate``."""

from __future__ import annotations

import copy
import gc
import os
import time

import parity
import pytest
import torch
from parity import Layout, Tiny
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from cplayers import ConfigError, CPMesh, RankFailedError, Topology
from cplayers.hf import parallelize

TINY = Tiny("llama", 8, 2)
LAYOUTS = [Layout(1, 1, 1, 3, 4), Layout(1, 2, 2, 3, 4), Layout(2, 2, 1, 1, 4, q_proj="tpa")]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 96, (1, count), generator=torch.Generator().manual_seed(seed))


def alone() -> torch.nn.Module:
    return LAYOUTS[0].parallelize(TINY.build())


# Caches


def share_a_prompt(layout: Layout, prompt, questions, copier):
    """Logits after each question, each from a copy of the prompt's cache; then after the prompt."""
    model = layout.parallelize(TINY.build())
    mask = torch.ones_like(prompt)
    mask[0, 0] = 0
    cache = model(prompt, attention_mask=mask).cache
    out = []
    for question in (*questions, questions[0]):
        full = torch.cat([mask, torch.ones_like(question)], dim=1)
        branch = copier(cache)
        out.append(model(question, attention_mask=full, cache=branch).logits)
        assert branch.columns == full.shape[1]
    del branch
    assert cache.columns == prompt.shape[1]
    full = torch.cat([mask, torch.ones_like(questions[0])], dim=1)
    out.append(model(questions[0], attention_mask=full, cache=cache).logits)
    cache.free()
    assert model.cp.cache.pool.num_used == 0
    return out


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy])
@by_layout
def test_a_copied_cache_goes_its_own_way(ranks, layout, copier) -> None:
    prompt, questions = tokens(10), [tokens(3, 2), tokens(5, 3)]
    plain = TINY.build()
    wanted = [*questions, questions[0], questions[0]]
    with torch.no_grad():
        expected = [
            plain(torch.cat([prompt[:, 1:], q], 1)).logits[:, -q.shape[1] :] for q in wanted
        ]
    args = layout, prompt, questions, copier
    for result in ranks(4).run(share_a_prompt, *args, n=layout.ranks):
        for got, right in zip(result, expected, strict=True):
            assert parity.relative_error(got, right.double()) < 1e-5


def test_a_cache_of_another_model_is_refused() -> None:
    model, other = alone(), alone()
    cache = other(tokens(4)).cache
    for call in (model, model.generate):
        with pytest.raises(ConfigError, match="a cache of another model"):
            call(tokens(5), cache=cache)
    assert cache.columns == 4


def test_garbage_is_collected_amid_a_step() -> None:
    model, ids = alone(), tokens(7)
    gc.disable()
    try:
        cycle = [model(ids)]
        cycle.append(cycle)
        used = model.cp.cache.pool.num_used
        del cycle
        hook = model.model.layers[0].register_forward_hook(lambda *_: gc.collect() and None)
        out = model(ids)
        hook.remove()
    finally:
        gc.enable()
    assert used == model.cp.cache.pool.num_used == model.cp.cache.blocks_for([]) + 2
    with torch.no_grad():
        assert parity.relative_error(out.logits, TINY.build()(ids).logits.double()) < 1e-5


def test_a_loop_of_single_steps_grows_the_cache_seldom() -> None:
    model = alone()
    out, sizes = model(tokens(1)), set()
    for i in range(120):
        out = model(tokens(1, i), cache=out.cache)
        sizes.add(model.cp.cache.pool.num_blocks)
    assert max(sizes) >= 31  # of 4 tokens
    assert max(sizes) <= 31 * 1.25
    assert len(sizes) < 16


def move_weights(layout: Layout, ids):
    model = layout.parallelize(TINY.build())
    out = model(ids)
    model.to(torch.float64)
    with pytest.raises(ConfigError, match=r"float64.*the cache holds 1 sequences in torch.float32"):
        model(ids)
    out.cache.free()
    generated = model.generate(ids, **GREEDY)
    assert model.cp.cache.dtype == torch.float64
    return model(ids).logits, generated


@by_layout
def test_the_cache_follows_the_dtype_of_the_weights(ranks, layout) -> None:
    ids, plain = tokens(7), TINY.build().double()
    with torch.no_grad():
        logits = plain(ids).logits
    generated = plain.generate(ids, **GREEDY)
    for got, text in ranks(4).run(move_weights, layout, ids, n=layout.ranks):
        assert parity.relative_error(got, logits) < 1e-6  # lse is in float32
        assert torch.equal(text, generated)


# Models


class Doubled(torch.nn.Linear):
    """Stands for an adapter: its Parameters are not all of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class OtherAttention(LlamaAttention):
    pass


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "o_proj", "class"])
def test_changed_attention_is_refused_before_anything_changes(part: str) -> None:
    model, ids = TINY.build(), tokens(5)
    last = model.model.layers[1].self_attn
    if part == "class":
        last.__class__, message = OtherAttention, "1 modules of class LlamaAttention"
    else:
        getattr(last, part).__class__ = Doubled
        message = rf"layers\.1\.self_attn\.{part} of type Doubled"
    with torch.no_grad():
        before = model(ids).logits
        with pytest.raises(ConfigError, match=message):
            LAYOUTS[0].parallelize(model)
        assert torch.equal(model(ids).logits, before)


def doubled_dense(layout: Layout, ids):
    model = TINY.build()
    model.model.layers[1].mlp.up_proj.__class__ = Doubled
    model.lm_head.__class__ = Doubled
    with torch.no_grad():
        expected = model(ids).logits
    model = layout.parallelize(model)
    kept = [d.name for d in model.cp.dense if not d.sharded and "plain nn.Linear" in d.reason]
    return kept, parity.relative_error(model(ids).logits, expected.double())


def test_changed_dense_layers_stay_whole(ranks) -> None:
    for kept, error in ranks(4).run(doubled_dense, LAYOUTS[2], tokens(5), n=2):
        assert kept == ["model.layers.1.mlp", "lm_head"]
        assert error < 1e-5


# Options


@pytest.mark.parametrize("where", ["argument", "passed", "default"])
def test_generation_without_a_cache_equals_transformers(where: str) -> None:
    ids, model, plain = tokens(7), alone(), TINY.build()
    options = dict(GREEDY)
    if where == "argument":
        options["use_cache"] = False
    elif where == "passed":
        options = {"generation_config": GenerationConfig(use_cache=False, **GREEDY)}
    else:
        model.generation_config.use_cache = False
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **GREEDY))
    assert model.cp.cache.pool.num_blocks == 4, "more than one step of 14 tokens was cached"


def test_options_that_would_give_wrong_tokens_are_refused() -> None:
    model, ids = alone(), tokens(6)
    cache = model(ids[:, :3]).cache
    with pytest.raises(ConfigError, match="use_cache=False with a cache"):
        model.generate(ids, cache=cache, use_cache=False, **GREEDY)
    right = torch.tensor([[1, 1, 1, 1, 1, 0]])
    with pytest.raises(ConfigError, match=r"last column has padding.*padding_side"):
        model.generate(ids, attention_mask=right, **GREEDY)
    model.config.output_hidden_states = True
    with pytest.raises(ConfigError, match="output_hidden_states=True"):
        model(ids)


def longrope() -> LlamaForCausalLM:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    }
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_parameters=rope,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.25)
    return model


def run_longrope(topology: Topology, ids):
    return parallelize(longrope(), CPMesh(topology))(ids).logits


def test_rope_that_depends_on_the_length_is_right_or_refused(ranks) -> None:
    ids = tokens(20)
    with torch.no_grad():
        expected = longrope()(ids).logits
    for got in ranks(4).run(run_longrope, Topology(tp=2), ids, n=2):
        assert parity.relative_error(got, expected.double()) < 1e-5
    with pytest.raises(ConfigError, match="rope_type='longrope' with pcp=2"):
        ranks(4).run(run_longrope, Topology(pcp=2, dcp=2), ids, n=2)


# Ranks that would part ways


def time_limit(layout: Layout) -> None:
    layout.parallelize(TINY.build()).generate(tokens(4), max_time=60.0, **GREEDY)


def other_options(layout: Layout, how: str) -> None:
    model = layout.parallelize(TINY.build())
    length = 4 + torch.distributed.get_rank()
    if how == "argument":
        model.generate(tokens(4), **{**GREEDY, "max_new_tokens": length})
    elif how == "passed":
        config = GenerationConfig(**{**GREEDY, "max_new_tokens": length})
        model.generate(tokens(4), generation_config=config)
    else:
        model.generation_config.max_length = 10 + length
        model.generate(tokens(4), do_sample=False)


@pytest.mark.parametrize("how", ["argument", "passed", "default"])
def test_options_that_differ_between_ranks_are_refused(ranks, how: str) -> None:
    with pytest.raises(ConfigError, match="inputs that differ between ranks"):
        ranks(4).run(other_options, LAYOUTS[1], how, n=2)


class Favour(LogitsProcessor):
    """Alike on all ranks, though every rank has an object of its own."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 3.0 * torch.arange(scores.shape[-1]).remainder(7)

    def __repr__(self) -> str:  # by default the address, which may or may not differ
        return f"Favour of process {os.getpid()}"


def process_logits(layout: Layout):
    model = layout.parallelize(TINY.build())
    processors = LogitsProcessorList([Favour()])
    criteria = StoppingCriteriaList([MaxLengthCriteria(9)])
    out = model.generate(
        tokens(4), logits_processor=processors, stopping_criteria=criteria, **GREEDY
    )
    return out, repr(processors)


def test_processors_of_each_rank_are_not_taken_for_other_options(ranks) -> None:
    plain = TINY.build()
    expected = plain.generate(
        tokens(4),
        logits_processor=LogitsProcessorList([Favour()]),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(9)]),
        **GREEDY,
    )
    assert not torch.equal(expected, plain.generate(tokens(4), **GREEDY)[:, :9])
    (first, one), (second, other) = ranks(4).run(process_logits, LAYOUTS[1], n=2)
    assert one != other
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def test_a_time_limit_is_refused_on_several_ranks(ranks) -> None:
    with pytest.raises(ConfigError, match=r"max_time=60.0: the clocks of several ranks differ"):
        ranks(4).run(time_limit, LAYOUTS[1], n=2)
    time_limit(LAYOUTS[0])


class Streamer:
    """A client that goes away from rank 1 in the middle."""

    def put(self, value: torch.Tensor) -> None:
        if value.numel() == 1 and torch.distributed.get_rank() == 1:
            raise ValueError("the client is gone")

    def end(self) -> None:
        pass


def fail_between_steps(layout: Layout, how: str):
    model, rank = layout.parallelize(TINY.build()), torch.distributed.get_rank()
    options = {"streamer": Streamer()} if how == "streamer" else {"num_beams": 1 + rank}
    began = time.monotonic()
    try:
        model.generate(tokens(4), **options, **GREEDY)
    except (ValueError, RankFailedError) as error:
        took = time.monotonic() - began
        time.sleep(5.0 * rank)  # alive and silent, as a server would be
        assert model.cp.cache.pool.num_used == 0
        return type(error).__name__, str(error), took
    raise AssertionError("generation went on although a rank failed")


@pytest.mark.parametrize(
    ("how", "message"), [("streamer", "the client is gone"), ("options", "num_beams=2")]
)
def test_a_rank_that_raises_outside_a_step_is_named(ranks, how: str, message: str) -> None:
    waiting, failed = ranks(4).run(fail_between_steps, LAYOUTS[1], how, n=2)
    assert failed[0] in ("ValueError", "ConfigError") and message in failed[1]
    assert waiting[0] == "RankFailedError"
    assert "rank 1 failed" in waiting[1] and message in waiting[1]
    assert waiting[2] < 5

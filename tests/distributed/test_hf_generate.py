"""``generate`` and calls on several ranks: results, refusals, capacity and recovery."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import parity
import pytest
import torch
from parity import Layout, Tiny

from cplayers import CacheFullError, ConfigError, RankFailedError
from cplayers.testing import RankPoolError

TINY = Tiny("llama", 8, 2)
LAYOUTS = [
    Layout(1, 1, 1, 3, 4),
    Layout(1, 2, 2, 16, 16),
    Layout(4, 2, 1, 1, 4, "ag_rs"),
    Layout(2, 4, 2, 3, 4, "a2a", "tpa"),
    Layout(4, 4, 2, 40, 16, "ar"),
]
EIGHT_RANKS = pytest.param(LAYOUTS[4], marks=pytest.mark.slow)
"""Where a failure is to be survived: replacing the ranks that died takes longest here."""
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def batch(rows: int = 3, width: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = [width, 5, 1][:rows]
    return parity.left_padded([torch.randint(1, 96, (n,), generator=generator) for n in lengths])


def generate(layout: Layout, options: dict, ids, mask, num_blocks=None):
    model = layout.parallelize(TINY.build(), num_blocks=num_blocks)
    torch.manual_seed(3 + torch.distributed.get_rank() if layout.ranks > 1 else 3)
    out = model.generate(ids, attention_mask=mask, **options)
    assert model.cp.cache.pool.num_used == 0, "generate leaves blocks behind"
    return out


def same_on_all(results):
    for result in results[1:]:
        assert torch.equal(result, results[0])
    return results[0]


@by_layout
def test_greedy_left_padded_batch_equals_transformers(ranks, layout) -> None:
    ids, mask = batch()
    expected = TINY.build().generate(ids, attention_mask=mask, **GREEDY)
    got = same_on_all(ranks(8).run(generate, layout, GREEDY, ids, mask, n=layout.ranks))
    assert torch.equal(got, expected)


@by_layout
def test_sampling_draws_the_tokens_of_one_process_on_all_ranks(ranks, layout) -> None:
    ids, mask = batch()
    options = {**GREEDY, "do_sample": True, "temperature": 1.3, "num_return_sequences": 2}
    plain = TINY.build()
    torch.manual_seed(3)
    expected = plain.generate(ids, attention_mask=mask, **options)
    greedy = plain.generate(ids, attention_mask=mask, **GREEDY)
    assert not torch.equal(expected[::2], greedy), "the seed draws greedy tokens: choose another"
    got = same_on_all(ranks(8).run(generate, layout, options, ids, mask, n=layout.ranks))
    assert torch.equal(got, expected)


def ones(ids: torch.Tensor) -> dict:
    return {**GREEDY, "attention_mask": torch.ones_like(ids)}


def continue_chat(layout: Layout, first, more):
    model = layout.parallelize(TINY.build())
    one = model.generate(first, return_dict_in_generate=True, **ones(first))
    two = torch.cat([one.sequences, more], dim=1)
    out = model.generate(two, cache=one.cache, **ones(two))
    hidden = {"attention_mask": ones(out)["attention_mask"].index_fill(1, torch.tensor([3]), 0)}
    with pytest.raises(ConfigError, match="cannot be masked later"):
        model.generate(out, cache=one.cache, **GREEDY, **hidden)
    one.cache.free()
    assert model.cp.cache.pool.num_used == 0
    return out


@by_layout
def test_a_returned_cache_continues_a_conversation(ranks, layout) -> None:
    generator = torch.Generator().manual_seed(4)
    first, more = (torch.randint(1, 96, (2, n), generator=generator) for n in (7, 5))
    plain = TINY.build()
    two = torch.cat([plain.generate(first, **ones(first)), more], dim=1)
    expected = plain.generate(two, **ones(two))
    got = same_on_all(ranks(8).run(continue_chat, layout, first, more, n=layout.ranks))
    assert torch.equal(got, expected)


@by_layout
def test_prompt_lookup_equals_greedy(ranks, layout) -> None:
    ids = torch.randint(1, 96, (1, 15)).repeat(1, 2)
    expected = TINY.build().generate(ids, **GREEDY)
    options = {**GREEDY, "prompt_lookup_num_tokens": 3}
    got = ranks(8).run(generate, layout, options, ids, torch.ones_like(ids), n=layout.ranks)
    assert torch.equal(same_on_all(got), expected)


def call(layout: Layout, kwargs: dict):
    model = layout.parallelize(TINY.build())
    out = model(**kwargs)
    used = model.cp.cache.pool.num_used
    logits, loss = out.logits, out.loss
    del out
    return logits, loss, used, model.cp.cache.pool.num_used


@by_layout
def test_calls_with_masks_labels_and_embeddings(ranks, layout) -> None:
    plain = TINY.build()
    ids, mask = batch()
    embeds = plain.get_input_embeddings()(ids).detach()
    # the first token of a row is predicted from padding, whose logits mean nothing
    labels = ids.masked_fill(mask.cumsum(1) < 2, -100)
    for kwargs in (
        {"input_ids": ids, "attention_mask": mask, "labels": labels},
        {"inputs_embeds": embeds, "attention_mask": mask, "labels": labels},
        {"input_ids": ids, "attention_mask": mask.flip(1), "logits_to_keep": 2},
        {"input_ids": ids, "logits_to_keep": torch.tensor([1, 4])},
        {"input_ids": ids, "attention_mask": mask, "use_cache": False},
    ):
        with torch.no_grad():
            expected = plain(**{k: v for k, v in kwargs.items() if k != "logits_to_keep"})
        logits = expected.logits
        keep = kwargs.get("logits_to_keep", 0)
        keep = slice(-keep, None) if isinstance(keep, int) else keep
        real = kwargs.get("attention_mask", torch.ones_like(ids)).bool()[:, keep]
        for got, loss, used, after in ranks(8).run(call, layout, kwargs, n=layout.ranks):
            assert parity.relative_error(got[real], logits[:, keep][real].double()) < 1e-5
            assert not got[~real].any(), "padding has logits 0"
            if "labels" in kwargs:
                torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)
            assert (used > 0) == ("use_cache" not in kwargs)
            assert after == 0, "blocks are freed with the output that holds them"


def refusals(layout: Layout) -> list[str]:
    """Each bad call raises ConfigError on every rank, and a good one works afterwards."""
    model = layout.parallelize(TINY.build())
    ids = torch.randint(1, 96, (1, 6), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, **GREEDY)
    rank = torch.distributed.get_rank() if layout.ranks > 1 else 0
    calls = {
        "max_position_embeddings=128": lambda: model(ids.repeat(1, 22)),
        "at least one token": lambda: model(ids[:, :0]),
        "not padding": lambda: model(ids, attention_mask=torch.zeros_like(ids)),
        "generate: at least one token": lambda: model.generate(ids[:, :0], **GREEDY),
        "num_beams=4": lambda: model.generate(ids, num_beams=4, **GREEDY),
        "cache_implementation='static'": lambda: model.generate(
            ids, cache_implementation="static", **GREEDY
        ),
        "a mask has shape": lambda: model(ids, attention_mask=torch.ones(1, 1, 6, 6)),
        "one position per new column": lambda: model(ids, position_ids=torch.arange(3)[None]),
        "output_attentions": lambda: model(ids, output_attentions=True),
        "exactly one of them": lambda: model(),
        "save the model before": lambda: model.save_pretrained("nowhere"),
    }
    if layout.ranks > 1:
        calls["same inputs"] = lambda: model.generate(ids + rank % 2, **GREEDY)
    messages = []
    for name, bad in calls.items():
        try:
            bad()
        except ConfigError as error:
            assert "Remedy" in str(error)
            messages.append(f"{name}: {error}")
        else:
            raise AssertionError(f"{name} was not refused")
        assert model.cp.cache.pool.num_used == 0, name
    model.config.attention_dropout = 0.1
    model.train()
    try:
        model(ids)
    except ConfigError as error:
        messages.append(f"model.eval(): {error}")
    model.eval()
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    return messages


@by_layout
def test_bad_calls_are_refused_alike_and_nothing_is_lost(ranks, layout) -> None:
    results = ranks(8).run(refusals, layout, n=layout.ranks)
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 12 + (layout.ranks > 1)
    for message in results[0]:
        name, text = message.split(": ", 1)
        name = name.removeprefix("generate: ")
        assert name.split(": ")[-1] in text or name == "generate", message


def fill(layout: Layout):
    model = layout.parallelize(TINY.build(), num_blocks=3)  # 3 * 4 * cp tokens
    room = 12 * layout.dcp
    ids = torch.randint(1, 96, (1, room), generator=torch.Generator().manual_seed(2))
    first = model(ids)
    before = model.cp.cache.length(first.cache.seqs[0]), model.cp.cache.pool.num_used
    try:
        model(ids[:, :1], cache=first.cache)
    except CacheFullError as error:
        message = str(error)
    after = model.cp.cache.length(first.cache.seqs[0]), model.cp.cache.pool.num_used
    assert before == after == (room, 3)
    first.cache.free()
    short = ids[:, : room - 12]
    return message, model.generate(ids[:, :4], max_new_tokens=8, do_sample=False), short


@pytest.mark.parametrize(
    "layout", [Layout(1, 1, 1, 4, 4), Layout(1, 2, 2, 4, 4), Layout(4, 2, 1, 2, 4)], ids=str
)
def test_a_full_cache_refuses_and_goes_on_after_free(ranks, layout) -> None:
    results = ranks(8).run(fill, layout, n=layout.ranks)
    for message, tokens, _ in results:
        assert message == results[0][0] and "free or truncate" in message
        expected = TINY.build().generate(
            tokens[:, :4], max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        assert torch.equal(tokens, expected)


def fail_in_a_layer(layout: Layout, how: str, clock: str = os.devnull):
    model = layout.parallelize(TINY.build())
    ids = torch.randint(1, 96, (1, 6), generator=torch.Generator().manual_seed(0))
    last = layout.ranks - 1
    calls = 0

    def hook(*_):
        nonlocal calls
        calls += 1
        if calls == 9 and torch.distributed.get_rank() == last:
            Path(clock).write_text(str(time.time()))
            if how == "raise":
                raise ValueError("a layer broke")
            os.kill(os.getpid(), signal.SIGKILL)

    model.model.layers[1].mlp.register_forward_hook(hook)
    model.generate(ids, **GREEDY)


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[2], EIGHT_RANKS], ids=str)
@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_rank_that_fails_ends_the_others_with_its_name(ranks, layout, how, tmp_path) -> None:
    clock = tmp_path / "failed-at"
    with pytest.raises(RankPoolError, match=f"rank {layout.ranks - 1}"):
        ranks(8).run(fail_in_a_layer, layout, how, str(clock), n=layout.ranks)
    assert time.time() - float(clock.read_text()) < 30


def survivors_name(layout: Layout):
    try:
        fail_in_a_layer(layout, "raise")
    except (ValueError, RankFailedError) as error:
        return type(error).__name__, getattr(error, "rank", None), str(error)
    raise AssertionError("generation went on although a rank failed")


@pytest.mark.parametrize("layout", [LAYOUTS[1], EIGHT_RANKS], ids=str)
def test_survivors_are_told_which_rank_failed_and_why(ranks, layout) -> None:
    *others, failed = ranks(8).run(survivors_name, layout, n=layout.ranks)
    assert failed[0] == "ValueError"
    for kind, rank, message in others:
        assert (kind, rank) == ("RankFailedError", layout.ranks - 1)
        assert "a layer broke" in message


def unknown_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    from cplayers.hf import parallelize
    from cplayers.mesh import CPMesh, Topology

    tiny = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=8, n_positions=8))
    parallelize(tiny, CPMesh(Topology()))


def test_models_that_cannot_be_swapped_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*MistralForCausalLM.*Qwen2.*Qwen3"):
        unknown_model()


@pytest.mark.parametrize("q_proj", ["gather", "tpa"])
def test_illegal_head_layouts_change_nothing(ranks, q_proj) -> None:
    layout = Layout(3, 3, 1, q_proj=q_proj)
    for names in ranks(8).run(refuse_layout, layout, n=3):
        assert names == ["unchanged", "num_heads=8", "tp=3"]


def refuse_layout(layout: Layout):
    model = TINY.build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    try:
        layout.parallelize(model)
    except ConfigError as error:
        same = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        names = [name for name in ("num_heads=8", "tp=3") if name in str(error)]
        return ["unchanged" if same else "changed", *names]
    raise AssertionError("8 heads on tp=3 were accepted")

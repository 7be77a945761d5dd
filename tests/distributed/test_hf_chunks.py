"""Prompts computed in chunks, and drafts that are verified, give what the plain model gives."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace
from typing import Any

import parity
import parity_mla
import pytest
import torch
from parity import Layout, Tiny, left_padded, relative_error
from parity_mla import LayoutMLA, TinyMLA
from parity_windows import LayoutWindow, TinyWindow
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from cplayers import CacheFullError, ConfigError, CPMesh, RankFailedError, Topology
from cplayers.hf import CPCache, parallelize

TOLERANCE = 1e-4  # relative to the largest logit; fp32 against float64
LLAMA, V3 = Tiny("llama", 8, 2), TinyMLA("deepseek_v3", 12, 4)
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@dataclass(frozen=True)
class ChunkedMLA(LayoutMLA):
    chunk_size: int | None = None
    prefill: str = "auto"

    def parallelize(self, model: Any, **options: Any) -> Any:
        own = {"chunk_size": self.chunk_size, "prefill": self.prefill}
        return super().parallelize(model, **own | options)


LAYOUTS = [
    LayoutWindow(1, 1, 1, 3, 4, chunk_size=7),
    LayoutWindow(1, 2, 2, 3, 4, chunk_size=17, prefill="ring"),
    LayoutWindow(2, 2, 1, 1, 4, q_proj="tpa", chunk_size=5),
    LayoutWindow(2, 2, 2, 16, 16, "ag_rs", chunk_size=20, prefill="gather_kv"),
]
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 96, (1, count), generator=torch.Generator().manual_seed(seed))


def in_order(layouts: list[Any]) -> list[tuple[int, list[Any]]]:
    """By number of ranks."""
    ordered = sorted(layouts, key=lambda x: x.ranks)
    return [(n, list(group)) for n, group in itertools.groupby(ordered, lambda x: x.ranks)]


# Logits and tokens


@pytest.mark.parametrize(
    ("tiny", "module"), [(LLAMA, parity), (V3, parity_mla)], ids=["GQA", "MLA"]
)
def test_chunks_of_any_size_equal_transformers(ranks, tiny, module) -> None:
    """Prompts of 1 to 64 and 1 to 205 tokens in one left-padded batch; then 12 tokens."""
    if module is parity:
        chosen: list[Any] = [
            LayoutWindow(1, 1, 1, 3, 4, chunk_size=1),
            LayoutWindow(1, 1, 1, 16, 16, chunk_size=63),
            LayoutWindow(1, 2, 2, 3, 4, chunk_size=7, prefill="gather_kv"),
            LayoutWindow(1, 2, 2, 1, 4, "ar", chunk_size=30, prefill="ring"),
            LayoutWindow(1, 1, 2, 16, 16, chunk_size=16),
            LayoutWindow(2, 2, 1, 2, 4, "ag_rs", "tpa", chunk_size=17),
            LayoutWindow(2, 2, 2, 3, 4, chunk_size=33, prefill="gather_q"),
            LayoutWindow(2, 4, 2, 1, 4, q_proj="tpa", chunk_size=7),
        ]
    else:
        chosen = [
            ChunkedMLA(1, 1, 1, 3, 4, decode="auto", chunk_size=16),
            ChunkedMLA(1, 2, 2, 3, 4, decode="gather_q", chunk_size=50, prefill="gather_q"),
            ChunkedMLA(1, 1, 2, 16, 4, decode="gather_kv", chunk_size=100),
            ChunkedMLA(2, 2, 1, 1, 16, "ag_rs", decode="replicate_q", chunk_size=204),
            ChunkedMLA(2, 2, 2, 3, 4, decode="auto", chunk_size=64, prefill="ring"),
            ChunkedMLA(2, 4, 2, 1, 4, "ar", decode="gather_q", chunk_size=41, prefill="gather_kv"),
        ]
    expected = module.expect(tiny)
    for size, part in in_order(chosen):
        results = ranks(4).run(module.compare, tiny, part, expected, n=size)
        for layout, (error, wrong) in zip(part, results[0], strict=True):
            assert (wrong, error < TOLERANCE) == (0, True), f"{layout}: {wrong} {error:.1e}"
        assert all(result == results[0] for result in results)


def count_rows(layout: LayoutWindow, ids: Tensor, mask: Tensor):
    """Rows of each step on this rank, and calls of lm_head."""
    model, rows, heads = layout.parallelize(LLAMA.build()), [], []
    first = model.model.layers[0]
    first.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    model.lm_head.register_forward_pre_hook(lambda _, args: heads.append(args[0].shape))
    out = model(ids, attention_mask=mask, logits_to_keep=1)
    model(ids[:, :3], attention_mask=torch.cat([mask, mask[:, -3:]], 1), cache=out.cache)
    return rows, heads


def test_a_step_has_at_most_a_chunk_of_each_row(ranks) -> None:
    ids, mask = left_padded([tokens(n, n)[0] for n in (40, 16, 3)])
    for layout in LAYOUTS:
        size, parts = layout.chunk_size, [40, 16, 3]
        wanted = []
        while any(parts):
            wanted.append(sum(min(size, n) for n in parts))
            parts = [max(0, n - size) for n in parts]
        results = ranks(4).run(count_rows, layout, ids, mask, n=layout.ranks)
        for rows, heads in results:
            assert len(rows) == len(wanted) + 1
            assert rows[-1] == 9
            assert max(rows) <= 3 * size
            assert [tuple(shape[:2]) for shape in heads] == [(3, 1), (3, 3)]
        if layout.pcp == 1:
            assert results[0][0][:-1] == wanted
        else:  # all rows of a first chunk are split
            assert sum(rows[0] for rows, _ in results) == wanted[0] * layout.tp


def call(layout: LayoutWindow, calls: list[dict[str, Any]]):
    model = layout.parallelize(LLAMA.build())
    out = [model(**kwargs) for kwargs in calls]
    return [(x.logits, x.loss, x.get("cache") is not None) for x in out]


@by_layout
def test_columns_masks_and_labels_do_not_know_of_chunks(ranks, layout) -> None:
    ids, mask = left_padded([tokens(n, n)[0] for n in (33, 16, 1)])
    right = mask.flip(1)
    labels = ids.masked_fill(mask.cumsum(1) < 2, -100)
    embeds = LLAMA.build().get_input_embeddings()(ids).detach()
    positions = (mask.cumsum(1) - 1).clamp(min=0) * 2
    calls: list[dict[str, Any]] = [
        {"input_ids": ids, "attention_mask": mask, "labels": labels},
        {"input_ids": ids, "attention_mask": right, "logits_to_keep": 20},
        {"input_ids": ids, "logits_to_keep": torch.tensor([30, 2, 2, 17, 32])},
        {"input_ids": ids, "attention_mask": mask, "logits_to_keep": torch.tensor([0, 32])},
        {"inputs_embeds": embeds, "attention_mask": mask, "use_cache": False},
        {"input_ids": ids, "attention_mask": mask, "position_ids": positions},
    ]
    plain = LLAMA.build().double()
    expected = []
    for kwargs in calls:
        kept = {k: v for k, v in kwargs.items() if k not in ("logits_to_keep", "use_cache")}
        if "inputs_embeds" in kept:
            kept["inputs_embeds"] = kept["inputs_embeds"].double()
        with torch.no_grad():
            out = plain(**kept)
        keep = kwargs.get("logits_to_keep", 0)
        keep = slice(-keep, None) if isinstance(keep, int) else keep
        real = kwargs.get("attention_mask", torch.ones_like(ids)).bool()[:, keep]
        expected.append((out.logits[:, keep], real, out.loss))
    for result in ranks(4).run(call, layout, calls, n=layout.ranks):
        for (got, loss, cached), (right_logits, real, right_loss), kwargs in zip(
            result, expected, calls, strict=True
        ):
            assert got.shape == right_logits.shape
            assert relative_error(got[real], right_logits[real]) < TOLERANCE
            assert not got[~real].any(), "padding has logits 0"
            assert cached == kwargs.get("use_cache", True)
            if right_loss is not None:
                assert loss == pytest.approx(float(right_loss), rel=1e-5)


def generate(tiny: Any, layout: Any, ids: Tensor, mask: Tensor, options: dict[str, Any]):
    model = layout.parallelize(tiny.build())
    out = model.generate(ids, attention_mask=mask, **options)
    assert model.cp.cache.pool.num_used == 0
    return out


@by_layout
def test_generate_equals_the_plain_model(ranks, layout) -> None:
    ids, mask = left_padded([tokens(n, n)[0] for n in (45, 20, 2)])
    expected = LLAMA.build().generate(ids, attention_mask=mask, **GREEDY)
    for got in ranks(4).run(generate, LLAMA, layout, ids, mask, GREEDY, n=layout.ranks):
        assert torch.equal(got, expected)


def go_on(layout: LayoutWindow, first: Tensor, mask: Tensor, more: Tensor):
    """A chunked second prompt, on a copy and on the cache itself; their logits."""
    model = layout.parallelize(LLAMA.build())
    cache = model(first, attention_mask=mask).cache
    mask = torch.cat([mask, torch.ones_like(more)], 1)
    branch = copy.deepcopy(cache)
    one = model(more, attention_mask=mask, cache=branch).logits
    two = model(more, attention_mask=mask, cache=cache).logits
    assert branch.columns == cache.columns == mask.shape[1]
    return one, two


@by_layout
def test_a_second_prompt_comes_in_chunks_too(ranks, layout) -> None:
    first, mask = left_padded([tokens(n, n)[0] for n in (30, 9)])
    more = torch.cat([tokens(50, 2), tokens(50, 3)])
    plain = LLAMA.build().double()
    with torch.no_grad():
        right = torch.stack(
            [
                plain(torch.cat([row[keep.bool()], new])[None]).logits[0, -50:]
                for row, keep, new in zip(first, mask, more, strict=True)
            ]
        )
    for one, two in ranks(4).run(go_on, layout, first, mask, more, n=layout.ranks):
        assert relative_error(one, right) < TOLERANCE
        assert relative_error(two, right) < TOLERANCE


# Failure


class Broken:
    """Raises at the n-th call of a module, on all ranks or on one."""

    def __init__(self, module: Any, at: int, rank: int | None = None) -> None:
        self.calls, self.at, self.rank = 0, at, rank
        self.handle = module.register_forward_hook(self)

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        alone = self.rank is None or torch.distributed.get_rank() == self.rank
        if self.calls == self.at and alone:
            raise ValueError(f"broken at {self.at}")


def state(model: Any, cache: CPCache) -> tuple[Any, ...]:
    """What the caller can see of a cache."""
    paged = model.cp.cache
    lengths = [paged.length(seq) for seq in cache.seqs]
    seen = None if cache.seen is None else cache.seen.tolist()
    return cache.columns, seen, lengths, paged.pool.num_used


def fail_and_repeat(layout: LayoutWindow, first: Tensor, mask: Tensor, more: Tensor, where: str):
    """For each chunk: fail there, compare the cache, then repeat the call; all logits."""
    model = layout.parallelize(LLAMA.build())
    modules = {"layer": model.model.layers[1].mlp, "norm": model.model.norm, "head": model.lm_head}
    longer = torch.cat([mask, torch.ones_like(more)], 1)
    chunks = -(-more.shape[1] // layout.chunk_size)
    out = []
    for at in range(1, 2 if where == "head" else chunks + 1):
        cache = model(first, attention_mask=mask).cache
        before = state(model, cache)
        hook = Broken(modules[where], at)
        with pytest.raises(ValueError, match=f"broken at {at}"):
            model(more, attention_mask=longer, cache=cache)
        hook.handle.remove()
        assert hook.calls == at
        assert state(model, cache) == before
        out.append(model(more, attention_mask=longer, cache=cache).logits)
        cache.free()
    hook = Broken(modules[where], 1 if where == "head" else 2)  # of a call without a cache
    with pytest.raises(ValueError, match="broken"):
        model(more)
    hook.handle.remove()
    assert model.cp.cache.pool.num_used == 0
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("where", ["layer", "norm", "head"])
@by_layout
def test_a_chunk_that_fails_changes_nothing(ranks, layout, where) -> None:
    first, mask = left_padded([tokens(n, n)[0] for n in (11, 4)])
    more = torch.cat([tokens(27, 2), tokens(27, 3)])
    plain = LLAMA.build().double()
    with torch.no_grad():
        right = torch.stack(
            [
                plain(torch.cat([row[keep.bool()], new])[None]).logits[0, -27:]
                for row, keep, new in zip(first, mask, more, strict=True)
            ]
        )
    args = layout, first, mask, more, where
    for result in ranks(4).run(fail_and_repeat, *args, n=layout.ranks):
        assert len(result) == (1 if where == "head" else -(-27 // layout.chunk_size))
        for got in result:
            assert relative_error(got, right) < TOLERANCE


def fail_alone(layout: LayoutWindow, ids: Tensor):
    model = layout.parallelize(LLAMA.build())
    cache = model(ids[:, :9]).cache
    before = state(model, cache)
    Broken(model.model.layers[1].mlp, 2, rank=1)
    try:
        model(ids[:, 9:], cache=cache)
    except (ValueError, RankFailedError) as error:
        return type(error).__name__, str(error), before, state(model, cache)
    raise AssertionError("the call went on although a rank failed")


@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=str)
def test_a_rank_that_fails_in_a_chunk_leaves_all_caches_as_they_were(ranks, layout) -> None:
    waiting, failed = ranks(4).run(fail_alone, layout, tokens(60), n=2)
    assert failed[:2] == ("ValueError", "broken at 2")
    assert waiting[0] == "RankFailedError"
    assert "rank 1 failed" in waiting[1] and "broken at 2" in waiting[1]
    for _, _, before, after in (waiting, failed):
        assert before == after


def overfill(layout: LayoutWindow, ids: Tensor):
    """Rows computed before the refusal, the caches before and after, and what fits."""
    model = layout.parallelize(LLAMA.build(), num_blocks=8)
    room = 8 * layout.block_size * layout.dcp
    kept, rows = model(ids[:, : room // 2]).cache, []
    handle = model.model.layers[0].register_forward_hook(lambda *_: rows.append(1))
    before = state(model, kept)
    refused = 0
    for more in (ids[:, : room // 2 + 1], ids[:, :room]):
        for cache in (kept, None):
            try:
                model(more, cache=cache)
            except CacheFullError:
                refused += 1
            assert state(model, kept) == before
    handle.remove()
    return refused, len(rows), model(ids[:, : room // 2], cache=kept).logits.shape[1], room


@by_layout
def test_what_does_not_fit_is_refused_before_anything_is_computed(ranks, layout) -> None:
    layout = replace(layout, interleave_size=4, block_size=4)  # blocks hold whole turns
    for refused, rows, fits, room in ranks(4).run(overfill, layout, tokens(64), n=layout.ranks):
        assert (refused, rows) == (4, 0)
        assert fits == room // 2


# Settings


@pytest.mark.parametrize("size", [0, -7])
def test_a_chunk_has_a_token(size: int) -> None:
    model = LLAMA.build()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=f"chunk_size={size}.*at least one token"):
        Layout(1, 1, 1).parallelize(model, chunk_size=size)
    assert [type(module) for module in model.modules()] == kinds


def test_the_report_tells_the_size() -> None:
    model = LAYOUTS[0].parallelize(LLAMA.build())
    assert "\nchunks     at most 7 new tokens of a row in a step\n" in model.cp.report()
    assert "chunks" not in Layout(1, 1, 1).parallelize(LLAMA.build()).cp.report()


# Drafts


def draft_model() -> Any:
    """Like the model, so that many of its tokens are accepted; unlike it, so that some are not."""
    model = LLAMA.build()
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data += 0.05 * p.data.std() * torch.randn(p.shape, generator=generator)
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def speculate(layout: Layout, kind: str, count: int, ids: Tensor):
    """The text, how many drafted tokens were rejected, and how many forwards it took."""
    model, draft = layout.parallelize(LLAMA.build()), draft_model()
    draft.generation_config.num_assistant_tokens = count
    if kind == "parallelized":
        draft = layout.parallelize(draft)
    rejected, forwards, crop = [], [], CPCache.crop
    model.model.norm.register_forward_hook(lambda *_: forwards.append(1))

    def watched(cache: CPCache, removed: int) -> None:
        paged = cache.paged
        lengths = [paged.length(seq) for seq in cache.seqs]
        crop(cache, removed)
        after = [paged.length(seq) for seq in cache.seqs]
        if cache.seen is not None:  # a drafted pad token is taken for padding
            assert after == cache.seen.sum(1).tolist()
        else:
            assert after == [length + int(removed) for length in lengths] == [cache.columns]
        if paged is model.cp.cache:
            assert cache.seen is None
            rejected.append(-int(removed))

    CPCache.crop = watched  # type: ignore[method-assign]
    options = {**GREEDY, "max_new_tokens": 48}
    try:
        out = model.generate(ids, assistant_model=draft, **options)
    finally:
        CPCache.crop = crop  # type: ignore[method-assign]
    assert model.cp.cache.pool.num_used == 0
    assert kind == "plain" or draft.cp.cache.pool.num_used == 0
    return out, sum(rejected), len(forwards)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "count"), [("plain", 5), ("plain", 20), ("parallelized", 5)], ids=str
)
@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, Layout(2, 4, 2, 3, 4, q_proj="tpa"), Layout(1, 1, 2, 16, 16)],
    ids=str,
)
def test_drafts_of_an_assistant_are_verified(ranks, layout, kind, count) -> None:
    """20 drafted tokens are more than decode at once, and more than some chunks hold."""
    ids = tokens(15, seed=5)
    expected = LLAMA.build().generate(ids, **{**GREEDY, "max_new_tokens": 48})
    assert not (expected == 0).any(), "a pad token in the text is taken for padding by its drafter"
    for out, rejected, forwards in ranks(4).run(
        speculate, layout, kind, count, ids, n=layout.ranks
    ):
        assert torch.equal(out, expected)
        assert rejected > 10
        if getattr(layout, "chunk_size", None) is None:
            assert forwards < 40


@by_layout
def test_a_draft_from_the_prompt_is_verified(ranks, layout) -> None:
    ids = tokens(15).repeat(1, 3)
    options = {**GREEDY, "prompt_lookup_num_tokens": 10}
    expected = LLAMA.build().generate(ids, **GREEDY)
    for tiny in (LLAMA, TinyWindow("gemma2", kv_heads=2)):
        if tiny is not LLAMA:
            expected = tiny.build().generate(ids, **GREEDY)
        args = tiny, layout, ids, torch.ones_like(ids), options
        for got in ranks(4).run(generate, *args, n=layout.ranks):
            assert torch.equal(got, expected)


def test_an_early_exit_is_refused() -> None:
    model = LAYOUTS[0].parallelize(LLAMA.build())
    with pytest.raises(ConfigError, match="assistant_early_exit"):
        model.generate(tokens(4), assistant_early_exit=1, **GREEDY)


@pytest.mark.parametrize("size", [7, 8, 16])
def test_a_row_that_is_done_before_the_last_chunk(size: int) -> None:
    """Prompts of 16 and 18 tokens, left-padded: in the last chunk one of them brings nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    plain = LlamaForCausalLM(config).eval()
    ids, mask = torch.randint(3, 97, (2, 18)), torch.ones(2, 18, dtype=torch.long)
    mask[0, :2] = 0
    with torch.no_grad():
        expected = plain(input_ids=ids, attention_mask=mask).logits[:, -1]
        model = parallelize(plain, CPMesh(Topology()), chunk_size=size)
        found = model(input_ids=ids, attention_mask=mask).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

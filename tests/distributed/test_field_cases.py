"""Every known case from the field, by name: which test holds it, and the tests of those left.

A case comes from a public bug report (numbers are those of its tracker) and stands for a kind of
mistake. `CASES` says where each is tested; a test at the end sees to it that these tests are there.
"""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import attention_cases as plain
import mla_cases as latent
import pytest
import torch
from attention_cases import check_close, check_script
from mla_cases import COMBINES, DECODES, prompts, step
from torch import Tensor

from cplayers.attention import combine
from cplayers.mesh import CPMesh, Topology
from cplayers.ops import Partial, attend, merge

CASES: dict[str, tuple[str, ...]] = {
    "vLLM 28476, 28411: cached context gathered in pieces": (
        "unit/test_context_pieces.py::test_13_tokens_in_pieces_of_4_rows",
        "distributed/test_mla_layer.py::test_context_in_pieces_is_context_in_one",
    ),
    "vLLM 41229: a workspace shared by 3, 5, 6, 7, 9 requests": (
        "unit/test_context_pieces.py::test_any_number_of_requests_shares_the_workspace",
        "distributed/test_mla_layer.py::test_any_number_of_requests_shares_the_workspace",
    ),
    "vLLM 43729, SGLang 33325: partition sums 2 and 8, lse in base 2": (
        "unit/test_merge.py::test_weights_of_sums_two_and_eight",
        "unit/test_conformance.py::test_a_broken_backend_is_named",
        "distributed/test_combine.py::test_partition_sums_2_and_8_weigh_a_fifth_and_four_fifths",
    ),
    "vLLM 26296: prompts that part at token 150": (
        "unit/test_paged.py::test_a_prefix_hit_ends_before_the_first_difference",
        "property/test_prefix_machine.py::test_a_hit_ends_before_the_first_difference",
    ),
    "vLLM 31166, 53603: a dry run before any real request": (
        "unit/test_plan.py::test_vllm_31166_a_dry_run_has_one_length_per_request",
    ),
    "vLLM, skip of empty context": (
        "unit/test_context_pieces.py::test_a_context_on_one_rank_alone_is_gathered_by_all",
        "distributed/test_gqa_layer.py::"
        "test_context_shorter_than_one_interleave_leaves_ranks_empty",
        "distributed/test_mla_layer.py::"
        "test_context_shorter_than_one_interleave_leaves_ranks_empty",
        "distributed/test_field_cases.py::test_vllm_skip_of_empty_context_by_every_strategy",
    ),
    "vLLM, flashinfer 4484, 4051: rows and shards without keys, NaN beside them": (
        "unit/test_merge.py::test_worked_values",
        "unit/test_attend.py::test_rows_that_see_nothing",
        "distributed/test_field_cases.py::test_flashinfer_4484_a_request_without_keys",
        "distributed/test_field_cases.py::test_flashinfer_4051_nan_where_nothing_was_seen",
    ),
    "vLLM-Ascend 11492, 11849, FlashAttention 93: several new tokens over a sharded cache": (
        "unit/test_spans.py::test_several_new_tokens_over_a_sharded_cache",
        "unit/test_plan.py::test_vllm_ascend_11492_11849_several_new_tokens_over_a_sharded_cache",
        "distributed/test_gqa_layer.py::test_several_new_tokens_over_a_sharded_cache",
        "distributed/test_mla_layer.py::test_several_new_tokens_over_a_sharded_cache",
    ),
    "vLLM-Ascend 6491: new tokens 1, 3, 2": (
        "unit/test_plan.py::test_vllm_ascend_6491_offsets_are_per_request",
        "distributed/test_gqa_layer.py::test_packed_lengths",
        "distributed/test_mla_layer.py::test_packed_lengths",
    ),
    "vLLM-Ascend 5647, vLLM 36580: a step of 8 tokens, then one of 3": (
        "unit/test_plan.py::test_vllm_ascend_5647_padding_of_a_smaller_step_touches_nobody",
        "distributed/test_gqa_layer.py::test_a_step_of_fewer_tokens_touches_nobody_else",
    ),
    "SGLang 34161, 32858: 32 query heads read 2 KV heads by their global index": (
        "distributed/test_gqa_layer.py::test_32_query_heads_read_2_kv_heads_globally",
    ),
    "vLLM 42674, 48456: new tokens 1, 1, 7 in one batch": (
        "unit/test_plan.py::test_vllm_42674_48456_decodes_and_a_prompt_share_a_step",
        "distributed/test_gqa_layer.py::test_one_batch_equals_separate_calls",
        "distributed/test_mla_layer.py::test_packed_lengths",
    ),
    "TensorRT-LLM 10350: o_proj after context parallelism, and a wrong order of ranks": (
        "distributed/test_gqa_layer.py::test_o_proj_after_context_parallelism",
        "distributed/test_mla_layer.py::test_o_proj_after_context_parallelism",
        "distributed/test_mesh.py::test_device_meshes_that_do_not_fit_are_refused",
    ),
    "torch, lucidrains: lengths 1, 2, 3 and 30 on 4 ranks": (
        "unit/test_plan.py::test_prompts_shorter_than_the_group_leave_ranks_without_rows",
        "distributed/test_gqa_layer.py::test_packed_lengths",
        "distributed/test_mla_layer.py::test_packed_lengths",
    ),
    "vLLM-Ascend 11807: packed lengths 2, 0, 2": (
        "unit/test_plan.py::test_vllm_ascend_11807_an_empty_request_in_the_middle_shifts_nobody",
        "distributed/test_gqa_layer.py::test_packed_lengths",
        "distributed/test_mla_layer.py::test_packed_lengths",
    ),
    "LMCache 1732: 7 tokens on 2 ranks have 7 slots": (
        "unit/test_plan.py::test_lmcache_1732_every_token_has_a_slot_entry",
        "unit/test_context_pieces.py::test_a_chunk_of_7_tokens_has_7_slots",
    ),
    "ring-flash-attention 51: packed lengths 7, 7, 18 on 4 ranks": (
        "unit/test_plan.py::test_ring_flash_attention_51_no_length_has_to_divide_anything",
        "distributed/test_gqa_layer.py::test_packed_lengths",
        "distributed/test_mla_layer.py::test_packed_lengths",
    ),
    "EasyContext 14: lse 0 merged with 100, and with -1000": (
        "unit/test_merge.py::test_far_apart_stays_finite",
        "distributed/test_combine.py::test_merging_lse_0_with_100_and_with_minus_1000",
    ),
    "SGLang 37407: sink logits per head on 4 ranks": (
        "unit/test_merge.py::test_sink_is_one_more_logit_per_head",
        "distributed/test_field_cases.py::test_sglang_37407_sinks_count_once_by_global_head",
    ),
    "prime-rl 2828: a window of 4 over 16 tokens on 4 ranks": (
        "unit/test_spans.py::test_window_is_in_global_positions",
        "unit/test_plan.py::test_prime_rl_2828_a_window_reaches_only_the_shards_that_hold_it",
        "distributed/test_field_cases.py::test_prime_rl_2828_a_window_in_global_positions",
    ),
    "transformers: a left-padded batch of two prompts": (
        "distributed/test_hf_parity.py::test_sampled_layouts_equal_transformers",
        "distributed/test_hf_generate.py::test_greedy_left_padded_batch_equals_transformers",
    ),
    "transformers: Gemma 2, softcap and a window of 8": (
        "distributed/test_hf_windows.py::test_sampled_layouts_equal_transformers",
        "distributed/test_hf_windows.py::test_what_the_models_are_tested_for_changes_their_logits",
    ),
    "ring-flash-attention: dropout 0.1 while training": (
        "distributed/test_hf_generate.py::test_bad_calls_are_refused_alike_and_nothing_is_lost",
    ),
    "torch CPU flash operator: a row whose mask hides every key": (
        "unit/test_attend.py::test_rows_that_see_nothing",
        "unit/test_conformance.py::test_a_broken_backend_is_named",
    ),
}
STRATEGIES = ("auto", "gather_q", "gather_kv", "ring")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_vllm_skip_of_empty_context_by_every_strategy(ranks: Any, strategy: str) -> None:
    """vLLM, skip of empty context: N 4, I 16, context 10. Ranks 1 to 3 hold nothing: no hang.

    A prompt of 10 tokens, then a chunk of 3, a token, and a chunk for which 3 ranks have no row.
    """
    script = (prompts(10), prompts(3), prompts(1), prompts(1, 2))
    for topology in (Topology(tp=4, dcp=4), Topology(pcp=4, dcp=4), Topology(tp=2, pcp=2, dcp=4)):
        spread = {"interleave": 16, "block": 16, "prefill": strategy}
        for most, workspace in ((0, 16384), (0, 5), (2, 1)):
            spread |= {"max_decode_tokens": most, "workspace_tokens": workspace}
            check_script(ranks, plain.Setup(topology, 4, 1, **spread), script)
            check_script(ranks, plain.Setup(topology, 4, 1, window=4, **spread), script)
        layers = tuple(latent.Setup(topology, 4, decode=decode, **spread) for decode in DECODES)
        latent.check_scripts(ranks, layers, script)


@pytest.mark.parametrize("backend", ["auto", "cpu", "flash_cpu", "math", "rows_cpu"])
def test_flashinfer_4484_a_request_without_keys(backend: str) -> None:
    """flashinfer 4484: lengths [0, 2], query starts [0, 1, 5]; request 0 sees nothing.

    Its row is out 0, lse -inf, and weighs nothing when it is merged; the others see two keys.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*shape, generator=generator) for shape in ((5, 4, 8), (2, 2, 8), (2, 2, 8))
    )
    lo, hi = torch.zeros(5, dtype=torch.long), torch.tensor([0, 2, 2, 2, 2])
    found = attend(4 * q, k, v, lo, hi, scale=8**-0.5, backend=backend)
    assert not found.out[0].any() and found.lse[0].eq(-math.inf).all()
    heads = torch.arange(4) // 2
    logits = torch.einsum("tnh,snh->tns", 4 * q.double(), k.double()[:, heads]) * 8**-0.5
    want = torch.einsum("tns,snh->tnh", logits.softmax(-1), v.double()[:, heads])
    check_close(found.out[1:], want[1:])
    check_close(found.lse[1:], logits.logsumexp(-1)[1:])
    other = Partial(torch.ones(5, 4, 8), torch.zeros(5, 4))
    assert merge([found, other]).out[0].equal(other.out[0])
    both = merge([found, found])  # every shard empty
    assert not both.out[0].any() and both.lse[0].eq(-math.inf).all()
    assert both.out.isfinite().all()


def combine_foreign(topology: Topology, how: str, lse: float, seen: bool) -> Partial:
    """Rank 0 has out 5 and lse 1 where ``seen``; all else is a foreign kernel's NaN."""
    mesh = CPMesh(topology)
    out, base = torch.full((3, 4, 2), math.nan), torch.full((3, 4), lse)
    if seen and mesh.rank("dcp") == 0:
        out[1:], base[1:] = 5.0, 1.0
    return combine(Partial(out, base), mesh, how)


@pytest.mark.parametrize("how", COMBINES)
@pytest.mark.parametrize("lse", [-math.inf, math.inf, math.nan])
def test_flashinfer_4051_nan_where_nothing_was_seen(ranks: Any, how: str, lse: float) -> None:
    """vLLM, flashinfer 4051: out NaN beside lse -inf or +inf; some shards empty, then all."""
    for topology in (Topology(tp=2, dcp=2), Topology(tp=2, pcp=2, dcp=4), Topology(pcp=4, dcp=4)):
        for seen in (True, False):
            run = ranks(9).run
            for out, merged in run(
                combine_foreign, topology, how, lse, seen, n=topology.world_size
            ):
                assert not out[0].any() and merged[0].eq(-math.inf).all()
                assert out[1:].eq(5.0 if seen else 0.0).all()
                assert merged[1:].eq(1.0 if seen else -math.inf).all()


def own_sinks(setup: plain.Setup) -> Tensor:
    return plain.build(setup).layer.sinks.detach()


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize(
    ("topology", "q_proj"),
    [
        (Topology(tp=4, dcp=4), "gather"),
        (Topology(tp=4, dcp=4), "tpa"),
        (Topology(pcp=4, dcp=4), "gather"),
        (Topology(pcp=4), "gather"),
        (Topology(tp=2, pcp=2, dcp=4), "gather"),
        (Topology(tp=2, pcp=2, dcp=4), "tpa"),
    ],
    ids=str,
)
def test_sglang_37407_sinks_count_once_by_global_head(
    ranks: Any, topology: Topology, q_proj: str, combine: str
) -> None:
    """SGLang 37407: sink logits per head, N 4; exp(sink) counts once, whatever the strategy."""
    script = (prompts(13, 5), prompts(4, 7), prompts(1, 1))
    setup = plain.Setup(
        topology, 8, 1, q_proj=q_proj, combine=combine, sinks=True, interleave=3, seed=2
    )
    whole = plain.weights(setup)["sinks"].float()
    assert len(set(whole.tolist())) == 8
    own = 8 // topology.tp
    for rank, sinks in enumerate(ranks(9).run(own_sinks, setup, n=4)):
        place = topology.rank_in(rank, "tp")
        assert sinks.equal(whole[place * own : (place + 1) * own])
    for strategy in STRATEGIES:
        chunked = replace(setup, prefill=strategy, max_decode_tokens=2, workspace_tokens=8)
        outs = check_script(ranks, chunked, script)
    plainly = plain.Dense(replace(setup, sinks=False)).run(script)
    assert (outs[-1] - plainly[-1]).abs().max() > 0.05, "the sinks matter"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "topology",
    [
        Topology(tp=4, dcp=4),
        Topology(pcp=4, dcp=4),
        Topology(pcp=4),
        Topology(tp=2, pcp=2, dcp=4),
        Topology(tp=2, pcp=2, dcp=2),
    ],
    ids=str,
)
def test_prime_rl_2828_a_window_in_global_positions(
    ranks: Any, topology: Topology, strategy: str
) -> None:
    """prime-rl 2828: window 4, length 16, N 4, zigzag and interleaved by 1, 4 and 5."""
    for interleave, most in ((1, 0), (4, 2), (5, 0)):
        setup = plain.Setup(
            topology, 4, 1, window=4, interleave=interleave, block=2, prefill=strategy
        )
        setup = replace(setup, max_decode_tokens=most, workspace_tokens=8)
        script = (
            prompts(16),
            step(("a", 1)),
            ("forget", "a", 14),  # the next token sees 14, 15, 16 and itself
            step(("a", 9), ("b", 16)),
            step(("b", 1), ("a", 2)),
        )
        outs = check_script(ranks, setup, script)
    everything = plain.Dense(replace(setup, window=None)).run(script)
    assert (outs[-1] - everything[-1]).abs().max() > 0.05, "the window matters"


# The table


def test_every_case_has_its_tests() -> None:
    tests = Path(__file__).parents[1]
    assert len(CASES) == 24
    for case, names in CASES.items():
        assert names, case
        for name in names:
            file, _, function = name.partition("::")
            tree = ast.parse((tests / file).read_text())
            defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in defined, f"{case}: no test {name}"


def test_every_test_here_is_in_the_table() -> None:
    named = {name.partition("::")[2] for names in CASES.values() for name in names}
    tree = ast.parse(Path(__file__).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    tests = {node.name for node in functions if node.name.startswith("test_")}
    assert tests - named == {
        test.__name__
        for test in (test_every_case_has_its_tests, test_every_test_here_is_in_the_table)
    }

"""Layouts against worked placements, and against dealing the tokens one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cplayers.cache import InterleavedLayout, ZigzagLayout
from cplayers.errors import ConfigError
from cplayers.ops import spans

GOLD = json.loads((Path(__file__).parents[1] / "gold" / "placement.json").read_text())


def layout_of(case: dict[str, Any], block_size: int = 4) -> InterleavedLayout:
    return InterleavedLayout(
        case["cp_size"], case["interleave_size"], case.get("block_size", block_size)
    )


def test_the_gold_file_holds_what_the_tests_below_need() -> None:
    assert [len(GOLD[key]) for key in ("placement", "spans", "zigzag")] == [8, 5, 10]


@pytest.mark.parametrize("case", GOLD["placement"])
def test_slots_and_lengths_are_the_worked_ones(case: dict[str, Any]) -> None:
    layout = layout_of(case)
    table, pos = torch.tensor(case["block_table"]), torch.arange(case["length"])
    assert len(case["slots"]) == layout.cp_size
    for rank, slots in enumerate(case["slots"]):
        assert layout.slots(pos, table, rank).tolist() == slots
        assert layout.count_before(case["length"], rank) == case["lengths"][rank]
        assert layout.positions(rank, case["length"]).tolist() == [
            p for p, slot in enumerate(slots) if slot >= 0
        ]


@pytest.mark.parametrize("case", GOLD["placement"])
def test_slots_of_packed_tables_are_those_of_each_table(case: dict[str, Any]) -> None:
    layout, pos = layout_of(case), torch.arange(case["length"])
    # The table stands at index 3; the same positions again in a second table, whose first two
    # blocks are left out, so that only the later positions can be asked for.
    packed = torch.tensor([77, 78, 79, *case["block_table"], *case["block_table"][2:]])
    late = pos[layout.local_index(pos) // layout.block_size >= 2]
    start = torch.cat(
        [
            torch.full_like(pos, 3),
            torch.full_like(late, 3 + len(case["block_table"]) - 2),
        ]
    )
    for rank, slots in enumerate(case["slots"]):
        result = layout.slots(torch.cat([pos, late]), packed, rank, start).tolist()
        assert result == slots + [slots[p] for p in late.tolist()]


@pytest.mark.parametrize("case", GOLD["spans"])
def test_spans_are_the_worked_ones(case: dict[str, Any]) -> None:
    layout = layout_of(case)
    rows = torch.arange(case["seq_len"] - case["query_len"], case["seq_len"])
    seen = [
        spans(rows, lambda n, r=rank: layout.count_before(n, r)) for rank in range(layout.cp_size)
    ]
    assert torch.stack([hi for _, hi in seen], dim=1).tolist() == case["hi"]
    assert all(not lo.any() for lo, _ in seen)


@pytest.mark.parametrize("case", GOLD["zigzag"])
def test_zigzag_is_the_worked_one(case: dict[str, Any]) -> None:
    zigzag = ZigzagLayout(case["pcp"], case["length"])
    ranks = range(case["pcp"])
    assert [zigzag.positions(rank).tolist() for rank in ranks] == case["ranks"]
    assert zigzag.restore().tolist() == case["restore"]
    assert [zigzag.causal_work(rank) for rank in ranks] == case["causal_work"]


def test_the_example_of_the_docstring() -> None:
    layout = InterleavedLayout(cp_size=2, interleave_size=2, block_size=4)
    pos = torch.arange(9)
    assert layout.owner(pos).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0]
    assert layout.local_index(pos).tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4]
    assert [layout.count_before(9, rank) for rank in (0, 1)] == [5, 4]


@pytest.mark.parametrize(
    ("block", "interleave", "ranks", "unit_blocks", "unit_tokens"),
    [(16, 16, 2, 1, 32), (16, 4, 2, 1, 32), (16, 3, 2, 3, 96), (4, 8, 2, 2, 16), (4, 6, 5, 3, 60)],
)
def test_a_unit_ends_at_the_same_position_on_all_ranks(
    block: int, interleave: int, ranks: int, unit_blocks: int, unit_tokens: int
) -> None:
    layout = InterleavedLayout(ranks, interleave, block)
    assert (layout.unit_blocks, layout.unit_tokens) == (unit_blocks, unit_tokens)
    counts = {layout.count_before(unit_tokens, rank) for rank in range(ranks)}
    assert counts == {unit_blocks * block}


@pytest.mark.parametrize("name", ["cp_size", "interleave_size", "block_size"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0])
def test_a_size_below_one_or_no_int_is_refused(name: str, value: Any) -> None:
    sizes = {"cp_size": 2, "interleave_size": 2, "block_size": 2} | {name: value}
    with pytest.raises(ConfigError, match=rf"{name}={value!r}: {name} is an int of at least 1"):
        InterleavedLayout(**sizes)


def test_zigzag_refuses_a_negative_length_and_no_ranks() -> None:
    with pytest.raises(ConfigError, match=r"length=-1: .*Remedy: pass length >= 0"):
        ZigzagLayout(2, -1)
    with pytest.raises(ConfigError, match=r"cp_size=0: .*Remedy: pass cp_size >= 1"):
        ZigzagLayout(0, 4)


def test_an_empty_prompt_gives_nobody_anything() -> None:
    zigzag = ZigzagLayout(3, 0)
    assert [zigzag.positions(rank).tolist() for rank in range(3)] == [[], [], []]
    assert zigzag.restore().tolist() == []

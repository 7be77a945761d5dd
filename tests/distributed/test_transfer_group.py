"""Sequences between groups of ranks: exact, exactly the bytes that change owner, or not at all."""

from __future__ import annotations

import random
import re

import pytest
import torch
import transfer_cases
from transfer_cases import Case, Side, check, fill, same, snapshot

from cplayers import CacheFullError, ConfigError, CPMesh, Topology, TransferError
from cplayers.cache import GQASpec, Landing, PagedKVCache, moves
from cplayers.cache.landing import Arrival
from cplayers.cache.shard import checksum
from cplayers.errors import RankFailedError
from cplayers.serving import Passage, hand_over, handover
from cplayers.serving.handover import Route, _receive
from cplayers.testing import RankPoolError

RANKS = 6
FLOAT64 = 8


def seats(seed: int, case: Case) -> tuple[list[int], list[int]]:
    """Which ranks are the source's and the target's: apart, the same, or some of both."""
    rng = random.Random(1000 + seed)
    return tuple(rng.sample(range(RANKS), side.ranks) for side in (case.source, case.target))


def bytes_to_send(case: Case, source: list[int], target: list[int]) -> int:
    """Counted token by token: what a target rank is to hold and does not hold already."""
    (s_size, s_run, _), (t_size, t_run, _) = case.source.layout, case.target.layout
    values = transfer_cases.LAYERS * (2 * transfer_cases.HEAD_DIM)
    if not case.source.model_heads:
        values = transfer_cases.LAYERS * sum(transfer_cases.LATENT)
    count = 0
    for place, rank in enumerate(target):
        before = source.index(rank) if rank in source else None
        for position in range(case.oldest, case.length):
            if position // t_run % t_size != case.target.place(place)[0]:
                continue
            there = before is not None and (
                position // s_run % s_size == case.source.place(before)[0]
            )
            held = set(case.source.heads(before)) if there else set()
            count += len(set(case.target.heads(place)) - held)
    return count * values * FLOAT64


def move_all(seeds: range) -> list[tuple[int, int, int]]:
    """Bytes sent by this rank, returned, and expected, for each drawn pair."""
    mesh, found = CPMesh(Topology(pcp=RANKS)), []
    for seed in seeds:
        case = transfer_cases.draw(seed, most_ranks=RANKS, most_tokens=60)
        source, target = seats(seed, case)
        given = taken = None
        here = mesh.rank_global
        source_head = target_head = 0
        if here in source:
            place = source.index(here)
            given, source_head = case.source.cache(place, 120), case.source.place(place)[1]
            for seq, length, salt in (("a", case.length, 0.25), ("b", 5, 0.75)):
                given.add(seq)
                fill(given, case.source, place, seq, length, salt)
            given.forget("a", case.oldest)
        if here in target:
            place = target.index(here)
            taken, target_head = case.target.cache(place, 120), case.target.place(place)[1]
            taken.add("other")
            fill(taken, case.target, place, "other", 6, 0.5)
        passages = [
            Passage(seq, given, taken, source_head=source_head, target_head=target_head)
            for seq in ("a", "b")
        ]
        with mesh.traffic.capture() as traffic:
            counts = hand_over(mesh, "pcp", passages)
        if taken is not None:
            check(taken, case.target, place, "other", 0, 0.5)
            check(taken, case.target, place, "a", case.oldest, 0.25)
            check(taken, case.target, place, "b", 0, 0.75)
            assert (taken.length("a"), taken.length("b")) == (case.length, 5)
        sent = [record.bytes for record in traffic if record.operation == "exchange"]
        expected = bytes_to_send(case, source, target)
        expected += bytes_to_send(case._replace(length=5, oldest=0), source, target)
        found.append((sent[0], sum(counts), expected))
    return found


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 200), marks=pytest.mark.slow)], ids=str
)
def test_any_layout_to_any_other_moves_what_changes_owner(ranks, seeds: range) -> None:
    by_rank = ranks(RANKS).run(move_all, seeds, n=RANKS, timeout=280)
    nothing = 0
    for pairs in zip(*by_rank, strict=True):
        (expected,) = {pair[2] for pair in pairs}
        assert {pair[1] for pair in pairs} == {expected}
        assert sum(pair[0] for pair in pairs) == expected
        nothing += expected == 0
    assert nothing < len(seeds) / 2, "the cases draw too little to send"


CASE = Case(Side((2, 2, 4)), Side((3, 1, 4)), 29, 0)


class Failing:
    """Stands for what can go wrong inside one rank only, as when its memory is at an end."""

    def __call__(self, *given: object, **options: object) -> None:
        raise MemoryError("on one rank")


PLACES = {"describe": 0, "rows_at": 1}
TOKENS = {"tokens": [2**70] * 40, "other tokens": list(range(29))}


def refused(how: str) -> tuple[str, str, bool]:
    """How an impossible handover ends on this rank, and whether its cache is as it was."""
    mesh = CPMesh(Topology(pcp=3))
    rank = mesh.rank_global
    given, taken = None, CASE.target.cache(rank, 1 if how == "full" else 40)
    if rank < 2:
        given = CASE.source.cache(rank, 40)
        if how == "planes" and rank == 1:
            given = PagedKVCache(GQASpec(2, 4), given.layout, 2, 40, 1, torch.float64)
        given.add("a")
        fill(given, CASE.source, rank, "a", 29 - (how == "lengths" and rank), 0.5)
    if how == "dtype" and rank == 2:
        taken = CASE.target.cache(rank, 40, torch.float32)
    if how == "name" and rank == 1:
        taken.add("a")
    before = snapshot(taken)
    passages = [Passage("a", given, taken)]
    if how == "unknown":
        passages = [Passage("x", given, taken)]
    if how == "twice" or (how == "counts" and rank == 2):
        passages *= 2
    if PLACES.get(how) == rank:
        setattr(given, how, Failing())
    if how in TOKENS and rank == 2:
        passages = [Passage("a", given, taken, tokens=TOKENS[how])]
    if how == "order":
        if given is not None:
            given.fork("a", "b")
        passages = [Passage(seq, given, taken) for seq in ("ba" if rank == 1 else "ab")]
    if how == "fill" and rank == 1:
        Arrival.fill, fill_in = Failing(), Arrival.fill
    try:
        hand_over(mesh, "pcp", passages)
    except (TransferError, CacheFullError, ConfigError, MemoryError, OverflowError) as error:
        if how == "fill" and rank == 1:
            Arrival.fill = fill_in
        mesh.all_reduce(torch.ones(1), "pcp")  # the ranks are still in step
        return type(error).__name__, str(error), same(before, snapshot(taken))
    raise AssertionError("it was not refused")


@pytest.mark.parametrize(
    ("how", "errors", "words"),
    [
        ("full", ["CacheFullError"] * 3, "3 more blocks are needed and 1 of 1 are left"),
        ("name", ["TransferError", "ConfigError", "TransferError"], "another rank refuses|unique"),
        ("lengths", ["TransferError"] * 3, "differ in length"),
        ("dtype", ["TransferError"] * 3, "dtype=torch.float64"),
        ("planes", ["TransferError"] * 3, "a shard with planes"),
        ("twice", ["ConfigError"] * 3, "the name of a sequence is unique"),
        ("unknown", ["TransferError"] * 3, "rank 0: ConfigError: seq='x'"),
        ("describe", ["TransferError"] * 3, "rank 0: MemoryError: on one rank"),
        ("rows_at", ["TransferError", "MemoryError", "TransferError"], "on one rank|refuses"),
        ("tokens", ["TransferError"] * 3, "rank 2: OverflowError: "),
        ("other tokens", ["TransferError"] * 3, "hashes of prompts {0: None, 1: None, 2: '"),
        ("order", ["TransferError"] * 3, """sequences {0: "'a'", 1: "'b'", 2: "'a'"} by rank"""),
        ("fill", ["TransferError", "MemoryError", "TransferError"], "on one rank|refuses"),
        ("counts", ["TransferError"] * 3, r"\[1, 1, 2\] sequences by rank"),
    ],
)
def test_all_ranks_refuse_or_none(ranks, how: str, errors: list[str], words: str) -> None:
    results = ranks(RANKS).run(refused, how, n=3)
    assert [name for name, _, _ in results] == errors
    for _, text, unchanged in results:
        assert re.search(words, text), text
        assert unchanged


def test_bytes_that_changed_on_the_way_are_noticed() -> None:
    given, taken = CASE.source.cache(0, 40), CASE.target.cache(1, 40)
    given.add("a")
    fill(given, CASE.source, 0, "a", 29, 0.5)
    shard = given.export_blocks("a")
    holding, wanted = shard.header.holding, taken.blank().holding
    found = moves({0: holding, 5: holding._replace(cp_rank=1)}, {1: wanted}, 0, 29)
    move = next(m for m in found if m.source == 0)
    route = Route({0: shard.header}, [move])
    part = given.rows_at("a", move.positions)
    good = block_sums(shard, part, route, move)
    for damage in range(3):
        rows, sums = part.view(torch.uint8).flatten().clone(), good.clone()
        if damage == 1:
            rows[17] ^= 1
        if damage == 2:
            sums[3] ^= 1
        landing = Landing(taken)
        arrival = landing.expect("a", shard.header)
        if damage:
            with pytest.raises(TransferError, match="with another checksum"):
                _receive(1, [route], [arrival], [rows], [sums])
        else:
            _receive(1, [route], [arrival], [rows], [sums])


def block_sums(shard, part, route, move):
    sums, edge = [], 0
    for block, count in zip(*route.blocks(move), strict=True):
        sums.append(checksum(shard.header.digest(), block, part[edge : edge + count]))
        edge += count
    return torch.tensor(sums).view(torch.uint8)


def fails_amid(when: int) -> tuple[bool, bool, str]:
    """Rank 2 fails before the rows or the checksums are sent; whether the others' caches changed.

    Rank 2 does not say so before it ends the others' waiting: nobody is left waiting for it.
    """
    mesh, calls = CPMesh(Topology(pcp=3)), []
    rank = mesh.rank_global
    given, taken = CASE.source.cache(rank, 40) if rank < 2 else None, CASE.target.cache(rank, 40)
    if given is not None:
        given.add("a")
        fill(given, CASE.source, rank, "a", 29, 0.5)
    before = given and snapshot(given), snapshot(taken)
    send = handover.exchange

    def send_or_fail(*given: object) -> list[torch.Tensor]:
        calls.append(given)
        if rank == 2 and len(calls) > when:
            raise ValueError("lost amid")
        return send(*given)

    handover.exchange = send_or_fail
    try:
        with mesh.guard():
            hand_over(mesh, "pcp", [Passage("a", given, taken)])
    except (RankFailedError, ValueError) as error:
        unchanged = given is None or same(before[0], snapshot(given))
        return unchanged, same(before[1], snapshot(taken)), f"{type(error).__name__}: {error}"
    finally:
        handover.exchange = send
    raise AssertionError("it was not refused")


@pytest.mark.parametrize("when", [0, 1])
def test_a_rank_that_fails_amid_changes_no_cache(ranks, when: int) -> None:
    results = ranks(RANKS).run(fails_amid, when, n=3)
    assert [(source, target) for source, target, _ in results] == [(True, True)] * 3
    assert results[2][2] == "ValueError: lost amid"
    for _, _, text in results[:2]:
        assert text.startswith("RankFailedError: ")
        assert "lost amid" in text


def rank_2_fails() -> str:
    mesh = CPMesh(Topology(pcp=3))
    cache = CASE.target.cache(mesh.rank_global, 40)
    with mesh.guard():
        if mesh.rank_global == 2:
            raise ValueError("out of order")
        hand_over(mesh, "pcp", [Passage("a", target=cache)])


def test_a_rank_that_fails_ends_the_others_waiting(ranks) -> None:
    with pytest.raises(RankPoolError, match="ValueError: out of order"):
        ranks(RANKS).run(rank_2_fails, n=3)

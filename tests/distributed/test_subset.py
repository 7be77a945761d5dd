"""Meshes over some ranks, and over those that are left: real processes, some of them killed."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import reports_of

from cplayers import ConfigError, CPMesh, RankFailedError, Topology
from cplayers.mesh import exchange, gather_bytes, meshes_over, regroup, subset


def total(mesh: CPMesh, x: float) -> float:
    return float(mesh.all_reduce(torch.tensor([x]), "pcp"))


def meshes(*groups, generation=0):
    """This rank's mesh of each group that it is in."""
    pairs = [(ranks, Topology(pcp=len(ranks), dcp=len(ranks))) for ranks in groups]
    return [mesh for mesh in meshes_over(pairs, generation=generation) if mesh is not None]


def lose_one(rank: int, folder: Path):
    """Rank 3 dies between two steps of its pair; what the others still can do."""
    everybody, mine = meshes(range(4), (0, 1), (2, 3))
    seen = [total(everybody, rank), total(mine, rank)]
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        with pytest.raises(RankFailedError, match=r"rank 3 failed while rank 2 was waiting") as e:
            total(mine, rank)
        assert e.value.rank == 3
    else:
        seen.append(total(mine, rank))  # the other pair notices nothing
        if rank == 1:
            time.sleep(0.5)
        with pytest.raises(RankFailedError):
            total(everybody, rank)
    left = regroup(range(4), 1)
    with pytest.raises(RankFailedError):
        total(mine, rank)  # not usable any more, also where nobody was lost
    seen.append(list(left))
    return seen + [total(mesh, rank) for mesh in meshes(left, (0, 1), generation=1)]


def test_those_who_are_left_go_on(tmp_path) -> None:
    assert reports_of(lose_one, 4, tmp_path) == {
        0: [6.0, 1.0, 1.0, [0, 1, 2], 3.0, 1.0],
        1: [6.0, 1.0, 1.0, [0, 1, 2], 3.0, 1.0],
        2: [6.0, 5.0, [0, 1, 2], 3.0],
    }


def lose_two_in_turn(rank: int, folder: Path):
    (mesh,), left = meshes(range(4)), tuple(range(4))
    for generation, lost in ((1, 0), (2, 2)):  # the first of them, too
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RankFailedError):
            total(mesh, rank)
        left = regroup(left, generation)
        (mesh,) = meshes(left, generation=generation)
    return [list(left), total(mesh, rank)]


@pytest.mark.slow
def test_a_second_loss_is_survived_as_well(tmp_path) -> None:
    expected = [[1, 3], 4.0]
    assert reports_of(lose_two_in_turn, 4, tmp_path) == {1: expected, 3: expected}


def lose_one_that_has_regrouped(rank: int, folder: Path):
    """Rank 3 dies, and rank 2 where the others are about to open groups with it."""
    (mesh,), left = meshes(range(4)), tuple(range(4))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankFailedError):
        total(mesh, rank)
    left = regroup(left, 1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankFailedError) as error:
        meshes(left, generation=1)
    again = regroup(left, 2)
    (mesh,) = meshes(again, generation=2)
    return [list(left), error.value.rank, list(again), total(mesh, rank)]


def test_a_loss_between_regrouping_and_opening_is_survived(tmp_path) -> None:
    expected = [[0, 1, 2], 2, [0, 1], 1.0]
    reports = reports_of(lose_one_that_has_regrouped, 4, tmp_path)
    assert reports == dict.fromkeys((0, 1), expected)


def lose_one_that_connects(rank: int, folder: Path):
    """Rank 3 dies as it connects to rank 2; ranks 0 and 1 have seen one more group by then."""
    subset.CONNECT_S = 1.0
    assert regroup(range(4), 1) == (0, 1, 2, 3)
    if rank == 3:
        dist.new_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankFailedError) as error:
        meshes((2, 3), (0, 1), range(4), generation=1)
    left = regroup(range(4), 2)
    everybody, mine = (*meshes(left, (0, 1), generation=2), None)[:2]
    if rank == 1:
        time.sleep(3)  # longer than it may take to connect
    seen = [total(everybody, rank)] + ([total(mine, rank)] if mine else [])
    return [error.value.rank if rank == 2 else None, list(left), *seen]


def test_a_loss_amid_connecting_is_survived(tmp_path) -> None:
    assert reports_of(lose_one_that_connects, 4, tmp_path) == {
        0: [None, [0, 1, 2], 3.0, 1.0],
        1: [None, [0, 1, 2], 3.0, 1.0],
        2: [3, [0, 1, 2], 3.0],
    }


def one_is_busy_and_one_withdraws(rank: int, folder: Path):
    meshes(range(4))
    began = time.monotonic()
    if rank == 1:
        time.sleep(2)
    if rank == 2:
        subset.withdraw(1)
        while not (folder / "0.json").exists():
            time.sleep(0.05)
        return "withdrew"
    if rank == 3:
        subset.withdraw(1)
        subset.come_back(1)
        time.sleep(1)
    left = regroup(range(4), 1, limit_s=0.2)
    assert time.monotonic() - began < 10, "who withdrew is not waited for"
    return [list(left), total(*meshes(left, generation=1), rank)]


def test_who_is_busy_is_waited_for_and_who_withdrew_is_not(tmp_path) -> None:
    expected = [[0, 1, 3], 4.0]
    reports = reports_of(one_is_busy_and_one_withdraws, 4, tmp_path)
    assert reports == {0: expected, 1: expected, 2: "withdrew", 3: expected}


def one_waits_where_nobody_failed(rank: int, folder: Path):
    """Rank 1 regroups for a reason of its own while rank 0 waits for it in their pair."""
    mine = meshes(range(3), (0, 1))[-1]
    if rank == 0:
        with pytest.raises(RankFailedError, match="regroup to generation 1"):
            total(mine, rank)
    left = regroup(range(3), 1)
    return [list(left), total(*meshes(left, generation=1), rank)]


@pytest.mark.slow
def test_a_rank_that_regroups_ends_the_waiting_for_it(tmp_path) -> None:
    expected = [[0, 1, 2], 3.0]
    reports = reports_of(one_waits_where_nobody_failed, 3, tmp_path)
    assert reports == dict.fromkeys(range(3), expected)


def one_comes_too_late(rank: int, folder: Path):
    meshes(range(3))
    if rank == 2:
        while not (folder / "0.json").exists():
            time.sleep(0.05)
    return list(regroup(range(3), 1, busy_s=0.5))


@pytest.mark.slow
def test_a_rank_that_hangs_is_left_behind_and_told(tmp_path) -> None:
    reports = reports_of(one_comes_too_late, 3, tmp_path)
    assert (reports[0], reports[1]) == ([0, 1], [0, 1])
    assert re.search(r"rank 2 came too late: ranks \(0, 1\) go on", reports[2])


def uneven(members: tuple[int, ...]):
    """Member i sends j * 10 + i bytes of value i to member j."""
    (mesh,) = meshes_over([(members, Topology(pcp=3))])
    if mesh is None:
        return None
    here = mesh.rank("pcp")
    parts = [torch.full((j * 10 + here,), here, dtype=torch.uint8) for j in range(3)]
    came = exchange(mesh, parts, [here * 10 + i for i in range(3)], "pcp")
    said = [gather_bytes(mesh, b"x" * (here * n), "pcp") for n in (1, 508, 509, 3000)]
    nothing = [torch.empty(0, dtype=torch.uint8)] * 3
    empty = exchange(mesh, nothing, [0] * 3, "pcp")
    record = next(r for r in mesh.traffic if r.operation == "exchange")
    assert record.bytes == sum(len(part) for j, part in enumerate(parts) if j != here)
    return [c.tolist() for c in came], said, [len(part) for part in empty]


@pytest.mark.parametrize("members", [(0, 1, 2), (0, 1, 3), (1, 2, 3)])
def test_parts_of_any_size_arrive_in_rank_order(ranks, members) -> None:
    results = ranks(4).run(uneven, members, n=4)
    for here, rank in enumerate(members):
        came, said, empty = results[rank]
        assert came == [[i] * (here * 10 + i) for i in range(3)]
        assert said == [[b"x" * (i * n) for i in range(3)] for n in (1, 508, 509, 3000)]
        assert empty == [0, 0, 0]


TP2 = Topology(tp=2)


def refusals() -> list[str]:
    found = []
    for ranks, topology in (((0, 0), TP2), ((0, 1, 2), TP2), ((1, 0), TP2)):
        with pytest.raises(ConfigError) as error:
            meshes_over([(ranks, topology)])
        found.append(error.value.value)
    mesh = CPMesh(Topology(pcp=3))
    with pytest.raises(ConfigError, match="one uint8 vector and one size for each of the 3"):
        exchange(mesh, [torch.ones(1)] * 3, [1] * 3, "pcp")
    return found


def test_wrong_subsets_are_refused(ranks) -> None:
    for found in ranks(4).run(refusals, n=3):
        assert found == [
            "ranks=(0, 0) for Topology(tp=2, dcp=1, pcp=1, dp=1)",
            "ranks=(0, 1, 2) for Topology(tp=2, dcp=1, pcp=1, dp=1)",
            "ranks=(1, 0) for Topology(tp=2, dcp=1, pcp=1, dp=1)",
        ]


def test_one_rank_needs_no_process_group() -> None:
    (mesh,) = meshes_over([((7,), Topology())])
    part = torch.ones(3, dtype=torch.uint8)
    assert exchange(mesh, [part], [3], "pcp") == [part]
    assert gather_bytes(mesh, b"a", "pcp") == [b"a"]

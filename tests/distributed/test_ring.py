"""Tensors passed round an axis, hop by hop, and what happens when a rank drops out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cplayers.errors import ConfigError, RankFailedError, StateError
from cplayers.mesh import AXES, CPMesh, Ring, Topology

TOPOLOGIES = [
    Topology(),
    Topology(tp=4, dcp=2),
    Topology(tp=2, pcp=2, dcp=4),  # DCP group [0, 2, 1, 3]: not in ascending order
    Topology(pcp=3, dcp=3),
    Topology(pcp=4, dp=1),
]


def drawn(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    both = [torch.randn(3, 2, generator=generator), torch.randn(2, 1, 5, generator=generator)]
    return both[0].t().to(dtype), both[1].to(dtype)


def go_round(topology: Topology, dtype: torch.dtype) -> dict[str, list[tuple[int, bool, int]]]:
    """Per axis and hop: the source claimed, whether its tensors are here, the bytes recorded."""
    mesh = CPMesh(topology)
    found = {}
    for axis in AXES:
        ring, seen = Ring(mesh, axis), []
        now = drawn(mesh.rank_global, dtype)
        for hop in range(1, ring.hops + 1):
            with mesh.traffic.capture() as log:
                ring.send_recv(*now)
                ring.commit()
                now = ring.wait()
            source = topology.group_of(mesh.rank_global, axis)[ring.source(hop)]
            same = all(a.equal(b) for a, b in zip(now, drawn(source, dtype), strict=True))
            assert log.count() == log.count(axis) == 1
            seen.append((source, same, log.bytes()))
        found[axis] = seen
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16], ids=str)
def test_every_member_sees_what_all_began_with(
    ranks, topology: Topology, dtype: torch.dtype
) -> None:
    answers = ranks(4).run(go_round, topology, dtype, n=topology.world_size)
    for rank, found in enumerate(answers):
        for axis, hops in found.items():
            group = topology.group_of(rank, axis)
            at = group.index(rank)
            before = [group[(at - hop) % len(group)] for hop in range(1, len(group))]
            assert hops == [(source, True, 16 * dtype.itemsize) for source in before]


def test_one_tensor_keeps_its_strides_out_of_it() -> None:
    ring = Ring(CPMesh(Topology()), "pcp")
    x = torch.arange(6.0).view(2, 3).t()
    ring.send_recv(x)
    ring.commit()
    (back,) = ring.wait()
    assert back.equal(x)
    assert ring.hops == 0


def test_misuse_is_told_with_its_remedy() -> None:
    ring = Ring(CPMesh(Topology()), "pcp")
    x = torch.zeros(1)
    with pytest.raises(StateError, match=r"name tensors with send_recv"):
        ring.commit()
    with pytest.raises(StateError, match=r"commit\(\) a hop first"):
        ring.wait()
    with pytest.raises(ConfigError, match="one or more tensors of one dtype"):
        ring.send_recv(x, x.half())
    with pytest.raises(ConfigError, match="one or more tensors of one dtype"):
        ring.send_recv()
    ring.send_recv(x)
    with pytest.raises(StateError, match=r"commit\(\) the tensors"):
        ring.send_recv(x)
    ring.commit()
    with pytest.raises(StateError, match=r"wait\(\) for the hop"):
        ring.send_recv(x)
    with pytest.raises(StateError, match="under way"):
        ring.commit()
    ring.wait()
    ring.send_recv(x)  # and is good for further hops


def lose_one() -> str:
    """Rank 1 raises where the others have sent it a hop."""
    mesh = CPMesh(Topology(pcp=3))
    ring = Ring(mesh, "pcp")
    try:
        with mesh.guard():
            if mesh.rank_global == 1:
                raise ValueError("no more hops")
            ring.send_recv(torch.zeros(5))
            ring.commit()
            ring.wait()
    except RankFailedError as error:
        return f"{error.rank}: {error}"
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_raises_ends_the_hop_of_the_others(ranks) -> None:
    answers = ranks(3).run(lose_one, n=3)
    assert answers[1] == "no more hops"
    for rank in (0, 2):
        assert answers[rank].startswith("1: rank 1 failed")
        assert "shift over pcp" in answers[rank]

"""TPAQProj: the checkpoints it takes and gives, and that it changes nothing but who computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Setup, check_close, run_script
from torch import Tensor

from cplayers.attention import TPAQProj
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh, Topology

HIDDEN, OWN, DIM = 5, 2, 3
TOPOLOGIES = [
    Topology(tp=tp, dcp=dcp) for tp in range(1, 9) for dcp in Topology(tp=tp).possible_dcp()
] + [Topology(tp=2, pcp=2, dcp=4), Topology(tp=4, pcp=2, dcp=4), Topology(tp=2, pcp=3, dcp=6)]


def full_weights(topology: Topology, bias: bool, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = topology.tp * OWN * DIM
    weights = {"weight": torch.randn(rows, HIDDEN, generator=generator)}
    if bias:
        weights["bias"] = torch.randn(rows, generator=generator)
    return weights


def rows_of(full: dict[str, Tensor], first_head: int, heads: int) -> dict[str, Tensor]:
    return {n: p[first_head * DIM : (first_head + heads) * DIM] for n, p in full.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def load_and_give_back(topology: Topology, bias: bool) -> list[str]:
    """What went wrong on this rank."""
    mesh = CPMesh(topology)
    heads, tp, k = topology.tp * OWN, mesh.rank("tp"), topology.dcp_tp
    proj = TPAQProj(HIDDEN, heads, DIM, bias=bias, mesh=mesh)
    wrong = []
    for seed, kind in enumerate(("full", "tp", "own")):
        full = full_weights(topology, bias, seed)
        tp_rows = rows_of(full, tp * OWN, OWN)
        group_rows = rows_of(full, tp // k * k * OWN, k * OWN)
        proj.load_state_dict({"full": full, "tp": tp_rows, "own": group_rows}[kind])
        if not same(dict(proj.state_dict()), group_rows):
            wrong.append(f"{kind}: loaded")
        if not same(proj.full_state_dict(), full):
            wrong.append(f"{kind}: full_state_dict")
        if not same(proj.tp_state_dict(), tp_rows):
            wrong.append(f"{kind}: tp_state_dict")
        x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(9))
        exact = x.double() @ group_rows["weight"].double().T
        if bias:
            exact += group_rows["bias"].double()
        own = exact[:, tp % k * OWN * DIM :][:, : OWN * DIM]
        check_close(proj(x), exact)
        check_close(proj.own(x), own)
    return wrong


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_checkpoints_in_and_out_bit_for_bit(ranks: Any, topology: Topology) -> None:
    for bias in (False, True):
        answers = ranks(9).run(load_and_give_back, topology, bias, n=topology.world_size)
        assert answers == [[]] * topology.world_size


WRONG_SHAPES = {
    "rows": {"weight": (7, HIDDEN), "bias": (24,)},
    "columns": {"weight": (24, HIDDEN + 1), "bias": (24,)},
    "bias": {"weight": (24, HIDDEN), "bias": (23,)},
    "matrix for bias": {"weight": (24, HIDDEN), "bias": (24, 1)},
    "scalar": {"weight": (), "bias": (24,)},
}


def load_wrong(case: str) -> tuple[str, bool]:
    """The error, and whether the parameters are as before."""
    proj = TPAQProj(HIDDEN, 8, DIM, bias=True, mesh=CPMesh(Topology(tp=4, dcp=2)))
    before = {name: p.clone() for name, p in proj.state_dict().items()}
    state = {name: torch.ones(shape) for name, shape in WRONG_SHAPES[case].items()}
    try:
        proj.load_state_dict(state)
    except ConfigError as error:
        return str(error), same(before, dict(proj.state_dict()))
    raise AssertionError("the checkpoint was accepted")


@pytest.mark.parametrize("case", WRONG_SHAPES)
def test_a_wrong_shape_is_refused_and_nothing_is_loaded(ranks: Any, case: str) -> None:
    (message, untouched), *others = ranks(9).run(load_wrong, case, n=4)
    assert untouched
    assert others == [(message, untouched)] * 3
    assert "24" in message and "Remedy" in message


def uneven() -> None:
    TPAQProj(HIDDEN, 6, DIM, mesh=CPMesh(Topology(tp=4, dcp=2)))


def test_heads_that_do_not_divide_by_tp_are_refused(ranks: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_heads=6, tp=4.*divides num_heads"):
        ranks(9).run(uneven, n=4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("topology", [t for t in TOPOLOGIES if t.dcp_tp > 1], ids=str)
def test_tpa_gives_what_gathered_queries_give(ranks: Any, topology: Topology, bias: bool) -> None:
    script = (
        ("step", (("a", 9), ("b", 1))),
        ("step", (("a", 1), ("b", 3), ("c", 4))),
        ("step", (("a", 1), ("b", 1), ("c", 1))),
    )
    gathered, projected = (
        ranks(9).run(
            run_script,
            Setup(topology, 2 * topology.tp, 1, q_proj=mode, bias=bias, interleave=2),
            script,
            n=topology.world_size,
        )
        for mode in ("gather", "tpa")
    )
    for ours, theirs in zip(projected, gathered, strict=True):
        for (out, _), (want, _) in zip(ours, theirs, strict=True):
            check_close(out, want.double())

"""Combining over live groups against a merge by hand in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from cplayers.attention import combine
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh, Topology
from cplayers.ops import Partial
from cplayers.ops.plain import pack, unpack

HOW = ["a2a", "ag_rs", "ar"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# Half a unit in the last place; the fp32 arithmetic before that one rounding is allowed 1e-5.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 0, torch.float64: 0}
TOPOLOGIES = [
    Topology(tp=2, dcp=2),
    Topology(tp=4, dcp=2),
    Topology(tp=4, dcp=4),
    Topology(tp=6, dcp=3),
    Topology(tp=7, dcp=7),
    Topology(pcp=3, dcp=3),
    Topology(tp=2, pcp=2, dcp=2),
    Topology(tp=2, pcp=2, dcp=4),
    Topology(tp=4, pcp=2, dcp=4),
    Topology(tp=2, pcp=4, dcp=8),
    Topology(tp=2, pcp=2, dcp=1),
]


def drawn(
    rank: int, rows: int, heads: int, dim: int, dtype: torch.dtype, seed: int, spread: float
) -> Partial:
    """A rank's partial: some rows see nothing, and hold NaN; lse differs widely between ranks."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    out = torch.randn(rows, heads, dim, generator=generator).to(dtype)
    lse = spread * torch.randn(rows, heads, generator=generator)
    kind = torch.randint(0, 8, (rows, heads), generator=generator)
    lse[kind == 0], lse[kind == 1] = -math.inf, math.nan
    lse[kind == 2], lse[kind == 3] = 1000.0, -1000.0
    lse[:1] = -math.inf  # a row that no rank saw anything of
    out[~lse.isfinite()] = math.nan
    return Partial(out, lse)


def merged(partials: list[Partial]) -> Tensor:
    """Softmax-weighted sum of the partials with finite lse, row by row, fp64."""
    total = torch.zeros_like(partials[0].out, dtype=torch.float64)
    rows, heads = partials[0].lse.shape
    for t in range(rows):
        for n in range(heads):
            seen = [
                (float(p.lse[t, n]), p.out[t, n].double())
                for p in partials
                if math.isfinite(float(p.lse[t, n]))
            ]
            if seen:
                top = max(lse for lse, _ in seen)
                mass = [math.exp(lse - top) for lse, _ in seen]
                for weight, (_, out) in zip(mass, seen, strict=True):
                    total[t, n] += weight / sum(mass) * out
    return total


def merged_lse(partials: list[Partial]) -> Tensor:
    """Log of the sum of the finite partials' mass, fp64."""
    lse = torch.stack([p.lse.double() for p in partials])
    return torch.where(lse.isfinite(), lse, -math.inf).logsumexp(0)


def combine_drawn(topology: Topology, how: str, rows: int, own: int, *rest: Any) -> Partial:
    mesh = CPMesh(topology)
    partial = drawn(mesh.rank_global, rows, own * topology.dcp_tp, *rest)
    return combine(partial, mesh, how)


@given(
    topology=st.sampled_from(TOPOLOGIES),
    how=st.sampled_from(HOW),
    rows=st.integers(0, 5),
    own=st.integers(1, 3),
    dim=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
    spread=st.sampled_from([1.0, 4.0, 30.0]),
)
@example(Topology(tp=2, pcp=2, dcp=4), "a2a", 4, 2, 5, torch.bfloat16, 3, 4.0)
@example(Topology(tp=4, pcp=2, dcp=4), "ag_rs", 4, 1, 5, torch.float32, 3, 4.0)
@example(Topology(tp=4, pcp=2, dcp=4), "ar", 4, 1, 5, torch.float64, 3, 4.0)
def test_every_way_is_the_exact_merge(
    ranks: Any,
    topology: Topology,
    how: str,
    rows: int,
    own: int,
    dim: int,
    dtype: torch.dtype,
    seed: int,
    spread: float,
) -> None:
    if topology.dcp == 1:
        dtype = torch.float32  # nothing is combined: the partial's own output comes back
    arguments = (dim, dtype, seed, spread)
    answers = ranks(9).run(
        combine_drawn, topology, how, rows, own, *arguments, n=topology.world_size
    )
    k = topology.dcp_tp
    for group in topology.groups("dcp"):
        partials = [drawn(rank, rows, own * k, *arguments) for rank in group]
        exact = partials[0].out if topology.dcp == 1 else merged(partials)
        exact_lse = merged_lse(partials)
        first_with: dict[int, Tensor] = {}
        for rank in group:
            place = topology.rank_in(rank, "dcp_tp")
            heads = slice(place * own, (place + 1) * own)
            want, (got, lse) = exact[:, heads], answers[rank]
            assert got.shape == want.shape and got.dtype == dtype
            if topology.dcp == 1:
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
                continue
            torch.testing.assert_close(
                lse.double(), exact_lse[:, heads], rtol=1e-6, atol=1e-5, check_dtype=False
            )
            largest = float(want.abs().max()) if want.numel() else 0.0
            allowed = ROUNDING[dtype] * want.abs() + 1e-5 * largest
            assert bool(((got.double() - want).abs() <= allowed).all())
            assert bool((got[:1] == 0).all())
            same = first_with.setdefault(place, got)  # on the PCP ranks that own the same heads
            assert got.equal(same)


@pytest.mark.parametrize("how", HOW)
def test_merging_lse_0_with_100_and_with_minus_1000(ranks: Any, how: str) -> None:
    """EasyContext 14: finite; the partial of the larger lse alone."""
    for lse, winner in (((0.0, 100.0), 1), ((0.0, -1000.0), 0)):
        for result in ranks(9).run(combine_two, how, lse, n=2):
            assert result.equal(torch.full((1, 1, 3), float(winner + 1)))


@pytest.mark.parametrize("how", HOW)
def test_partition_sums_2_and_8_weigh_a_fifth_and_four_fifths(ranks: Any, how: str) -> None:
    """vLLM 43729."""
    for result in ranks(9).run(combine_two, how, (math.log(2), math.log(8)), n=2):
        torch.testing.assert_close(result, torch.full((1, 1, 3), 0.2 * 1 + 0.8 * 2))


def combine_two(how: str, lse: tuple[float, float]) -> Tensor:
    """Two ranks, two heads, out 1 on rank 0 and 2 on rank 1."""
    mesh = CPMesh(Topology(tp=2, dcp=2))
    rank = mesh.rank("dcp")
    out = torch.full((1, 2, 3), float(rank + 1))
    return combine(Partial(out, torch.full((1, 2), lse[rank])), mesh, how).out


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    dim=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    strided=st.booleans(),
)
def test_pack_and_unpack_keep_every_bit(
    shape: list[int], dim: int, dtype: torch.dtype, seed: int, strided: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def bits(*size: int, dtype: torch.dtype) -> Tensor:
        """All bit patterns, those of NaN and infinities included."""
        raw = torch.randint(0, 256, (*size, dtype.itemsize), generator=generator)
        return raw.to(torch.uint8).view(dtype).squeeze(-1)

    out, lse = bits(*shape, dim, dtype=dtype), bits(*shape, dtype=torch.float32)
    if strided:
        out, lse = (t.movedim(0, -1).contiguous().movedim(-1, 0) for t in (out, lse))
    packed = pack(Partial(out, lse))
    assert packed.dtype.itemsize * packed.shape[-1] == dim * dtype.itemsize + 4
    back = unpack(packed, dtype)
    for got, want in zip(back, (out, lse), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        got_bits, want_bits = (t.flatten().clone().view(torch.uint8) for t in (got, want))
        assert got_bits.equal(want_bits)


def combine_unknown() -> None:
    mesh = CPMesh(Topology(tp=2, dcp=2))
    combine(drawn(0, 2, 2, 3, torch.float32, 0, 1.0), mesh, "allreduce")  # type: ignore[arg-type]


def test_an_unknown_way_is_refused_on_all_ranks(ranks: Any) -> None:
    with pytest.raises(ConfigError, match=r"combine='allreduce'.*a2a, ag_rs, ar"):
        ranks(9).run(combine_unknown, n=2)

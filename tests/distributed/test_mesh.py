"""Collectives by axis against stacking in the parent; groups; traffic; device meshes."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from cplayers.errors import ConfigError
from cplayers.mesh import AXES, CPMesh, Topology, TrafficRecord, collectives
from cplayers.testing import RankPool

FOUR = [
    Topology(tp=4, dcp=2),
    Topology(tp=4, dcp=4),
    Topology(tp=2, pcp=2, dcp=4),  # DCP group [0, 2, 1, 3]: not in ascending order
    Topology(tp=2, pcp=2, dcp=2),
    Topology(tp=2, pcp=2),
    Topology(tp=2, dcp=2, dp=2),
    Topology(pcp=4, dcp=4),
]
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.fixture(scope="module")
def pool():
    with RankPool(4) as pool:
        yield pool


def drawn(rank, shape, dtype, seed):
    """A tensor that every process can draw for every rank: small ints, so that sums are exact."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    high = 2 if dtype == torch.bool else 5
    values = torch.randint(0 if dtype == torch.bool else -4, high, shape, generator=generator)
    return (values.abs() if dtype == torch.uint8 else values).to(dtype)


def same(a, b):
    """Equal in dtype, shape and every bit; float8 has no equality of its own."""
    bits_a, bits_b = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and bits_a.equal(bits_b)


def collectives_of_every_axis(topology, shape, dtype, seed, strided):
    mesh = CPMesh(topology)
    results = {}
    for axis in AXES:
        n = mesh.size(axis)
        x = drawn(mesh.rank_global, shape, dtype, seed)
        rows = drawn(mesh.rank_global, (n, *shape), dtype, seed + 1)
        if strided:
            x, rows = (t.movedim(0, -1).contiguous().movedim(-1, 0) for t in (x, rows))
        before = x.clone(), rows.clone()
        results[axis] = (
            mesh.all_gather(x, axis),
            mesh.all_to_all(rows, axis),
            mesh.reduce_scatter(rows, axis),
            mesh.all_reduce(x, axis),
            mesh.all_reduce(x, axis, op="max"),
        )
        assert same(x, before[0]) and same(rows, before[1]), "the input was changed"
    return results


def check(topology, answers, shape, dtype, seed):
    def wide(tensors, reduce):
        stacked = torch.stack([t.to(torch.float64) for t in tensors])
        total = stacked.sum(0) if reduce == "sum" else stacked.amax(0)
        return total.to(dtype)

    for rank, results in enumerate(answers):
        for axis in AXES:
            ranks = topology.group_of(rank, axis)
            me, n = ranks.index(rank), len(ranks)
            xs = [drawn(r, shape, dtype, seed) for r in ranks]
            rows = [drawn(r, (n, *shape), dtype, seed + 1) for r in ranks]
            expected = (
                torch.stack(xs),
                torch.stack([row[me] for row in rows]),
                wide([row[me] for row in rows], "sum"),
                wide(xs, "sum"),
                wide(xs, "max"),
            )
            for got, want in zip(results[axis], expected, strict=True):
                assert same(got, want), (rank, axis, got, want)


@pytest.mark.parametrize("topology", FOUR, ids=str)
def test_collectives_equal_stacking(pool, topology):
    answers = pool.run(collectives_of_every_axis, topology, (3, 2), torch.float32, 7, False)
    check(topology, answers, (3, 2), torch.float32, 7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_carry_every_dtype(pool, dtype):
    topology = Topology(tp=2, pcp=2, dcp=4)
    answers = pool.run(collectives_of_every_axis, topology, (5,), dtype, 3, False)
    check(topology, answers, (5,), dtype, 3)


@given(
    topology=st.sampled_from([*FOUR, Topology(), Topology(tp=3, dcp=3), Topology(pcp=2, dcp=2)]),
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int16]),
    seed=st.integers(0, 99),
    strided=st.booleans(),
)
def test_collectives_of_any_shape(pool, topology, shape, dtype, seed, strided):
    arguments = (topology, shape, dtype, seed, strided and len(shape) > 1)
    answers = pool.run(collectives_of_every_axis, *arguments, n=topology.world_size)
    check(topology, answers, shape, dtype, seed)


def low_precision_sums(dtype):
    mesh = CPMesh(Topology(tp=4))
    rows = torch.randn(4, 257, generator=torch.Generator().manual_seed(mesh.rank_global))
    return rows.to(dtype), mesh.reduce_scatter(rows.to(dtype), "tp")


def test_reduce_scatter_rounds_once(pool):
    answers = pool.run(low_precision_sums, torch.bfloat16)
    for me in range(4):
        exact = torch.stack([rows[me] for rows, _ in answers]).double().sum(0)
        assert answers[me][1].equal(exact.to(torch.bfloat16))


def both_reduce_scatters():
    mesh = CPMesh(Topology(tp=4, dcp=2))
    rows = torch.randn(2, 33, generator=torch.Generator().manual_seed(mesh.rank_global))
    by_backend = collectives.reduce_scatter_by_backend(
        rows, mesh.group("dcp"), lambda work: work.wait() and None
    )
    return by_backend, mesh.reduce_scatter(rows, "dcp")


def test_reduce_scatter_equals_the_backends_own(pool):
    for by_backend, ours in pool.run(both_reduce_scatters):
        assert by_backend.equal(ours)  # two addends: one order of summation


def the_log():
    mesh = CPMesh(Topology(tp=4, dcp=2))
    x = torch.ones(4, 6)
    mesh.all_gather(x, "pcp")  # size 1: free
    mesh.all_gather(x, "dcp")
    with mesh.traffic.capture() as inside:
        mesh.all_to_all(x, "tp")
        mesh.reduce_scatter(x, "tp")
    mesh.all_reduce(x.bfloat16(), "tp")
    mesh.all_gather(x[:0], "tp")
    answer = list(mesh.traffic), mesh.traffic.totals(), list(inside), mesh.traffic[-1]
    counts = mesh.traffic.bytes(), mesh.traffic.bytes("dcp"), mesh.traffic.count("tp")
    mesh.traffic.clear()
    return answer, counts, len(mesh.traffic), mesh.traffic.totals()


def test_traffic_is_what_the_algorithms_send(pool):
    a, b, c, d, e = [
        TrafficRecord("dcp", "all_gather", 96),
        TrafficRecord("tp", "all_to_all", 72),
        TrafficRecord("tp", "reduce_scatter", 72),
        TrafficRecord("tp", "all_reduce", 72),
        TrafficRecord("tp", "all_gather", 0),
    ]
    totals = {(r.axis, r.operation): (1, r.bytes) for r in (a, b, c, d, e)}
    for answer, counts, left, cleared in pool.run(the_log):
        assert answer == ([a, b, c, d, e], totals, [b, c], e)
        assert counts == (96 + 3 * 72, 96, 4)
        assert (left, cleared) == (0, {})


def build_again_and_again(topology, times):
    CPMesh(topology).device_mesh  # noqa: B018 - opens its groups
    before = len(os.listdir("/proc/self/fd"))
    began = time.perf_counter()
    meshes = [CPMesh(topology) for _ in range(times)]
    seconds = (time.perf_counter() - began) / times
    assert all(mesh.group("tp") is meshes[0].group("tp") for mesh in meshes)
    assert all(mesh.device_mesh.get_group("tp") is meshes[0].group("tp") for mesh in meshes)
    return len(os.listdir("/proc/self/fd")) - before, seconds


def test_meshes_of_one_topology_share_their_groups(pool):
    for opened, seconds in pool.run(build_again_and_again, Topology(tp=2, pcp=2, dcp=4), 50):
        assert opened == 0
        assert seconds < 0.05


def device_meshes():
    mesh = CPMesh(Topology(tp=2, pcp=2, dcp=2))
    grid, tp = mesh.device_mesh, mesh.tp_mesh()
    assert grid.mesh_dim_names == ("dp", "pcp", "tp") and grid.get_coordinate() is not None
    assert tp.get_group() is mesh.group("tp")
    given = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pcp", "tp"))
    same = CPMesh.from_device_mesh(given, dcp=4)
    gathered = same.all_gather(torch.tensor(same.rank_global), "dcp").tolist()
    return tuple(grid.shape), tp.mesh.tolist(), same.topology, gathered, repr(same)


def test_device_meshes_in_and_out(pool):
    for rank, (shape, tp, topology, gathered, text) in enumerate(pool.run(device_meshes)):
        assert shape == (1, 2, 2)
        assert tp == [[0, 1], [2, 3]][rank // 2]
        assert topology == Topology(tp=2, pcp=2, dcp=4)
        assert gathered == [0, 2, 1, 3]
        assert text == f"CPMesh(tp=2, dcp=4, pcp=2, dp=1, rank={rank}, device_type='cpu')"


def from_shape(shape, names, dcp=1):
    CPMesh.from_device_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names), dcp=dcp)


@pytest.mark.parametrize(
    ("shape", "names", "dcp", "message"),
    [
        ((2, 2), ("tp", "pcp"), 1, "laid out dp, pcp, tp.*Remedy: .*'pcp', 'tp'"),
        ((2, 2), ("cp", "tp"), 1, "mesh_dim_names=.*'cp'.*subset"),
        ((4,), None, 1, "mesh_dim_names=None"),
        ((2, 2), ("pcp", "tp"), 3, r"dcp=3 with tp=2, pcp=2.*\[1, 2, 4\]"),
    ],
)
def test_device_meshes_that_do_not_fit_are_refused(pool, shape, names, dcp, message):
    with pytest.raises(ConfigError, match=message):
        pool.run(from_shape, shape, names, dcp)


def build(topology):
    CPMesh(topology)


def disagree():
    CPMesh(Topology(tp=4) if dist.get_rank() else Topology(pcp=4))


def test_ranks_that_disagree_are_refused_alike(pool):
    with pytest.raises(ConfigError, match=r"pcp=4.*tp=4.*all ranks build the same mesh"):
        pool.run(disagree)
    assert pool.run(build, Topology(tp=4)) == [None] * 4


def test_the_world_must_have_the_right_size(pool):
    with pytest.raises(ConfigError, match=r"has 4 ranks: .*= 8 ranks.*nproc-per-node 8"):
        pool.run(build, Topology(tp=8))
    with pytest.raises(ConfigError, match=r"is not initialised: .*init_process_group"):
        CPMesh(Topology(tp=2))


def misuse(operation, argument, axis):
    getattr(CPMesh(Topology(tp=4, dcp=2)), operation)(*argument, axis)


@pytest.mark.parametrize(
    ("operation", "argument", "axis", "message"),
    [
        ("group", (), "pcp", r"group\('pcp'\).*size 1.*size\('pcp'\)"),
        ("group", (), "cp", "axis='cp'"),
        ("rank", (), "cp", "axis='cp'"),
        ("all_gather", (torch.ones(2),), "cp", "axis='cp'"),
        ("all_to_all", (torch.ones(4, 1),), "dcp", r"shape \(4, 1\) over dcp.*2 members.*\[2, "),
        ("reduce_scatter", (torch.tensor(1.0),), "tp", r"shape \(\) over tp.*4 members"),
    ],
)
def test_misuse_is_refused_with_the_remedy(pool, operation, argument, axis, message):
    with pytest.raises(ConfigError, match=message):
        pool.run(misuse, operation, argument, axis)


def test_one_rank_needs_no_process_group():
    mesh = CPMesh(Topology())
    x = torch.randn(1, 3)
    for axis in AXES:
        assert (mesh.size(axis), mesh.rank(axis)) == (1, 0)
        assert mesh.all_gather(x, axis).equal(x[None])
        assert mesh.all_to_all(x, axis).equal(x)
        assert mesh.reduce_scatter(x, axis).equal(x[0])
        assert mesh.all_reduce(x, axis).equal(x)
    assert len(mesh.traffic) == 0
    with mesh.guard(), pytest.raises(ConfigError, match="one rank"):
        mesh.tp_mesh()
    with pytest.raises(ConfigError, match="op='mean'"):
        mesh.all_reduce(x, "tp", op="mean")
    with pytest.raises(ConfigError, match="device_type='abacus'"):
        CPMesh(Topology(), "abacus")

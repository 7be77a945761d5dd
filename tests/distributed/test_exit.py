"""A rank that is done ends with status 0, whatever its backend's threads are doing just then."""

import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist

from cplayers.errors import StateError
from cplayers.mesh import CPMesh, Topology, lent

TIMEOUT_S = 120

# Rank 0 begins an operation and ends. Its peer joins in while rank 0 keeps the interpreter lock, at
# the last moment before the interpreter finalizes: gloo's thread then has tensors to drop.
LAST_OPERATION = """
import atexit, os, sys, time
import torch
import torch.distributed as dist
from cplayers import CPMesh, Topology
from cplayers.mesh import world

rendezvous, how = sys.argv[1:]
rank = 0 if os.fork() else 1


def keep_the_lock():
    sys.setswitchinterval(60)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        pass


if rank == 0:
    atexit.register(keep_the_lock)  # before there is a mesh, and so it is the last to run
world.LINGER_S = 60.0  # a busy machine may delay the peer
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
mesh = CPMesh(Topology(pcp=2, dcp=2))
mesh.all_reduce(torch.ones(2), "dcp")
if rank == 0:
    mesh.shift(torch.ones(2), "dcp")
else:
    time.sleep(0.5)
    mesh.shift(torch.ones(2), "dcp").wait()
if how == "destroyed":
    dist.destroy_process_group()
if rank == 0:
    print("done")
else:
    os._exit(0)
"""


def test_rank_ends_cleanly_after_its_last_operation(tmp_path):
    started = {
        how: subprocess.Popen(
            [sys.executable, "-c", LAST_OPERATION, str(tmp_path / how), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for how in ("destroyed", "left open")
    }
    for how, process in started.items():
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, output) == (0, "done\n"), how


_kept = {}


def keep_a_mesh():
    mesh = CPMesh(Topology(tp=2, pcp=2, dcp=2))
    mesh.all_reduce(torch.ones(2), "tp")
    _kept["mesh"] = mesh
    _kept["groups"] = [weakref.ref(mesh.group(axis)) for axis in ("tp", "pcp", "dcp")]
    _kept["groups"].append(weakref.ref(dist.group.WORLD))


def use_the_kept_mesh():
    """In the next process group; torch has destroyed the groups of the last one."""
    mesh, groups = _kept.pop("mesh"), _kept.pop("groups")
    errors = []
    for use in (
        lambda: mesh.group("tp"),
        lambda: mesh.all_reduce(torch.ones(2), "tp"),
        lambda: mesh.shift(torch.ones(2), "dcp"),
        lambda: mesh.device_mesh,
    ):
        with pytest.raises(StateError) as raised:
            use()
        errors.append(str(raised.value))
    return [group() for group in groups], errors, mesh.traffic.count()


def test_a_mesh_does_not_keep_its_groups_open(ranks):
    ranks(4).run(keep_a_mesh)
    for groups, errors, recorded in ranks(2).run(use_the_kept_mesh):
        assert groups == [None] * 4
        assert len(errors) == 4
        assert all("new CPMesh after init_process_group" in error for error in errors)
        assert recorded == 1


def come_back():
    """Whether the backend lets go of an operation's tensors while its input and result live."""
    mesh = CPMesh(Topology(tp=2, dcp=2))
    x = torch.ones(2, 3)
    lent._lent.clear()  # of tests before this one, which may have broken off operations
    operations = {
        "all_gather": lambda: mesh.all_gather(x, "dcp"),
        "all_to_all": lambda: mesh.all_to_all(x, "dcp"),
        "reduce_scatter": lambda: mesh.reduce_scatter(x, "dcp"),
        "all_reduce": lambda: mesh.all_reduce(x, "dcp"),
        "shift": lambda: mesh.shift(x, "dcp").wait(),
    }
    results = {}
    for name, operation in operations.items():
        kept = operation()
        results[name] = lent.wait_for_return(20.0)
        assert kept.sum() > 0
    hop = mesh.shift(x, "dcp")  # keeps what it sends until it is waited for
    results["hop"] = lent.wait_for_return(0.0)
    hop.wait()
    return results


def test_what_is_lent_comes_back(ranks):
    for results in ranks(2).run(come_back):
        assert results.pop("hop") is False
        assert len(results) == 5 and all(results.values()), results

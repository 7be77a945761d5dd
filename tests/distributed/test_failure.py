"""A rank that raises or dies ends the others with an error that names it: real processes, no pool.

Every rank runs in a process of its own and reports how it ended in a file.
"""

import json
import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from cplayers.errors import RankFailedError
from cplayers.mesh import CPMesh, Topology

LIMIT_S = 30.0

# Ranks are forked from a server that has imported torch already, and has used nothing of it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["cplayers.testing.rank"])


def file_store(rank, world_size, directory):
    return dist.FileStore(str(directory / "rendezvous"), world_size)


def in_rank(scenario, rank, topology, directory, store_of):
    torch.set_num_threads(1)
    n = topology.world_size
    store = store_of(rank, n, directory)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
    mesh = CPMesh(topology)
    report = {"began": time.monotonic()}
    try:
        report["value"] = scenario(mesh, directory)
    except Exception as error:  # nothing is lost: it goes to the parent, and each test asserts
        # its type, message and root, or the value that is missing then
        report |= {
            "type": type(error).__name__,
            "message": str(error),
            "root": getattr(error, "rank", None),
        }
    report["seconds"] = time.monotonic() - report.pop("began")
    (directory / f"{rank}.tmp").write_text(json.dumps(report))
    (directory / f"{rank}.tmp").rename(directory / f"{rank}.json")
    # A backend thread may still wait for a rank that is gone: leave without joining it.
    os._exit(0)


def reports_of(scenario, topology, directory, store_of=file_store):
    """Run the scenario on every rank; reports by rank, without those that were killed."""
    processes = [
        CONTEXT.Process(target=in_rank, args=(scenario, rank, topology, directory, store_of))
        for rank in range(topology.world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hung, f"ranks {hung} hang"
    return {
        rank: json.loads((directory / f"{rank}.json").read_text())
        for rank in range(topology.world_size)
        if (directory / f"{rank}.json").exists()
    }


def check_survivors(reports, survivors, root, text):
    for rank in survivors:
        report = reports[rank]
        assert report.get("type") == "RankFailedError", report
        assert report["root"] == root
        assert f"rank {root} failed while rank {rank} was waiting" in report["message"]
        assert text in report["message"] and "Remedy" in report["message"]
        assert report["seconds"] < LIMIT_S


def stay(directory, others):
    """Live on until the other ranks have ended."""
    deadline = time.monotonic() + LIMIT_S
    while len(list(directory.glob("*.json"))) < others and time.monotonic() < deadline:
        time.sleep(0.1)


def last_rank_raises(mesh, directory):
    with mesh.guard():
        mesh.all_reduce(torch.ones(3), "tp")
        if mesh.rank_global == mesh.topology.world_size - 1:
            raise ValueError("the weights are wrong")
        mesh.all_gather(torch.ones(3), "tp")


def last_rank_raises_and_stays(mesh, directory):
    """The rank that raised goes on living, so no connection breaks."""
    try:
        last_rank_raises(mesh, directory)
    except ValueError:
        stay(directory, mesh.topology.world_size - 1)
        raise


def last_rank_is_killed(mesh, directory):
    with mesh.guard():
        mesh.all_reduce(torch.ones(3), "tp")
        if mesh.rank_global == mesh.topology.world_size - 1:
            time.sleep(0.5)  # the others are inside the collective by now
            os.kill(os.getpid(), signal.SIGKILL)
        mesh.all_gather(torch.ones(3), "tp")


def last_rank_exits(mesh, directory):
    mesh.all_reduce(torch.ones(3), "tp")
    if mesh.rank_global == mesh.topology.world_size - 1:
        os._exit(3)
    mesh.all_gather(torch.ones(3), "tp")


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("scenario", [last_rank_raises, last_rank_raises_and_stays])
def test_a_rank_that_raises_is_named(scenario, n, tmp_path):
    reports = reports_of(scenario, Topology(tp=n), tmp_path)
    assert reports[n - 1]["type"] == "ValueError"
    check_survivors(reports, range(n - 1), n - 1, "ValueError: the weights are wrong")


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("scenario", [last_rank_is_killed, last_rank_exits])
def test_a_rank_that_dies_is_named(scenario, n, tmp_path):
    reports = reports_of(scenario, Topology(tp=n), tmp_path)
    assert sorted(reports) == list(range(n - 1))
    check_survivors(reports, range(n - 1), n - 1, "is gone")


def rank_3_raises_far_away(mesh, directory):
    """Rank 0 shares no group with rank 3: it hears of it through ranks 1 and 2."""
    with mesh.guard():
        if mesh.rank_global == 3:
            time.sleep(0.5)
            raise KeyError("k")
        mesh.all_reduce(torch.ones(1), "tp")
        mesh.all_reduce(torch.ones(1), "pcp")
        mesh.all_reduce(torch.ones(1), "tp")


def tcp_store(rank, world_size, directory):
    """A store that rank 0 serves, as torchrun's does not: it dies with rank 0."""
    port_file = directory / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
        (directory / "port.tmp").write_text(str(store.port))
        (directory / "port.tmp").rename(port_file)
        return store
    while not port_file.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), world_size, False)


def rank_0_is_killed(mesh, directory):
    """Rank 3 shares no group with rank 0."""
    with mesh.guard():
        mesh.all_reduce(torch.ones(3), "tp")
        if mesh.rank_global == 0:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        mesh.all_reduce(torch.ones(1), "tp")
        mesh.all_reduce(torch.ones(1), "pcp")
        mesh.all_reduce(torch.ones(1), "tp")


def test_the_rank_that_serves_the_store_is_killed(tmp_path):
    reports = reports_of(rank_0_is_killed, Topology(tp=2, pcp=2), tmp_path, tcp_store)
    assert sorted(reports) == [1, 2, 3]
    check_survivors(reports, [1, 2, 3], 0, "is gone")


def test_the_news_travels_from_group_to_group(tmp_path):
    reports = reports_of(rank_3_raises_far_away, Topology(tp=2, pcp=2), tmp_path)
    assert reports[3]["type"] == "KeyError"
    check_survivors(reports, range(3), 3, "KeyError: 'k'")


def all_raise_alike_and_go_on(mesh, directory):
    totals = []
    for step in range(4):
        try:
            with mesh.guard():
                mesh.all_reduce(torch.ones(1), "tp")
                if step % 2 == 0:
                    raise ValueError(f"step {step}")
        except ValueError:
            # The others may only get there after the first of them has started anew.
            time.sleep(3.0 * mesh.rank_global)
        totals.append(mesh.all_reduce(torch.tensor([float(step)]), "tp").item())
    return totals


def test_an_exception_of_all_ranks_poisons_nothing(tmp_path):
    reports = reports_of(all_raise_alike_and_go_on, Topology(tp=2), tmp_path)
    assert [reports[rank]["value"] for rank in range(2)] == [[0.0, 2.0, 4.0, 6.0]] * 2


def one_raises_and_tries_again(mesh, directory):
    for attempt in range(2):
        try:
            with mesh.guard():
                if mesh.rank_global == 1 and attempt == 0:
                    raise ValueError("only here")
                x = torch.tensor([float(10 * mesh.rank_global + attempt)])
                mesh.all_reduce(x, "tp")
                return "ended"
        except ValueError:
            pass
    return None


def test_an_exception_of_one_rank_cannot_be_tried_again(tmp_path):
    """Else attempt 1 of rank 1 would be added to attempt 0 of rank 0."""
    reports = reports_of(one_raises_and_tries_again, Topology(tp=2), tmp_path)
    for rank in range(2):
        assert reports[rank]["type"] == "RankFailedError"
        assert reports[rank]["root"] == 1
        assert reports[rank]["seconds"] < LIMIT_S


def stopped_twice(mesh, directory):
    try:
        last_rank_raises_and_stays(mesh, directory)
    except RankFailedError as first:
        with pytest.raises(RankFailedError, match="start the process group anew") as second:
            mesh.all_reduce(torch.ones(1), "tp")
        assert second.value.rank == first.rank
        return "refused"


def test_a_stopped_rank_refuses_further_collectives(tmp_path):
    reports = reports_of(stopped_twice, Topology(tp=2), tmp_path)
    assert reports[0]["value"] == "refused"


def rank_1_is_slow(mesh, directory):
    if mesh.rank_global == 1:
        time.sleep(5)
    with mesh.guard():
        gathered = mesh.all_gather(torch.tensor(float(mesh.rank_global)), "tp")
        return gathered.tolist()


def test_a_slow_rank_is_waited_for(tmp_path):
    """Two slices run out meanwhile; the operation goes on."""
    reports = reports_of(rank_1_is_slow, Topology(tp=2), tmp_path)
    assert [reports[rank]["value"] for rank in range(2)] == [[0.0, 1.0]] * 2
    assert reports[0]["seconds"] > 4


def rank_1_never_builds_its_mesh(rank, directory):
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2
    )
    from cplayers.mesh.world import current_world

    began = time.monotonic()
    try:
        with current_world().health.guard(range(2)):
            if rank == 1:
                raise ValueError("before the mesh")
            CPMesh(Topology(tp=2))
    except RankFailedError as error:
        seconds = time.monotonic() - began
        (directory / "0.tmp").write_text(json.dumps([error.rank, str(error), seconds]))
        (directory / "0.tmp").rename(directory / "0.json")
    except ValueError:
        stay(directory, 1)
    os._exit(0)


def test_a_rank_that_raises_before_its_mesh_is_named(tmp_path):
    processes = [
        CONTEXT.Process(target=rank_1_never_builds_its_mesh, args=(rank, tmp_path))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    root, message, seconds = json.loads((tmp_path / "0.json").read_text())
    assert root == 1 and "ValueError: before the mesh" in message and seconds < LIMIT_S

"""Ranks as processes of their own, of which some may die: for tests of what the others do."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Ranks are forked from a server that has imported torch already, and has used nothing of it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["cplayers.testing.rank"])


def in_rank(scenario: Callable[..., Any], rank: int, n: int, folder: Path) -> None:
    """Run ``scenario(rank, folder)`` in a process group with a store that outlives every rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
    try:
        report = scenario(rank, folder)
    except Exception as error:  # nothing is lost: the parent compares the whole report
        report = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.tmp").write_text(json.dumps(report))
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.json")
    os._exit(0)  # a backend thread may still wait for a rank that is gone


def reports_of(scenario: Callable[..., Any], n: int, folder: Path) -> dict[int, Any]:
    """What each rank that lived to the end returned."""
    processes = [
        CONTEXT.Process(target=in_rank, args=(scenario, rank, n, folder)) for rank in range(n)
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
    paths = {rank: folder / f"{rank}.json" for rank in range(n)}
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}

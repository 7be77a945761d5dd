"""``cplayers calibrate``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cplayers.cli.arguments import Flag, Option, count, one_of, word
from cplayers.cli.command import DEGREES, HELP, JSON, MOST_RANKS, Command, need, show_json
from cplayers.errors import ConfigError

if TYPE_CHECKING:
    from cplayers.mesh import Topology
    from cplayers.planning import Calibration, Crossovers, ModelShape

STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TEXT = """
Measures on the ranks at hand, in a few seconds: matrix products, reading keys and values, latency
and bandwidth of collectives and of combining. Says from which sizes one strategy beats another for
one layer of a model. Results are kept in a file, whose path is shown; --refresh measures anew.

Without torchrun it starts its own ranks on this machine's CPU (gloo). Under torchrun it measures
the ranks that were started:

Examples:
  cplayers calibrate pcp=2 dcp=2
  cplayers calibrate tp=4 dcp=4 model=deepseek-v3 chunk=512 --refresh
  torchrun --nproc-per-node 8 -m cplayers.cli calibrate tp=8 dcp=8 device=cuda dtype=bf16
"""


def run(values: Mapping[str, Any]) -> int:
    """Calibrate.

    Args:
        values: Of the arguments.
    """
    from cplayers.mesh import Topology
    from cplayers.planning import ModelShape
    from cplayers.planning.calibrate import check_file

    if not values["json"]:
        need("rich", "the tables of cplayers calibrate")
    topology = Topology(*(values[name] for name in ("tp", "dcp", "pcp", "dp")))
    _ = topology.dcp_tp  # refuses a dcp that tp and pcp do not allow
    shape = ModelShape.load(values["model"])
    path = Path(values["file"]) if values["file"] else cache_path()
    check_file(path)
    call = (topology, values["device"], values["dtype"], path, values["refresh"])
    if "WORLD_SIZE" in os.environ:
        found = _on_started_ranks(*call)
        if found is None:
            return 0
    elif values["device"] != "cpu":
        raise ConfigError(
            f"device={values['device']} without torchrun",
            "ranks that this command starts are on the CPU",
            f"torchrun --nproc-per-node {topology.world_size} -m cplayers.cli calibrate ...",
        )
    elif topology.world_size > MOST_RANKS:
        raise ConfigError(
            f"{topology.world_size} ranks",
            f"at most {MOST_RANKS} processes are started on this machine",
            "use smaller degrees, or start the ranks with torchrun",
        )
    else:
        from cplayers.testing import RankPool

        with RankPool(topology.world_size) as pool:
            found = pool.run(measure, *call)[0]
    _report(found, topology, path, shape, values)
    return 0


def cache_path() -> Path:
    """Where calibrations are kept: under XDG_CACHE_HOME, where that is set."""
    from cplayers.planning.calibrate import default_path

    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "cplayers" / "calibration.json" if base else default_path()


def measure(topology: Topology, device: str, dtype: str, path: Path, refresh: bool) -> Calibration:
    """Run on each rank.

    Args:
        topology: The ranks.
        device: Where tensors live.
        dtype: Of what is measured.
        path: File of calibrations.
        refresh: Measure even where the file has figures.
    """
    from cplayers.mesh import CPMesh
    from cplayers.planning import calibrate
    from cplayers.planning.memory import DTYPES

    mesh = CPMesh(topology, device)
    return calibrate(mesh, dtype=DTYPES[dtype], path=path, refresh=refresh)


def _on_started_ranks(
    topology: Topology, device: str, dtype: str, path: Path, refresh: bool
) -> Calibration | None:
    """Measure under torchrun; ``None`` on all ranks but the first."""
    import torch
    import torch.distributed as dist

    missing = [name for name in STARTED if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE without {missing[0]}",
            f"ranks that were started have {', '.join(STARTED)} in their environment",
            "start them with torchrun, or unset WORLD_SIZE to have ranks started here",
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device=cuda",
            "torch sees no CUDA device here",
            "pass device=cpu, or install its CUDA build",
        )
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT", "LOCAL_RANK"):
        if not os.environ.get(name, "0").isdecimal():
            raise ConfigError(
                f"{name}={os.environ[name]}", f"{name} is a number", "start ranks with torchrun"
            )
    if os.environ["WORLD_SIZE"] != str(topology.world_size):
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} with {topology}",
            f"this layout has {topology.world_size} ranks",
            f"start {topology.world_size} ranks, or pass tp, dcp, pcp and dp for those there are",
        )
    if device == "cuda":
        here, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if here >= there:
            raise ConfigError(
                f"LOCAL_RANK={here} with device=cuda",
                f"each rank has a device of its own, and there are {there} here",
                f"start at most {there} ranks on a machine (torchrun --nproc-per-node {there})",
            )
        torch.cuda.set_device(here)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        found = measure(topology, device, dtype, path, refresh)
    finally:
        dist.destroy_process_group()
    return found if os.environ.get("RANK", "0") == "0" else None


def _report(
    found: Calibration,
    topology: Topology,
    path: Path,
    shape: ModelShape,
    values: Mapping[str, Any],
) -> None:
    from cplayers.planning import crossovers
    from cplayers.planning.memory import DTYPES

    crossed = None
    if topology.dcp > 1:
        crossed = crossovers(
            shape,
            topology,
            found.speeds(),
            chunk=values["chunk"],
            dtype=DTYPES[values["dtype"]],
            precision="bf16",
        )
    if values["json"]:
        data = {"file": str(path), "measured": found.to_dict()}
        show_json({**data, "predicted": {"crossovers": crossed._asdict() if crossed else None}})
        return
    _show(found, path)
    if crossed is not None:
        _show_crossovers(crossed, topology, values["model"])


def _show(found: Calibration, path: Path) -> None:
    from cplayers.cli.output import show
    from cplayers.planning.advice import gb, seconds
    from cplayers.planning.measure import COMBINES

    print(f"{found.key}\nMeasured {found.measured}, kept in {path}\n")
    rows = [
        ["matrix product", "", f"{found.flops / 1e9:,.1f} GFLOP/s"],
        ["reading keys and values", "", f"{gb(found.memory_bandwidth)}/s"],
    ]
    for name, link in found.links.items():
        what = f"combining by {name}" if name in COMBINES else f"{name} over {found.axis}"
        rows.append([what, seconds(link.latency_s), f"{gb(link.bandwidth)}/s"])
    show("Measured on one rank", ["what", "latency", "rate"], rows, left=("what",))


def _show_crossovers(crossed: Crossovers, topology: Topology, model: str) -> None:
    def size(value: int | None, what: str) -> str:
        if value is None:
            return "nowhere"
        return "everywhere" if value == 1 else f"from {value:,} {what}"

    print(f"\nPredicted from these, for one layer of {model} on {topology}:")
    print(f"- dcp={topology.dcp} beats dcp=1 when decoding: {size(crossed.dcp, 'cached tokens')}")
    print(
        f"- gather_q beats gather_kv for {crossed.chunk} new tokens: "
        f"{size(crossed.gather_q, 'cached tokens')}"
    )
    print(f"- a2a beats ag_rs: {size(crossed.a2a, 'rows')}")


COMMAND = Command(
    summary="Measure the ranks at hand, and from which sizes one strategy beats another.",
    text=TEXT,
    options={
        **DEGREES,
        "device": Option(one_of("cpu", "cuda"), "cpu", "where tensors live"),
        "dtype": Option(one_of("fp32", "bf16", "fp16"), "fp32", "of what is measured"),
        "model": Option(word, "llama-3-8b", "whose layer the crossovers are for"),
        "chunk": Option(count, 256, "new tokens of a chunk of a prompt"),
        "file": Option(word, None, "file of calibrations [in the user's cache folder]"),
    },
    flags={"refresh": Flag("measure even where the file has figures"), **JSON, **HELP},
    run=run,
)

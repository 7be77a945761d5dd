"""Measuring how fast the ranks at hand are, in a few seconds, kept in a file.

    compute     a product of square matrices
    memory      a layer's decode step over a cache of two lengths: the slope, per byte of it
    collective  each operation at two sizes: the smaller one is latency, the slope is bandwidth
    combining   likewise, with what a layer does around the collectives (packing, merging)

All ranks measure at once, since they share memory and links, and the slowest rank counts. Repeats
of the sizes alternate. The fastest counts: other work on the machine only ever adds time.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from cplayers.attention import Combine, DCPGQAAttention, combine
from cplayers.cache import InterleavedLayout, PagedKVCache
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh, Topology
from cplayers.ops import Partial
from cplayers.planning.speeds import Link, Speeds

AXES = ("dcp", "pcp", "tp")
OPERATIONS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
COMBINES = ("a2a", "ag_rs", "ar")
_SIDE = 768  # of the matrices
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 32, 8, 128
_BLOCK = 16
_KEYS = (512, 4096)
_ELEMENTS = (1024, 262_144)  # that a member contributes
_ROWS = (1, 64)  # that are combined
_REPEATS = 31


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        key: The machine, software and ranks that it holds for.
        flops: Operations a second of a matrix product on one rank.
        memory_bandwidth: Bytes of keys and values that a decode row reads a second on one rank.
        axis: Axis whose collectives were measured, empty on one rank.
        links: By operation, and by way of combining where dcp is above 1.
        measured: Date and time.
    """

    key: str
    flops: float
    memory_bandwidth: float
    axis: str
    links: dict[str, Link]
    measured: str

    def speeds(self) -> Speeds:
        """For `TimeModel` and `crossovers`."""
        slowest = max(self.links.values(), key=lambda link: link.latency_s, default=Link(0.0, 1e30))
        return Speeds(self.flops, self.memory_bandwidth, {**self.links, "*": slowest})

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "links": {op: link._asdict() for op, link in self.links.items()}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Calibration:
        """The inverse of `to_dict`.

        Args:
            data: Plain data.
        """
        return cls(**{**data, "links": {op: Link(**link) for op, link in data["links"].items()}})


def default_path() -> Path:
    """Where calibrations are kept."""
    return Path.home() / ".cache" / "cplayers" / "calibration.json"


def calibrate(
    mesh: CPMesh,
    *,
    dtype: torch.dtype = torch.float32,
    path: Path | None = None,
    refresh: bool = False,
) -> Calibration:
    """Measure compute, memory and collectives, or read what was measured before.

    Called on all ranks alike; all get the same figures.

    Args:
        mesh: The ranks. Collectives are measured over the largest of dcp, pcp and tp.
        dtype: Of what is multiplied, read and sent.
        path: File of calibrations, `default_path` if not given. It is read on every rank, and
            written by rank 0.
        refresh: Measure even where the file has figures for this machine, software and ranks.

    Raises:
        ConfigError: If the file exists and is not one of calibrations; on all ranks alike where
            they share it.
    """
    path = path or default_path()
    key = _key(mesh, dtype)
    known = None if refresh else _read(path).get(key)
    if _agree(mesh, [0.0 if known else 1.0])[0] == 0.0 and known:
        found = Calibration.from_dict(known)
        # ranks on several machines have a file each: the slowest figures count, as when measured
        times = [1 / found.flops, 1 / found.memory_bandwidth]
        for link in found.links.values():
            times += [link.latency_s, 1 / link.bandwidth]
        agreed = _agree(mesh, times)
        measured = found.measured
    else:
        agreed = _measure(mesh, dtype)
        measured = time.strftime("%Y-%m-%d %H:%M:%S")
    axis = _axis(mesh)
    links = {
        operation: Link(agreed[2 + 2 * i], 1 / agreed[3 + 2 * i])
        for i, operation in enumerate(_linked(mesh))
    }
    result = Calibration(key, 1 / agreed[0], 1 / agreed[1], axis, links, measured)
    if not known and mesh.rank_global == 0:
        _write(path, result)
    return result


def _key(mesh: CPMesh, dtype: torch.dtype) -> str:
    t = mesh.topology
    device = platform.processor() or platform.machine()
    if mesh.device_type == "cuda":
        device = torch.cuda.get_device_name()
    return (
        f"{platform.node()}, {mesh.device_type} {device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {str(dtype).removeprefix('torch.')}, "
        f"tp={t.tp} dcp={t.dcp} pcp={t.pcp} dp={t.dp}"
    )


def _axis(mesh: CPMesh) -> str:
    """The largest axis, or an empty string where all have size 1."""
    axis = max(AXES, key=mesh.size)
    return axis if mesh.size(axis) > 1 else ""


def _linked(mesh: CPMesh) -> tuple[str, ...]:
    """What is measured between ranks."""
    operations = OPERATIONS if _axis(mesh) else ()
    return (*operations, *COMBINES) if mesh.size("dcp") > 1 else operations


def _measure(mesh: CPMesh, dtype: torch.dtype) -> list[float]:
    """Seconds per operation and per byte, then latency and seconds per byte of each collective."""
    per_flop = _products(mesh, dtype)
    per_byte = _reads(mesh, dtype)
    found = [per_flop, per_byte]
    for name in _linked(mesh):
        found += (
            _combining(mesh, dtype, name) if name in COMBINES else _collective(mesh, dtype, name)
        )
    return found


def _products(mesh: CPMesh, dtype: torch.dtype) -> float:
    a = torch.randn(_SIDE, _SIDE, device=mesh.device_type).to(dtype)
    (seconds,) = _fastest(mesh, [lambda: a @ a])
    return seconds / (2 * _SIDE**3)


def _reads(mesh: CPMesh, dtype: torch.dtype) -> float:
    """Through a layer and its cache, each rank by itself: what reads is what layers read with."""
    alone = CPMesh(Topology(), mesh.device_type)
    layer = DCPGQAAttention(_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, layer_idx=0, mesh=alone)
    layer = layer.to(mesh.device_type, dtype)
    layout = InterleavedLayout(1, _BLOCK, _BLOCK)
    blocks = sum(layout.blocks(keys + 1) for keys in _KEYS)
    cache = PagedKVCache(layer.cache_spec, layout, 1, blocks, dtype=dtype, device=mesh.device_type)
    x = torch.zeros(1, _HIDDEN, dtype=dtype, device=mesh.device_type)
    angles = torch.zeros(1, _HEAD_DIM, dtype=dtype, device=mesh.device_type)
    for keys in _KEYS:
        cache.add(keys)
        cache.commit(cache.plan([(keys, keys)]))

    def read(keys: int) -> None:
        with torch.no_grad():
            layer(x, (angles, angles), cache, cache.plan([(keys, 1)]))

    work = [partial(read, keys) for keys in _KEYS]
    short, long = _fastest(mesh, work)
    row = layer.sizes.stored * dtype.itemsize
    return max(long - short, long / 10) / ((_KEYS[1] - _KEYS[0]) * row)


def _collective(mesh: CPMesh, dtype: torch.dtype, operation: str) -> list[float]:
    axis = _axis(mesh)
    run: Callable[[Tensor, str], object] = getattr(mesh, operation)
    scattered = operation in ("all_to_all", "reduce_scatter")
    work = []
    for elements in _ELEMENTS:
        rows = (mesh.size(axis), elements) if scattered else (elements,)
        x = torch.zeros(rows, dtype=dtype, device=mesh.device_type)
        work.append(partial(run, x, axis))
    return _line(mesh, work)


def _combining(mesh: CPMesh, dtype: torch.dtype, how: str) -> list[float]:
    heads = _HEADS * mesh.size("dcp_tp")
    work = []
    for rows in _ROWS:
        out = torch.zeros(rows, heads, _HEAD_DIM, device=mesh.device_type).to(dtype)
        lse = torch.zeros(rows, heads, device=mesh.device_type)
        work.append(partial(combine, Partial(out, lse), mesh, cast("Combine", how)))
    return _line(mesh, work)


def _line(mesh: CPMesh, work: Sequence[Callable[[], object]]) -> list[float]:
    """Latency, and seconds per byte sent, through the times of a small and a large one."""
    volumes = []
    for run in work:
        with mesh.traffic.capture() as log:
            run()
        volumes.append(log.bytes())
    small, large = _fastest(mesh, work)
    per_byte = max(large - small, large / 10) / (volumes[1] - volumes[0])
    return [max(small - per_byte * volumes[0], small / 10), per_byte]


def _fastest(mesh: CPMesh, work: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each one's fastest repeat, taking turns; of the slowest rank."""
    samples: list[list[float]] = [[] for _ in work]
    for repeat in range(_REPEATS + 2):
        for run, taken in zip(work, samples, strict=True):
            _agree(mesh, [0.0])  # all ranks begin together
            start = time.perf_counter()
            run()
            _finish(mesh)
            if repeat >= 2:  # after warming up
                taken.append(time.perf_counter() - start)
    return _agree(mesh, [min(taken) for taken in samples])


def _finish(mesh: CPMesh) -> None:
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()


def _agree(mesh: CPMesh, values: Sequence[float]) -> list[float]:
    """The largest of each value over all ranks, the same on all of them."""
    x = torch.tensor(values, dtype=torch.float64, device=mesh.device_type)
    for axis in ("tp", "pcp", "dp"):
        x = mesh.all_reduce(x, axis, op="max")
    return [float(value) for value in x]


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        data = None
    if not isinstance(data, dict):
        raise ConfigError(
            f"calibrations in {path}", "it is a JSON file of calibrations", "delete the file"
        )
    return data


def _write(path: Path, calibration: Calibration) -> None:
    data = {**_read(path), calibration.key: calibration.to_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{id(data)}")
    fresh.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)

"""Measuring how fast the ranks at hand are, in a few seconds, kept in a file.

`cplayers.planning.measure` says what is measured, and how.
"""

from __future__ import annotations

import json
import math
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh
from cplayers.planning.measure import agree, linked, measure, widest_axis
from cplayers.planning.speeds import Link, Speeds


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

    Called on all ranks alike; all get the same figures. On GPUs each rank has made a device of its
    own the current one (``torch.cuda.set_device``), as for every collective.

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
    known = None if refresh else _known(path, key)
    if agree(mesh, [0.0 if known else 1.0])[0] == 0.0 and known:
        found = known
        # ranks on several machines have a file each: the slowest figures count, as when measured
        times = [1 / found.flops, 1 / found.memory_bandwidth]
        for link in found.links.values():
            times += [link.latency_s, 1 / link.bandwidth]
        agreed = agree(mesh, times)
        measured = found.measured
    else:
        agreed = measure(mesh, dtype)
        measured = time.strftime("%Y-%m-%d %H:%M:%S")
    axis = widest_axis(mesh)
    links = {
        operation: Link(agreed[2 + 2 * i], 1 / agreed[3 + 2 * i])
        for i, operation in enumerate(linked(mesh))
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


def check_file(path: Path) -> None:
    """Refuse a file that calibrations cannot be kept in, before anything is measured.

    Its folder is made where there is none.

    Args:
        path: Of the file.

    Raises:
        ConfigError: If it cannot be written, or holds something else.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"calibrations in {path}",
            f"it cannot be written ({error.strerror})",
            "name another file",
        ) from None
    _read(path)


def _known(path: Path, key: str) -> Calibration | None:
    """What the file has for these ranks."""
    data = _read(path).get(key)
    if data is None:
        return None
    try:
        found = Calibration.from_dict(data)
        rates = [found.flops, found.memory_bandwidth, *(v for x in found.links.values() for v in x)]
        right = all(0 < rate < math.inf for rate in rates)
    except (TypeError, KeyError, AttributeError):
        right = False
    if not right:
        raise _other(path)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise _other(path)
    return data


def _other(path: Path) -> ConfigError:
    return ConfigError(
        f"calibrations in {path}",
        "they are kept in a JSON file of calibrations",
        "name another file" if path.is_dir() else "name another file, or delete this one",
    )


def _write(path: Path, calibration: Calibration) -> None:
    data = {**_read(path), calibration.key: calibration.to_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{id(data)}")
    fresh.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)

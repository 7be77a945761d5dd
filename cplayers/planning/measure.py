"""What is measured on live ranks, and how.

    compute     a product of square matrices
    memory      a layer's decode step over a cache of two lengths: the slope, per byte of it
    collective  each operation at two sizes: the smaller one is latency, the slope is bandwidth
    combining   the same step with dcp less the one without, over a short cache, with one row and
                with many: what combining costs where it happens, packing and merging included

All ranks measure at once, since they share memory and links, and the slowest rank counts. Repeats
of the sizes alternate. The fastest counts: other work on the machine only ever adds time.

A GPU is asked for more than a CPU (`SCALES`): what it is timed on has to take far longer than the
launch of a kernel, some 10 us, or launches are what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from cplayers.attention import Combine, DCPGQAAttention
from cplayers.cache import InterleavedLayout, PagedKVCache
from cplayers.mesh import CPMesh, Topology

AXES = ("dcp", "pcp", "tp")
OPERATIONS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
COMBINES = ("a2a", "ag_rs", "ar")
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 32, 8, 128
_BLOCK = 16
_SHORT = 16  # cached tokens where combining is measured
_REPEATS = 31


class Scale(NamedTuple):
    """Sizes of what is timed.

    Attributes:
        side: Of the matrices.
        keys: Cached tokens of two decode steps.
        elements: That a member contributes to two collectives.
        rows: That two decode steps combine.
    """

    side: int
    keys: tuple[int, int]
    elements: tuple[int, int]
    rows: tuple[int, int]


CPU = Scale(768, (512, 4096), (1024, 1 << 18), (1, 64))
GPU = Scale(8192, (1 << 15, 1 << 18), (1024, 1 << 24), (1, 1024))
"""In bf16: 1.1e12 operations, 0.9 GB that is read, 32 MB and 8 MB that travel."""


def scale_of(mesh: CPMesh) -> Scale:
    """What is timed on the device of a mesh.

    Args:
        mesh: The ranks.
    """
    return CPU if mesh.device_type == "cpu" else GPU


def widest_axis(mesh: CPMesh) -> str:
    """The largest of dcp, pcp and tp, or an empty string where all have size 1.

    Args:
        mesh: The ranks.
    """
    axis = max(AXES, key=mesh.size)
    return axis if mesh.size(axis) > 1 else ""


def linked(mesh: CPMesh) -> tuple[str, ...]:
    """What is measured between ranks, in this order.

    Args:
        mesh: The ranks.
    """
    operations = OPERATIONS if widest_axis(mesh) else ()
    return (*operations, *COMBINES) if mesh.size("dcp") > 1 else operations


def measure(mesh: CPMesh, dtype: torch.dtype) -> list[float]:
    """Seconds per operation and per byte read, then latency and seconds per byte of each `linked`.

    Args:
        mesh: The ranks, all of which call this.
        dtype: Of what is multiplied, read and sent.
    """
    per_flop = _products(mesh, dtype)
    per_byte = _reads(mesh, dtype)
    found = [per_flop, per_byte]
    for operation in OPERATIONS if widest_axis(mesh) else ():
        found += _collective(mesh, dtype, operation)
    return found + (_combining(mesh, dtype) if mesh.size("dcp") > 1 else [])


def _products(mesh: CPMesh, dtype: torch.dtype) -> float:
    side = scale_of(mesh).side
    a = torch.randn(side, side, device=mesh.device_type).to(dtype)
    (seconds,) = _fastest(mesh, [lambda: a @ a])
    return seconds / (2 * side**3)


def _reads(mesh: CPMesh, dtype: torch.dtype) -> float:
    """Through a layer and its cache, each rank by itself: what reads is what layers read with."""
    alone = CPMesh(Topology(), mesh.device_type)
    keys = scale_of(mesh).keys
    short, long = _fastest(mesh, [_decode(alone, dtype, count, 1) for count in keys])
    row = 2 * _KV_HEADS * _HEAD_DIM * dtype.itemsize
    return max(long - short, long / 10) / ((keys[1] - keys[0]) * row)


def _decode(
    mesh: CPMesh, dtype: torch.dtype, keys: int, rows: int, how: Combine = "a2a"
) -> Callable[[], object]:
    """A layer's decode step, with as many heads on a rank whatever the layout."""
    layer = DCPGQAAttention(
        _HIDDEN,
        _HEADS * mesh.size("tp"),
        _KV_HEADS * mesh.size("tpa"),
        _HEAD_DIM,
        layer_idx=0,
        q_proj="tpa",  # so that no queries are gathered
        combine=how,
        mesh=mesh,
    ).to(mesh.device_type, dtype)
    layout = InterleavedLayout(mesh.size("dcp"), 1, _BLOCK)
    cache = PagedKVCache(
        layer.cache_spec,
        layout,
        1,
        layout.blocks(keys + rows),
        mesh.rank("dcp"),
        dtype,
        mesh.device_type,
        pcp_rank=mesh.rank("pcp"),
        pcp_size=mesh.size("pcp"),
    )
    cache.add("a")
    cache.commit(cache.plan([("a", keys)]))
    plan = cache.plan([("a", rows)], max_decode_tokens=rows)
    x = torch.zeros(rows, _HIDDEN, dtype=dtype, device=mesh.device_type)
    angles = torch.zeros(rows, _HEAD_DIM, dtype=dtype, device=mesh.device_type)

    def run() -> None:
        with torch.no_grad():
            layer(x, (angles, angles), cache, plan)

    return run


def _collective(mesh: CPMesh, dtype: torch.dtype, operation: str) -> list[float]:
    axis = widest_axis(mesh)
    run: Callable[[Tensor, str], object] = getattr(mesh, operation)
    scattered = operation in ("all_to_all", "reduce_scatter")
    work = []
    for elements in scale_of(mesh).elements:
        rows = (mesh.size(axis), elements) if scattered else (elements,)
        x = torch.zeros(rows, dtype=dtype, device=mesh.device_type)
        work.append(partial(run, x, axis))
    times = _fastest(mesh, work)
    return _line(times, [_volume(mesh, call, axis) for call in work], floor=times[0] / 10)


def _combining(mesh: CPMesh, dtype: torch.dtype) -> list[float]:
    """Latency and seconds per byte of each way."""
    without = CPMesh(replace(mesh.topology, dcp=1), mesh.device_type)
    both = scale_of(mesh).rows
    work = [_decode(without, dtype, _SHORT, rows) for rows in both]
    volumes = []
    for how in COMBINES:
        for rows in both:
            work.append(_decode(mesh, dtype, _SHORT, rows, cast("Combine", how)))
            volumes.append(_volume(mesh, work[-1], "dcp"))
    small, large, *taken = _fastest(mesh, work)
    found: list[float] = []
    for i in range(0, len(taken), 2):
        extra = taken[i] - small, taken[i + 1] - large
        found += _line(extra, (volumes[i], volumes[i + 1]), floor=taken[i] / 100)
    return found


def _volume(mesh: CPMesh, run: Callable[[], object], axis: str) -> int:
    """Bytes that this rank sends over an axis."""
    with mesh.traffic.capture() as log:
        run()
    return log.bytes(axis)


def _line(times: Sequence[float], volumes: Sequence[int], floor: float) -> list[float]:
    """Latency, and seconds per byte, through two points; neither below what noise could make it."""
    per_byte = max(times[1] - times[0], floor) / (volumes[1] - volumes[0])
    return [max(times[0] - per_byte * volumes[0], floor), per_byte]


def _fastest(mesh: CPMesh, work: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each one's fastest repeat, taking turns; of the slowest rank."""
    samples: list[list[float]] = [[] for _ in work]
    for repeat in range(_REPEATS + 2):
        for run, taken in zip(work, samples, strict=True):
            agree(mesh, [0.0])  # all ranks begin together
            start = time.perf_counter()
            run()
            _finish(mesh)
            if repeat >= 2:  # after warming up
                taken.append(time.perf_counter() - start)
    return agree(mesh, [min(taken) for taken in samples])


def _finish(mesh: CPMesh) -> None:
    """Wait for what was launched: a device other than the CPU runs behind the host."""
    if mesh.device_type != "cpu":
        torch.accelerator.synchronize()


def agree(mesh: CPMesh, values: Sequence[float]) -> list[float]:
    """The largest of each value over all ranks, the same on all of them.

    Args:
        mesh: The ranks, all of which call this.
        values: Of this rank.
    """
    x = torch.tensor(values, dtype=torch.float64, device=mesh.device_type)
    for axis in ("tp", "pcp", "dp"):
        x = mesh.all_reduce(x, axis, op="max")
    return [float(value) for value in x]

"""Collectives of any sizes: parts that differ from member to member, and bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from cplayers.errors import ConfigError
from cplayers.mesh.lent import lend
from cplayers.mesh.mesh import CPMesh


def exchange(
    mesh: CPMesh, parts: Sequence[Tensor], sizes: Sequence[int], axis: str
) -> list[Tensor]:
    """Send ``parts[i]`` to member i, and receive ``sizes[i]`` bytes from it.

    Only bytes between different members are sent and recorded in ``mesh.traffic``; the own part is
    returned as it is.

    Args:
        mesh: The ranks.
        parts: One uint8 tensor `[bytes]` per member, in rank order.
        sizes: Bytes that each member sends to this one, which every member knows.
        axis: The axis.

    Returns:
        What came from each member, uint8 `[bytes]`.

    Raises:
        ConfigError: There is not one part and size per member, or a part is of another kind.
        RankFailedError: A member failed.
    """
    n, me = mesh.size(axis), mesh.rank(axis)
    kinds = {(part.dtype, part.dim()) for part in parts}
    if len(parts) != n or len(sizes) != n or kinds != {(torch.uint8, 1)}:
        raise ConfigError(
            f"{len(parts)} parts of {kinds} and {len(sizes)} sizes over {axis}",
            f"there is one uint8 vector and one size for each of the {n} members",
            "pass an empty part where nothing is sent",
        )
    own = parts[me]
    sent = sum(len(part) for part in parts) - len(own)
    at = mesh.begin(axis, "exchange", sent)
    if at.group is None:
        return [own]
    # torch numbers the members of a group in ascending order
    places = [at.ranks.index(rank) for rank in sorted(at.ranks)]
    nothing = own[:0]
    outgoing = torch.cat([nothing if i == me else parts[i] for i in places])
    give = [0 if i == me else len(parts[i]) for i in places]
    take = [0 if i == me else sizes[i] for i in places]
    received = outgoing.new_empty(sum(take))
    lend(received, outgoing)
    work = dist.all_to_all_single(received, outgoing, take, give, group=at.group, async_op=True)
    at.wait_for(received, "exchange")(cast("dist.Work", work))
    came = dict(zip(places, torch.split(received, take), strict=True))
    return [own if i == me else came[i] for i in range(n)]


FIRST_BYTES = 1016
"""Bytes of each member that travel together with their number: short messages take one gather."""


def gather_bytes(mesh: CPMesh, data: bytes, axis: str) -> list[bytes]:
    """Every member's ``data``, of any length, in rank order.

    Args:
        mesh: The ranks.
        data: What this member says.
        axis: The axis.

    Raises:
        RankFailedError: A member failed.
    """
    if mesh.size(axis) == 1:
        return [data]
    head = len(data).to_bytes(8, "little") + data[:FIRST_BYTES]
    heads = _gather_rows(mesh, head, 8 + FIRST_BYTES, axis)
    sizes = [int.from_bytes(each[:8], "little") for each in heads]
    rest = max(0, max(sizes) - FIRST_BYTES)  # the same on all members
    tails = _gather_rows(mesh, data[FIRST_BYTES:], rest, axis) if rest else [b""] * len(heads)
    whole = (head[8:] + tail for head, tail in zip(heads, tails, strict=True))
    return [text[:size] for text, size in zip(whole, sizes, strict=True)]


def _gather_rows(mesh: CPMesh, data: bytes, size: int, axis: str) -> list[bytes]:
    """Every member's ``data``, padded to ``size`` bytes."""
    row = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    rows = mesh.all_gather(row.to(mesh.device_type), axis).cpu()
    return [ctypes.string_at(each.data_ptr(), size) for each in rows]

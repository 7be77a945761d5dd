"""Combining the partial results of a DCP group.

Each rank attended to its own keys for all of the group's heads, and gets the merged output of the
heads that it owns.

T rows, N heads of the group, n = N / k heads of a rank, k TP neighbours and p PCP ranks in the
group, V value dim, e bytes per element. All members of the group hold the same rows; members that
differ only in their PCP rank own the same heads.

| how   | collectives | sent per rank, bytes                                     |
|-------|-------------|----------------------------------------------------------|
| a2a   | 1           | (kp - 1) * T * n * (V*e + 4)                             |
| ag_rs | 2           | (kp - 1) * T * (N * 4 + n * V * 4)                       |
| ar    | 2           | (kp - 1) * T * N * 4 + 2 * (kp - 1)/(kp) * T * N * V * 4 |

Without PCP (p = 1) the first line is (k - 1)/k * T * N * (V*e + 4). ``a2a`` carries outputs in
their own type with the fp32 lse packed beside them and merges in fp32; the other two reduce on the
wire and therefore carry fp32 (fp64 for fp64 outputs). ``ar`` gives every rank all heads and is the
choice where that is wanted.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from einops import rearrange
from torch import Tensor

from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh, Topology
from cplayers.ops import Partial, merge_stacked, scale_weights, weigh

Combine = Literal["a2a", "ag_rs", "ar"]


def require_combine(how: str) -> None:
    """Raise ConfigError unless ``how`` names a way of combining."""
    if how not in get_args(Combine):
        names = ", ".join(get_args(Combine))
        raise ConfigError(
            f"combine={how!r}",
            "partial outputs are combined in one of the known ways",
            f"choose one of {names}",
        )


def combine_bytes(
    how: Combine, topology: Topology, *, rows: int, own_heads: int, value_dim: int, itemsize: int
) -> int:
    """Bytes that `combine` sends per rank, as the module's table says.

    Args:
        how: The way of combining.
        topology: The ranks.
        rows: T.
        own_heads: n.
        value_dim: V.
        itemsize: Bytes per element of out, e.
    """
    others = topology.dcp - 1
    heads = own_heads * topology.dcp_tp
    if how == "a2a":
        return others * rows * own_heads * (value_dim * itemsize + 4)
    wide = max(4, itemsize)
    lse = others * rows * heads * 4
    if how == "ag_rs":
        return lse + others * rows * own_heads * value_dim * wide
    return lse - (-2 * others * rows * heads * value_dim * wide // topology.dcp)


def combine(partial: Partial, mesh: CPMesh, how: Combine) -> Tensor:
    """Merge over the DCP group and keep this rank's heads.

    Args:
        partial: out `[T, N, V]` and lse `[T, N]` over this rank's keys, N the group's heads.
        mesh: The ranks.
        how: See the module's table.

    Returns:
        `[T, n, V]` in out's type, the same bits on all PCP ranks.

    Raises:
        ConfigError: On an unknown ``how``.
    """
    require_combine(how)
    if mesh.size("dcp") == 1:
        return partial.out
    if how == "a2a":
        return _all_to_all(partial, mesh)
    scaled = _scale_own(partial, mesh)
    if how == "ag_rs":
        merged = mesh.reduce_scatter(_chunks(scaled, mesh), "dcp")
    else:
        whole = mesh.all_reduce(scaled, "dcp")
        own = whole.shape[1] // mesh.size("dcp_tp")
        merged = whole.narrow(1, mesh.rank("dcp_tp") * own, own)
    return merged.to(partial.out.dtype)


def _all_to_all(partial: Partial, mesh: CPMesh) -> Tensor:
    received = mesh.all_to_all(_chunks(pack(partial), mesh), "dcp")
    out, lse = unpack(received, partial.out.dtype)
    return merge_stacked(out, lse).out


def _scale_own(partial: Partial, mesh: CPMesh) -> Tensor:
    """This rank's output times its share of the softmax mass, in fp32 or better."""
    weights, _ = scale_weights(mesh.all_gather(partial.lse, "dcp"))
    return weigh(partial.out, weights[mesh.rank("dcp")])


def _chunks(x: Tensor, mesh: CPMesh) -> Tensor:
    """`[T, N, ...]` to `[members, T, n, ...]`: the heads that each member of the group owns."""
    k = mesh.size("dcp_tp")
    chunks = rearrange(x, "t (k n) v -> k t n v", k=k)
    copies = mesh.size("dcp") // k  # members are tp-major, pcp-minor (`Topology.groups`)
    return chunks if copies == 1 else chunks.repeat_interleave(copies, 0)


def pack(partial: Partial) -> Tensor:
    """out `[T, N, V]` and lse `[T, N]` side by side, lse in 4 bytes whatever out's type.

    Returns:
        `[T, N, W]` in a type of at most 4 bytes per element, W elements being V*e + 4 bytes.
    """
    carrier = partial.out.dtype if partial.out.dtype.itemsize <= 4 else torch.float32
    lse = partial.lse.contiguous()[..., None]
    return torch.cat([partial.out.contiguous().view(carrier), lse.view(carrier)], dim=-1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Partial:
    """The inverse of `pack`, for any leading shape."""
    width = 4 // packed.dtype.itemsize
    out, lse = packed[..., :-width], packed[..., -width:]
    if packed.dtype != dtype:
        out = _own_memory(out).view(dtype)
    return Partial(out, _own_memory(lse).view(torch.float32).squeeze(-1))


def _own_memory(x: Tensor) -> Tensor:
    """A copy from offset 0 on: ``contiguous`` keeps a single row where it is, at any offset."""
    return x.clone(memory_format=torch.contiguous_format)

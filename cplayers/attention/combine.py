"""Combining the partial results of a DCP group.

Each rank attended to its own keys for all of the group's heads, and gets the merged output of the
heads that it owns.

Members of a group are tp-major and pcp-minor: heads go by a member's place on the TP axis. Decode
rows are wanted by all members. Of chunks of prompts, whose queries came from the PCP ranks, each
PCP rank gets its own rows back. What is sent is in `cplayers.attention.costs`.

| how   | collectives | what happens                                                     |
|-------|-------------|------------------------------------------------------------------|
| a2a   | 1           | outputs in their own type travel with their fp32 lse beside them |
| ag_rs | 2           | lse all-gathered, scaled outputs reduce-scattered                |
| ar    | 2           | lse all-gathered, scaled outputs all-reduced                     |

``a2a`` merges in fp32; the other two reduce on the wire and therefore carry fp32 (fp64 for fp64
outputs). ``ar`` gives every rank all heads and is the choice where that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from einops import rearrange
from torch import Tensor

from cplayers.cache.prefill import Prefill
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh
from cplayers.ops import Partial, scale_weights, weigh
from cplayers.ops.by_device import merge_packed, pack

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


def combine(
    partial: Partial, mesh: CPMesh, how: Combine, prefill: Prefill | None = None
) -> Partial:
    """Merge over the DCP group and keep this rank's heads, and its rows where it has a share.

    Args:
        partial: out `[T, N, V]` and lse `[T, N]` over this rank's keys, N the group's heads.
        mesh: The ranks.
        how: See the module's table.
        prefill: ``plan.prefill`` where T are its packed tokens, of which each PCP rank gets its own
            rows; ``None`` where all members of the group want the same rows.

    Returns:
        out `[T, n, V]` in its own type and lse `[T, n]`. Of decode rows the same bits on all PCP
        ranks.

    Raises:
        ConfigError: On an unknown ``how``.
    """
    return start_combine(partial, mesh, how, prefill)()


def start_combine(
    partial: Partial, mesh: CPMesh, how: Combine, prefill: Prefill | None = None
) -> Callable[[], Partial]:
    """The same, of which ``a2a`` is on its way when this returns; the result waits for it.

    Args:
        partial: As for `combine`.
        mesh: The ranks.
        how: See the module's table.
        prefill: As for `combine`.
    """
    require_combine(how)
    if mesh.size("dcp") == 1:
        return lambda: partial
    share = _Share(mesh, prefill if mesh.size("pcp") > 1 else None)
    if how == "a2a":
        packed = pack(partial, parts=mesh.size("dcp_tp"))
        hop, dtype = mesh.start_all_to_all(share.chunks(packed), "dcp"), partial.out.dtype

        def merged() -> Partial:
            out, lse = merge_packed(hop.wait(), dtype)
            return Partial(share.unpad(out), share.unpad(lse))

        return merged
    weights, lse = scale_weights(mesh.all_gather(partial.lse, "dcp"))
    scaled = weigh(partial.out, weights[mesh.rank("dcp")])  # in fp32 or better
    if how == "ag_rs":
        parts = rearrange(scaled, "t (k n) v -> k t n v", k=mesh.size("dcp_tp"))
        out = share.unpad(mesh.reduce_scatter(share.chunks(parts), "dcp"))
    else:
        out = share.own(mesh.all_reduce(scaled, "dcp"))
    result = Partial(out.to(partial.out.dtype), share.own(lse))
    return lambda: result


class _Share(NamedTuple):
    """Which rows and heads each member of the group gets of `[T, N, ...]`.

    Members are tp-major, pcp-minor (`Topology.groups`): heads go by the place on the TP axis, rows
    by that on the PCP axis.
    """

    mesh: CPMesh
    prefill: Prefill | None

    def chunks(self, parts: Tensor) -> Tensor:
        """`[k, T, n, ...]`, by heads, to `[members, rows, n, ...]`, rows padded where shared."""
        if self.prefill is not None:
            return parts[:, self.prefill.spread].flatten(0, 1)
        copies = self.mesh.size("dcp") // len(parts)
        return parts if copies == 1 else parts.repeat_interleave(copies, 0)

    def unpad(self, rows: Tensor) -> Tensor:
        """What arrived, without the padding."""
        if self.prefill is None:
            return rows
        return rows[: self.prefill.counts[self.mesh.rank("pcp")]]

    def own(self, x: Tensor) -> Tensor:
        """This rank's part of something that it has whole, `[T, N, ...]`."""
        if self.prefill is not None:
            x = x[self.unpad(self.prefill.spread[self.mesh.rank("pcp")])]
        n = x.shape[1] // self.mesh.size("dcp_tp")
        return x.narrow(1, self.mesh.rank("dcp_tp") * n, n)

"""Moving between the packed tokens of a step and the rows of one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from cplayers.cache import StepPlan
from cplayers.mesh import CPMesh


def take_rows(packed: Tensor, plan: StepPlan) -> Tensor:
    """This rank's rows of something given per packed token: `[P, ...]` to `[T, ...]`."""
    return packed[plan.tokens.to(packed.device)]


def gather_rows(rows: Tensor, plan: StepPlan, mesh: CPMesh, select: Tensor | None = None) -> Tensor:
    """The inverse over all PCP ranks, for all packed tokens or those selected.

    Only selected rows travel: one all-gather over PCP, padded to the largest number of them on a
    rank. A step without prompts needs none, because decode rows are on every rank.

    Args:
        rows: This rank's rows `[T, ...]`.
        plan: The step.
        mesh: The ranks.
        select: Packed indices `[s]`, the same on all ranks; all by default.

    Returns:
        `[s, ...]`, the same on all PCP ranks.
    """
    owner, index = plan.owner, plan.index
    if select is not None:
        owner, index = owner[select], index[select]
    if mesh.size("pcp") == 1 or plan.prefill is None:
        return rows[index.to(rows.device)]
    counts = torch.bincount(owner, minlength=mesh.size("pcp"))
    width = int(counts.max()) if len(owner) else 0
    mine = index[owner == mesh.rank("pcp")].to(rows.device)
    payload = rows.new_zeros(width, *rows.shape[1:])
    payload[: len(mine)] = rows[mine]
    gathered = mesh.all_gather(payload, "pcp").flatten(0, 1)
    place = torch.empty_like(owner)  # of each selected token within its owner's part
    for rank in range(mesh.size("pcp")):
        here = owner == rank
        place[here] = torch.arange(int(counts[rank]))
    return gathered[(owner * width + place).to(rows.device)]

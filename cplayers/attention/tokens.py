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
    rank. A step without prompts needs none where DCP spans PCP, because every rank then has the
    same bits of the decode rows. With dcp = 1 each PCP rank attends to keys that it computed
    itself, beside prompt shares of other sizes than its neighbours', so these rows are alike to
    rounding only; the first rank's are taken.

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
    local = plan.prefill is None and mesh.size("dcp") > 1
    if mesh.size("pcp") == 1 or local:
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

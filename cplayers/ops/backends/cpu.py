"""Backend ``"cpu"``: the flash operator, and few rows over many keys as in ``"rows_cpu"``.

One step mixes both kinds of work, so the choice is made per part of a tile, by `rows_cpu.pays`.
"""

from __future__ import annotations

from torch import Tensor

from cplayers.ops.backends import flash_cpu, math, rows_cpu
from cplayers.ops.backends.base import Backend
from cplayers.ops.backends.tiled import Kernels
from cplayers.ops.partial import Partial


def _full(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Partial:
    kernel = math.few_rows if rows_cpu.pays(q, k) else flash_cpu.full
    return kernel(q, k, v, scale, softcap)


def _refuse(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    refused = rows_cpu.ROWS_CPU.refuse(q, k, v, softcap)
    return refused or flash_cpu.refuse(q, k, v, softcap)


CPU = Backend("cpu", Kernels(_full, flash_cpu.causal, flash_cpu.masked).run, _refuse)

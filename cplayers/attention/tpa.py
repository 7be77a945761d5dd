"""`TPAQProj`: the query projection of a whole DCP group on each of its ranks.

Decoding with ``gather`` projects N/tp heads per rank and then all-gathers the queries of the k TP
neighbours in the DCP group. Splitting the projection over TPA = tp / k ranks instead gives every
rank the queries of its group at once: k times the weight and the multiplications of this one
matrix, one collective less per layer.

Where keys travel, as in most of prefill, own heads are enough: that slice of the weight is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh


class TPAQProj(nn.Module):
    """Query projection split over TPA.

    Loads from a full checkpoint, from a TP checkpoint (this rank's rows; the others come from the
    TP neighbours, so all ranks load together), or from its own; `full_state_dict` and
    `tp_state_dict` give the first two back. A checkpoint of other shapes raises ConfigError before
    a parameter is changed.

    Args:
        hidden_size: Input features.
        num_heads: Query heads of the model.
        head_dim: Dimension of a head.
        bias: Whether the projection has a bias.
        mesh: The ranks.

    Raises:
        ConfigError: If ``num_heads`` does not divide by TP.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int, *, bias: bool = False, mesh: CPMesh
    ) -> None:
        super().__init__()
        if num_heads % mesh.size("tp"):
            raise ConfigError(
                f"num_heads={num_heads}, tp={mesh.size('tp')}",
                "query heads are split evenly over tp",
                "choose a tp that divides num_heads",
            )
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.mesh = mesh
        self.own_features = num_heads // mesh.size("tp") * head_dim
        features = self.own_features * mesh.size("dcp_tp")
        self.weight = nn.Parameter(torch.empty(features, hidden_size))
        self.bias = nn.Parameter(torch.empty(features)) if bias else None
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x `[T, hidden_size]` to the group's queries `[T, N_group * H]`, no communication."""
        return functional.linear(x, self.weight, self.bias)

    def own(self, x: Tensor) -> Tensor:
        """x `[T, hidden_size]` to this rank's queries `[T, N_own * H]`."""
        rows = self._own_rows()
        bias = None if self.bias is None else self.bias[rows]
        return functional.linear(x, self.weight[rows], bias)

    def _own_rows(self) -> slice:
        start = self.mesh.rank("dcp_tp") * self.own_features
        return slice(start, start + self.own_features)

    def tp_state_dict(self) -> dict[str, Tensor]:
        """Parameters as a TP rank of the plain model has them."""
        rows = self._own_rows()
        return {name: p.detach()[rows].clone() for name, p in self.named_parameters()}

    def full_state_dict(self) -> dict[str, Tensor]:
        """Unsharded parameters; an all-gather over TPA, called on all ranks."""
        return {
            name: self.mesh.all_gather(p.detach(), "tpa").flatten(0, 1)
            for name, p in self.named_parameters()
        }

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        given = {n: p for n, p in self.named_parameters() if prefix + n in state_dict}
        for name, param in given.items():  # all of them before the first is changed
            self._require_shape(name, state_dict[prefix + name].shape, param)
        cut = dict(state_dict)
        for name, param in given.items():
            cut[prefix + name] = self._cut(cut[prefix + name], param.shape[0])
        super()._load_from_state_dict(cut, prefix, *args, **kwargs)

    def _require_shape(self, name: str, shape: torch.Size, param: Tensor) -> None:
        full, own, features = self.num_heads * self.head_dim, self.own_features, param.shape[0]
        rest = tuple(param.shape[1:])
        if tuple(shape) not in {(rows, *rest) for rows in (full, own, features)}:
            raise ConfigError(
                f"{name} of shape {tuple(shape)}",
                f"a checkpoint of this projection has {full} rows (full), {own} (TP) or "
                f"{features} (TPA), each of shape {rest}",
                "load the checkpoint of the same model and layout",
            )

    def _cut(self, value: Tensor, features: int) -> Tensor:
        if value.shape[0] == features:
            return value
        if value.shape[0] == self.num_heads * self.head_dim:
            return value.narrow(0, self.mesh.rank("tpa") * features, features)
        return self.mesh.all_gather(value.contiguous(), "dcp_tp").flatten(0, 1)

    def extra_repr(self) -> str:
        """Sizes and the TPA degree."""
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, "
            f"head_dim={self.head_dim}, bias={self.bias is not None}, tpa={self.mesh.size('tpa')}"
        )

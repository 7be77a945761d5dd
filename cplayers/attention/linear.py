"""Row-parallel output projection, and cutting a plain one to a rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from cplayers.mesh import CPMesh


class RowParallelLinear(nn.Module):
    """``y = x W^T + b`` with W's input features split over TP.

    A rank multiplies its slice of the features by its slice of W; the sum over TP is one
    all-reduce, after which the bias is added once.

    Args:
        in_features: Input features of this rank.
        out_features: Output features.
        bias: Whether there is a bias (whole on every rank).
        mesh: The ranks.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, mesh: CPMesh
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.mesh = in_features, out_features, mesh
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x `[T, in_features]` of this rank to `[T, out_features]`, the same on all of TP."""
        if self.mesh.size("tp") == 1:
            return functional.linear(x, self.weight, self.bias)
        y = self.mesh.all_reduce(functional.linear(x, self.weight), "tp")
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Sizes as in ``nn.Linear``, and the TP degree."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, tp={self.mesh.size('tp')}"
        )


class GatheredLinear(nn.Module):
    """``y = x W^T + b`` with W's output features split over TP, gathered again: for lm_head.

    Args:
        in_features: Input features.
        out_features: Output features of this rank.
        bias: Whether there is a bias.
        mesh: The ranks.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, mesh: CPMesh
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.part = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., in_features]` to `[..., tp * out_features]`, the same on all of TP."""
        parts = self.mesh.all_gather(self.part(x), "tp")
        return parts.movedim(0, -2).flatten(-2)


def is_plain(module: nn.Module | None) -> bool:
    """Whether ``module`` computes what ``nn.Linear`` does, so that its Parameters are all of it."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def adopt(
    target: nn.Module, source: nn.Linear, *, dim: int, rows: tuple[int, int], head_dim: int = 1
) -> None:
    """Give ``target`` the Parameters of ``source``, cut to ``rows`` along ``dim``.

    The Parameter objects stay the same; a cut releases the memory of the rest. A bias, which has
    output features only, is cut along dimension 0.

    Args:
        target: Gets the Parameters.
        source: An unsharded projection.
        dim: 0 for output features, 1 for input features.
        rows: Half-open range of heads, or of features where ``head_dim`` is 1.
        head_dim: Features of a head.
    """
    start, length = rows[0] * head_dim, (rows[1] - rows[0]) * head_dim
    for name, param in list(source.named_parameters(recurse=False)):
        if param.dim() > dim and length != param.shape[dim]:
            param.data = param.data.narrow(dim, start, length).clone()
        setattr(target, name, param)

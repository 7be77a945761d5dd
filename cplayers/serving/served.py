"""A model that groups of several sizes use in turn: its weights are there once.

With the same tensor parallelism, the weights of a rank do not depend on how many replicas share a
context: only the mesh over which the layers talk does. So a step of a group sets the mesh of every
layer, and nothing else; at the end of a run it is again the one that the layers were built with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cplayers.cache import CacheSpec, GQASpec, InterleavedLayout, PagedKVCache, StepPlan
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh

StepFn = Callable[[Tensor, StepPlan, PagedKVCache, CPMesh], Tensor]
"""``step(tokens, plan, cache, mesh) -> logits``; see `ServedModel`."""


class ServedModel:
    """A module with context-parallel attention layers, and how it makes a step.

    Args:
        module: Holds the layers. They were built for a mesh with the tensor parallelism of one
            replica, e.g. by `cplayers.hf.parallelize` on ``CPMesh(Topology())``.
        step: ``step(tokens, plan, cache, mesh)`` computes a step of packed token ids int64 `[P]`
            and returns the logits `[R, vocab]` of the last new token of each request that has one
            (``plan.last``), alike on all ranks of ``mesh``.
        vocab_size: Token ids are below it. By default the rows of the first `nn.Embedding` of
            ``module``; if it has none, ids are not checked.

    Attributes:
        spec: What the layers cache.
        topologies: For which the layers were built.
        vocab_size: See the arguments; ``None`` if it is not known.

    Raises:
        ConfigError: If there are no such layers, or if they cache different things.
    """

    def __init__(self, module: nn.Module, step: StepFn, vocab_size: int | None = None) -> None:
        self.module, self._step = module, step
        layers: list[Any] = [m for m in module.modules() if hasattr(m, "cache_spec")]
        specs: set[CacheSpec] = {layer.cache_spec for layer in layers}
        if len(specs) != 1:
            raise ConfigError(
                f"a module whose layers cache {sorted(map(str, specs))}",
                "it has context-parallel attention layers, which all store the same per token",
                "swap the attention of every layer first",
            )
        (self.spec,) = specs
        self.num_layers = len(layers)
        weight: Tensor = layers[0].o_proj.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.first_head: int = layers[0].heads.kv[0] if isinstance(self.spec, GQASpec) else 0
        self._places = [
            (each, name, value)
            for each in module.modules()
            for name, value in vars(each).items()
            if isinstance(value, CPMesh)
        ]
        self.topologies = {mesh.topology for _, _, mesh in self._places}
        if vocab_size is None:
            embeddings = (m for m in module.modules() if isinstance(m, nn.Embedding))
            vocab_size = next((each.num_embeddings for each in embeddings), None)
        self.vocab_size = vocab_size

    def new_cache(self, layout: InterleavedLayout, num_blocks: int, mesh: CPMesh) -> PagedKVCache:
        """An empty cache of this rank, spread over ``mesh``.

        Args:
            layout: How sequences are spread.
            num_blocks: Blocks.
            mesh: The ranks that share sequences.
        """
        return PagedKVCache(
            self.spec,
            layout,
            self.num_layers,
            num_blocks,
            mesh.rank("dcp"),
            self.dtype,
            self.device,
            pcp_rank=mesh.rank("pcp"),
            pcp_size=mesh.size("pcp"),
        )

    @torch.no_grad()
    def logits(self, tokens: Tensor, plan: StepPlan, cache: PagedKVCache, mesh: CPMesh) -> Tensor:
        """The logits `[R, vocab]` of a step on the ranks of ``mesh``.

        Args:
            tokens: Packed token ids `[P]`.
            plan: The step.
            cache: The cache that planned it.
            mesh: The ranks of the cache.
        """
        for each, name, _ in self._places:
            if getattr(each, name) is not mesh:
                setattr(each, name, mesh)
        return self._step(tokens, plan, cache, mesh)

    def restore(self) -> None:
        """Let the layers use the mesh again that they were built with."""
        for each, name, mesh in self._places:
            setattr(each, name, mesh)

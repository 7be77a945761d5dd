"""``model.cp``: what `parallelize` did to a model, and its cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from cplayers.attention import DCPGQAAttention
from cplayers.cache import CacheConfig, InterleavedLayout, PagedKVCache
from cplayers.hf.dense import Dense
from cplayers.mesh import CPMesh


class CPState:
    """What happened to a model; found at ``model.cp``.

    Attributes:
        mesh: The ranks; ``mesh.traffic`` logs what was sent.
        cache: This rank's paged cache.
        layers: The swapped attention layers, in order.
        dense: What happened to MLPs and lm_head.
    """

    def __init__(
        self,
        mesh: CPMesh,
        config: CacheConfig,
        layers: list[DCPGQAAttention],
        dense: list[Dense],
    ) -> None:
        self.mesh, self.cache_config, self.layers, self.dense = mesh, config, layers, dense
        weight = layers[0].k_proj.weight
        layout = InterleavedLayout(mesh.size("dcp"), config.interleave_size, config.block_size)
        self.cache = PagedKVCache(
            layers[0].cache_spec,
            layout,
            len(layers),
            config.num_blocks or 1,
            mesh.rank("dcp"),
            weight.dtype,
            weight.device,
            pcp_rank=mesh.rank("pcp"),
            pcp_size=mesh.size("pcp"),
        )

    def reserve(self, requests: Sequence[tuple[Hashable, int]]) -> None:
        """With ``num_blocks=None``, grow the cache to what ``requests`` take."""
        if self.cache_config.num_blocks is not None:
            return
        pool = self.cache.pool
        missing = self.cache.blocks_for(requests) - pool.num_available
        if missing > 0:
            self.cache.grow(pool.num_blocks + missing)

    def report(self) -> str:
        """What runs where, as text: layout, attention, cache, dense layers and traffic so far."""
        layer, cache, topology = self.layers[0], self.cache, self.mesh.topology
        sharded = sum(d.sharded for d in self.dense)
        lines = [
            f"ranks      {topology}",
            f"attention  {len(self.layers)} layers: {layer.extra_repr()}",
            f"q_proj     {type(layer.q_proj).__name__}; prefill {layer.prefill.strategy}",
            f"cache      {cache.layout}, {cache.token_bytes} bytes per token on its owner, "
            f"{cache.nbytes} bytes on this rank ({cache.used_bytes} in use)",
        ]
        if not self.dense:
            lines.append("dense      as it was (tp=1)")
        else:
            lines.append(f"dense      {sharded} modules sharded over tp={topology.tp}")
            kept = Counter(d.reason for d in self.dense if not d.sharded)
            lines += [f"           {count} replicated: {why}" for why, count in kept.items()]
        for (axis, operation), (count, sent) in self.mesh.traffic.totals().items():
            lines.append(f"traffic    {axis} {operation}: {count} calls, {sent} bytes sent")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.report()

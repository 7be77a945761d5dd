"""``model.cp``: what `parallelize` did to a model, and its cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from cplayers.attention import DCPGQAAttention, DCPMLAAttention
from cplayers.cache import CacheConfig, InterleavedLayout, PagedKVCache
from cplayers.errors import ConfigError
from cplayers.hf.cache import CROP_TOKENS, CPCache
from cplayers.hf.dense import Dense
from cplayers.hf.families import Family
from cplayers.mesh import CPMesh


class CPState:
    """What happened to a model; found at ``model.cp``.

    Attributes:
        mesh: The ranks; ``mesh.traffic`` logs what was sent.
        cache: This rank's paged cache.
        layers: The swapped attention layers, in order.
        dense: What happened to MLPs, experts and lm_head.
        family: The model's architecture.
        chunk_size: Most new tokens of a row that a step computes, or ``None``.
        window: The widest sliding window where every layer has one, or ``None``.
    """

    def __init__(
        self,
        mesh: CPMesh,
        config: CacheConfig,
        layers: list[DCPGQAAttention] | list[DCPMLAAttention],
        dense: list[Dense],
        family: Family,
        chunk_size: int | None = None,
    ) -> None:
        self.mesh, self.cache_config, self.layers, self.dense = mesh, config, layers, dense
        self.family, self.chunk_size = family, chunk_size
        windows = [layer.scoring.window for layer in layers]
        found = [window for window in windows if window is not None]
        self.window = max(found) if len(found) == len(windows) else None
        self._windows = Counter(found)
        self.cache = self._new_cache()

    @property
    def has_windows(self) -> bool:
        """Whether some layer has a sliding window."""
        return bool(self._windows)

    def new_cache(self, expected: int = 0) -> CPCache:
        """An empty cache for a call.

        Args:
            expected: Columns that it will need in all, if known; a guess.
        """
        cache = CPCache(self.cache, self.window)
        if self.window is None:  # otherwise the end of it is not held together with the beginning
            cache.expected = expected
        return cache

    def _new_cache(self) -> PagedKVCache:
        weight, config, mesh = self.layers[0].o_proj.weight, self.cache_config, self.mesh
        layout = InterleavedLayout(mesh.size("dcp"), config.interleave_size, config.block_size)
        return PagedKVCache(
            self.layers[0].cache_spec,
            layout,
            len(self.layers),
            config.num_blocks or 1,
            mesh.rank("dcp"),
            weight.dtype,
            weight.device,
            pcp_rank=mesh.rank("pcp"),
            pcp_size=mesh.size("pcp"),
        )

    def follow_weights(self) -> None:
        """Make the cache anew where ``model.to`` has changed the weights' dtype or device.

        Raises:
            ConfigError: If sequences are still cached in the old one.
        """
        weight, cache = self.layers[0].o_proj.weight, self.cache
        device = cache.view_of_rank.device
        if (weight.dtype, weight.device) == (cache.dtype, device):
            return
        if cache.seqs:
            raise ConfigError(
                f"weights in {weight.dtype} on {weight.device}",
                f"the cache holds {len(cache.seqs)} sequences in {cache.dtype} on {device}",
                "free the caches and outputs of earlier calls, or move the model back",
            )
        self.cache = self._new_cache()

    def reserve(self, requests: Sequence[tuple[Hashable, int]]) -> None:
        """With ``num_blocks=None``, grow the cache to what ``requests`` take.

        Storage is copied to grow, so a cache in use grows by a quarter at least: a loop of single
        steps then copies each token a bounded number of times.
        """
        if self.cache_config.num_blocks is not None:
            return
        pool = self.cache.pool
        missing = self.cache.blocks_for(requests) - pool.num_available
        if missing > 0:
            self.cache.grow(pool.num_blocks + max(missing, pool.num_used // 4))

    def report(self) -> str:
        """What runs where, as text: layout, attention, cache, dense layers and traffic so far."""
        layer, cache, topology = self.layers[0], self.cache, self.mesh.topology
        sharded = sum(d.sharded for d in self.dense)
        lines = [
            f"ranks      {topology}",
            f"attention  {len(self.layers)} layers: {layer.extra_repr()}",
            _how(layer),
            "backends   " + ", ".join(f"{k}: {b}" for k, b in layer.local_backends().items()),
            f"cache      {cache.layout}, {cache.token_bytes} bytes per token on its owner, "
            f"{cache.nbytes} bytes on this rank ({cache.used_bytes} in use)",
        ]
        for window, count in sorted(self._windows.items()):
            lines.append(f"windows    {window} tokens in {count} of {len(self.layers)} layers")
        if self.window is not None:
            lines.append(
                f"           blocks that are out of {self.window} + {CROP_TOKENS} tokens are given "
                "back after each call"
            )
        if self.chunk_size is not None:
            lines.append(f"chunks     at most {self.chunk_size} new tokens of a row in a step")
        if not self.dense:
            lines.append("dense      as it was (tp=1)")
        else:
            lines.append(f"dense      {sharded} modules sharded over tp={topology.tp}")
            kept = Counter(
                (d.name.rpartition(".")[2], d.reason) for d in self.dense if not d.sharded
            )
            lines += [
                f"           {count} {what} replicated: {why}"
                for (what, why), count in kept.items()
            ]
        for (axis, operation), (count, sent) in self.mesh.traffic.totals().items():
            lines.append(f"traffic    {axis} {operation}: {count} calls, {sent} bytes sent")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.report()


def _how(layer: DCPGQAAttention | DCPMLAAttention) -> str:
    """How queries meet the cache, and how prompts are attended to."""
    core = f"prefill {layer.prefill.strategy}, workspace {layer.prefill.workspace_tokens} tokens"
    if isinstance(layer, DCPMLAAttention):
        return f"decode     {layer.decode}; {core}"
    return f"q_proj     {type(layer.q_proj).__name__}; {core}"

"""Attention of prompts, their tokens spread zigzag over PCP: `PCPPrefillAttention`.

A rank holds the queries, keys and values of its own new tokens. Under strategy ``gather_kv``
(`cplayers.attention.gather_kv`) the keys travel: new ones over PCP in one collective, those of the
cached context over DCP piece by piece through a bounded workspace; every rank finishes its own
queries, and nothing is combined.

    shards = all-gather (K, V) over PCP                       -> written to the cache
    partials of the own queries over each shard, and over each piece of the cached context
    merge                                                     -> out of the own queries

Padding: the all-gather over PCP sends ``width`` rows, the largest share: at most
``2 * ceil(P / 2p)`` for a prompt of P tokens, and at most the sum of that over several. Where 2p
divides P there is none; for one prompt of about 2,000 tokens on up to 8 ranks it is at most 0.8 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from cplayers.attention.gather_kv import (
    CachedLayer,
    Expand,
    Logits,
    Planes,
    attend_context,
    attend_new,
    gather_new,
)
from cplayers.cache.plan import Prefill
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh
from cplayers.ops import empty, merge, require_backend

STRATEGIES = ("auto", "gather_kv")
WORKSPACE_TOKENS = 16384
"""Default of ``workspace_tokens``: 18 MiB of MLA latents (512 + 64) in bf16, gathered at a time."""


class PrefillResult(NamedTuple):
    """What `PCPPrefillAttention` returns.

    Attributes:
        out: Attention output of this rank's rows `[T, N, V]`.
        shards: The new rows of each PCP rank, per rank one `[width, heads, dim]` a plane.
    """

    out: Tensor
    shards: list[Planes]


class PCPPrefillAttention(nn.Module):
    """Weightless core of prefill under prefill context parallelism.

    Args:
        strategy: ``"gather_kv"``, or ``"auto"``, with which a layer may let the queries of a chunk
            visit the cache instead, where they need not travel for it.
        workspace_tokens: Most cached tokens of all ranks that are gathered at a time.
        backend: See `cplayers.ops.attend`.
        mesh: The ranks.

    Raises:
        ConfigError: On an unknown strategy or backend, or a workspace below 1.
    """

    def __init__(
        self,
        strategy: str = "auto",
        *,
        workspace_tokens: int = WORKSPACE_TOKENS,
        backend: str = "auto",
        mesh: CPMesh,
    ) -> None:
        super().__init__()
        if strategy not in STRATEGIES:
            raise ConfigError(
                f"prefill strategy={strategy!r}",
                "prompts are prefilled by a known strategy",
                f"choose one of {', '.join(STRATEGIES)}",
            )
        if not isinstance(workspace_tokens, int) or workspace_tokens < 1:
            raise ConfigError(
                f"workspace_tokens={workspace_tokens!r}",
                "at least one cached token is gathered at a time",
                "pass an int of at least 1",
            )
        require_backend(backend)
        self.strategy, self.workspace_tokens = strategy, workspace_tokens
        self.backend, self.mesh = backend, mesh

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        prefill: Prefill,
        *,
        scale: float,
        softcap: float | None = None,
        expand: Expand | None = None,
        cached: CachedLayer | None = None,
    ) -> PrefillResult:
        """Attend to the new tokens and, with ``cached``, to the context that they follow.

        Args:
            q: Own queries `[T, N, H]`, positions encoded.
            k: Own keys `[T, K, H]`, or whatever else ``expand`` takes, such as latents.
            v: Own values `[T, K, V]`, or ``None`` where ``k`` holds them too.
            prefill: ``plan.prefill``.
            scale: Factor on the logits.
            softcap: Soft cap on the logits, or ``None``.
            expand: Turns planes, ``(k, v)`` or ``(k,)``, into the keys and values that the queries
                read; by default they are.
            cached: The layer of the cache, which the new tokens are written to first.

        Returns:
            The output, and the new tokens of all PCP ranks as they arrived.

        Raises:
            ConfigError: If the rows follow cached tokens and ``cached`` is missing.
        """
        if cached is None and prefill.context.sources:
            raise ConfigError(
                f"{prefill.context.tokens} cached tokens and no cache",
                "a chunk of a prompt sees the tokens before it",
                "pass cached=CachedLayer(cache, plan, layer)",
            )
        planes: Planes = (k,) if v is None else (k, v)
        expand = expand or _as_they_are
        logits = Logits(scale, softcap, self.backend)
        shards = gather_new(planes, prefill, self.mesh)
        partials = list(attend_new(q, shards, prefill, expand, logits))
        if cached is not None:
            write_shards(cached, shards)
            for partial in attend_context(
                q, cached, prefill.context, expand, logits, self.mesh, self.workspace_tokens
            ):
                partials = [merge([*partials, partial])]  # one by one, so that memory is bounded
        if not partials:  # no rows on this rank
            _, values = expand([plane[:0] for plane in planes])
            size = q.shape[0], q.shape[1], values.shape[-1]
            partials = [empty(*size, dtype=q.dtype, device=q.device)]
        out = partials[0].out if len(partials) == 1 else merge(partials).out
        return PrefillResult(out, shards)

    def extra_repr(self) -> str:
        """Strategy, workspace, backend and size of the PCP axis."""
        return (
            f"strategy={self.strategy}, workspace_tokens={self.workspace_tokens}, "
            f"backend={self.backend}, pcp={self.mesh.size('pcp')}"
        )


def write_shards(cached: CachedLayer, shards: Sequence[Planes]) -> None:
    """Store what this rank owns of the new tokens of all PCP ranks.

    Args:
        cached: The layer.
        shards: New rows of each PCP rank.
    """
    cache, plan, layer = cached
    for writes, planes in zip(plan.prefill_writes, shards, strict=True):
        cache.write(plan, layer, writes, *planes)


def _as_they_are(planes: Planes) -> tuple[Tensor, Tensor]:
    keys, values = planes
    return keys, values

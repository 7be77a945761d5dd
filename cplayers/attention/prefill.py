"""Attention of a prompt to itself, its tokens spread zigzag over PCP.

A rank holds the queries, keys and values of its own tokens. Strategy ``gather_kv`` for a prompt
without cached context:

    all-gather (K, V) over PCP, every rank's rows padded to the longest    1 collective a layer
    for each rank's shard s:  attend(q, K_s, V_s, lo_s, hi_s)              -> Partial
    merge the shards                                                      -> out of the own queries

Shards are attended to where they arrive: a zigzag shard is in increasing position, so a causal
query sees a prefix of it, and partials merge in any order. Nothing is put back in position order.

| axis | operation  | sent per rank, bytes                            |
|------|------------|-------------------------------------------------|
| pcp  | all_gather | (p - 1) * width * K * (H + V) * e               |

``width`` is the largest share, at most ``2 * ceil(P / 2p)`` for a prompt of P tokens, and at most
the sum of that over several prompts. Where 2p divides P there is no padding; for one prompt of
about 2,000 tokens on up to 8 ranks it is at most 0.8 %.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from cplayers.cache.plan import Prefill
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh
from cplayers.ops import attend, empty, merge, require_backend

STRATEGIES = ("auto", "gather_kv")


class PrefillResult(NamedTuple):
    """What `PCPPrefillAttention` returns.

    Attributes:
        out: Attention output of this rank's rows `[T, N, V]`.
        shards: Keys and values of each PCP rank, `[width, K, H]` and `[width, K, V]`.
    """

    out: Tensor
    shards: list[tuple[Tensor, Tensor]]


class PCPPrefillAttention(nn.Module):
    """Weightless core of prefill under prefill context parallelism.

    Args:
        strategy: ``"gather_kv"``, or ``"auto"`` for the best known one (today the same).
        backend: See `cplayers.ops.attend`.
        mesh: The ranks.

    Raises:
        ConfigError: On an unknown strategy or backend.
    """

    def __init__(self, strategy: str = "auto", *, backend: str = "auto", mesh: CPMesh) -> None:
        super().__init__()
        if strategy not in STRATEGIES:
            raise ConfigError(
                f"prefill strategy={strategy!r}",
                "prompts without cached context are prefilled by a known strategy",
                f"choose one of {', '.join(STRATEGIES)}",
            )
        require_backend(backend)
        self.strategy, self.backend, self.mesh = strategy, backend, mesh

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefill: Prefill,
        *,
        scale: float,
        softcap: float | None = None,
        kv_heads: slice | list[int] | None = None,
    ) -> PrefillResult:
        """Attend and return the gathered keys and values, which the cache will want.

        Args:
            q: Own queries `[T, N, H]`, positions encoded.
            k: Own keys `[T, K, H]`.
            v: Own values `[T, K, V]`.
            prefill: ``plan.prefill``.
            scale: Factor on the logits.
            softcap: Soft cap on the logits, or ``None``.
            kv_heads: The KV heads that the queries read, where they are not all of K.
        """
        shards = self.gather(k, v, prefill)
        partials = []
        for (keys, values), shard in zip(shards, prefill.shards, strict=True):
            if not shard.tiles:
                continue
            if kv_heads is not None:
                keys, values = keys[:, kv_heads], values[:, kv_heads]
            partials.append(
                attend(
                    q,
                    keys,
                    values,
                    shard.lo,
                    shard.hi,
                    scale=scale,
                    softcap=softcap,
                    backend=self.backend,
                    tiles=shard.tiles,
                )
            )
        if not partials:  # no rows on this rank
            partials = [empty(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype, device=q.device)]
        return PrefillResult((partials[0] if len(partials) == 1 else merge(partials)).out, shards)

    def gather(self, k: Tensor, v: Tensor, prefill: Prefill) -> list[tuple[Tensor, Tensor]]:
        """Every PCP rank's keys and values, `[width, K, H]` views of head-major storage."""
        if self.mesh.size("pcp") == 1:
            return [(k, v)]
        (rows, heads, dim), value_dim = k.shape, v.shape[-1]
        width, split = prefill.width, prefill.width * heads * dim
        payload = k.new_zeros(width * heads * (dim + value_dim))
        payload[:split].view(heads, width, dim)[:, :rows] = k.transpose(0, 1)
        payload[split:].view(heads, width, value_dim)[:, :rows] = v.transpose(0, 1)
        return [
            (
                piece[:split].view(heads, width, dim).transpose(0, 1),
                piece[split:].view(heads, width, value_dim).transpose(0, 1),
            )
            for piece in self.mesh.all_gather(payload, "pcp")
        ]

    def extra_repr(self) -> str:
        """Strategy, backend and size of the PCP axis."""
        return f"strategy={self.strategy}, backend={self.backend}, pcp={self.mesh.size('pcp')}"

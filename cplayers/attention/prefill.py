"""Attention of prompts, their tokens spread zigzag over PCP: `PCPPrefillAttention`.

A rank holds the queries, keys and values of its own new tokens; cached ones are spread over DCP.
Who travels is the strategy:

| strategy  | moves                                  | then                                        |
|-----------|----------------------------------------|---------------------------------------------|
| gather_q  | queries; new keys to their owners      | results are combined (`gather_q`)           |
| gather_kv | new keys, cached ones piece by piece   | own queries are finished here (`gather_kv`) |
| ring      | the same, one hop at a time            | likewise (`ring`)                           |
| auto      | per step the one of gather_q and gather_kv that sends fewer bytes (`costs`)          |

Where nothing needs to travel the strategies are the same: prompts without cached context and
without PCP are attended to as they are, and with dcp = 1 every rank has all cached keys, so that
gather_q is gather_kv there.

Padding: what is gathered over PCP has ``width`` rows a rank, the largest share: at most
``2 * ceil(P / 2p)`` for a prompt of P tokens, and at most the sum of that over several. Where 2p
divides P there is none; for one prompt of about 2,000 tokens on up to 8 ranks it is at most 0.8 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn

from cplayers.attention.costs import Sizes
from cplayers.attention.gather_kv import attend_context, attend_new
from cplayers.attention.gather_q import Visit, visit
from cplayers.attention.planes import CachedLayer, Expand, Planes, elements
from cplayers.attention.ring import ring_context, ring_new
from cplayers.attention.scoring import Scoring
from cplayers.cache import StepPlan
from cplayers.cache.prefill import Choice, Prefill
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh
from cplayers.ops import Partial, empty, merge_stream, require_backend

STRATEGIES = ("auto", "gather_q", "gather_kv", "ring")
WORKSPACE_TOKENS = 16384
"""Default of ``workspace_tokens``: 18 MiB of MLA latents (512 + 64) in bf16, gathered at a time."""


class PCPPrefillAttention(nn.Module):
    """Weightless core of prefill under prefill context parallelism.

    Args:
        strategy: One of ``STRATEGIES``; see the module's table.
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

    def choose(self, prefill: Prefill, sizes: Sizes, window: int | None = None) -> str:
        """The strategy of a step; the same on all ranks, as it depends on what they share.

        Args:
            prefill: ``plan.prefill``.
            sizes: What the layer moves per token.
            window: Its sliding window, or ``None``.

        Returns:
            ``"gather_q"``, ``"gather_kv"`` or ``"ring"``.
        """
        key = self.strategy, sizes, window
        if key not in prefill.choices:
            prefill.choices[key] = self._choose(prefill, sizes, window)
        return prefill.choices[key].strategy

    def _choose(self, prefill: Prefill, sizes: Sizes, window: int | None) -> Choice:
        size, asked = self.mesh.size, self.strategy
        here = "ring" if asked == "ring" else "gather_kv"
        if size("dcp") == 1:
            return Choice(here, (), "with dcp=1 every rank has all cached keys, so queries stay")
        if size("pcp") == 1 and not prefill.context.sources:
            return Choice(here, (), "with pcp=1 and nothing cached all keys are here")
        sent = self.costs(prefill, sizes, window)
        if asked != "auto":
            return Choice(asked, tuple(sent.items()), f"strategy={asked!r} was asked for")
        fewest = "gather_q" if sent["gather_q"] < sent["gather_kv"] else "gather_kv"
        return Choice(fewest, tuple(sent.items()), "fewest bytes")

    def costs(self, prefill: Prefill, sizes: Sizes, window: int | None = None) -> dict[str, int]:
        """Bytes that each strategy sends per rank and layer, where dcp is above 1.

        Args:
            prefill: ``plan.prefill``.
            sizes: What the layer moves per token.
            window: Its sliding window, or ``None``.
        """
        topology, cached = self.mesh.topology, prefill.context.width(window)
        keys = sizes.fetch(topology, new=prefill.width, cached=cached)
        return {
            "gather_q": sizes.chunks_visit(topology, prefill),
            "gather_kv": keys,
            "ring": keys,
        }

    def explain(self, plan: StepPlan, sizes: Sizes, window: int | None = None) -> str:
        """Which strategy a step takes, the bytes of each, and why.

        Args:
            plan: The step.
            sizes: What the layer moves per token.
            window: Its sliding window, or ``None``.
        """
        if plan.prefill is None:
            return f"no prefill: {plan.num_decode} decode rows"
        self.choose(plan.prefill, sizes, window)
        return plan.prefill.explain(plan.prefill.choices[self.strategy, sizes, window])

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        prefill: Prefill,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        expand: Expand | None = None,
        cached: CachedLayer | None = None,
        how: Visit | None = None,
    ) -> Partial:
        """Attend to the new tokens and, with ``cached``, to the context that they follow.

        Args:
            q: Own queries `[T, N, H]`, positions encoded.
            k: Own keys `[T, K, H]`, or whatever else ``expand`` takes, such as latents.
            v: Own values `[T, K, V]`, or ``None`` where ``k`` holds them too.
            prefill: ``plan.prefill``.
            scale: Factor on the logits.
            softcap: Soft cap on the logits, or ``None``.
            window: Sliding window, or ``None``.
            expand: Turns planes, ``(k, v)`` or ``(k,)``, into the keys and values that the queries
                read; by default they are. Then keys travel: ``auto`` does not take gather_q, whose
                queries read what is stored.
            cached: The layer of the cache, to which the new tokens are written.
            how: For ``gather_q``: how queries travel, and how results are combined.

        Returns:
            Attention of this rank's rows: out `[T, N, V]`, lse `[T, N]`.

        Raises:
            ConfigError: If the rows follow cached tokens, or the strategy reads new ones from the
                cache, and ``cached`` is missing; on gather_q with ``expand``; on replicated q.
        """
        planes: Planes = (k,) if v is None else (k, v)
        how = how or Visit()
        scoring = Scoring(scale, softcap, window, self.backend)
        strategy = self.strategy
        if expand is None:  # with it, queries cannot read the cache as it is
            strategy = self.choose(prefill, self._sizes(q, planes, how), window)
        elif strategy == "auto":
            strategy = "gather_kv"
        if how.replicated or (expand is not None and strategy == "gather_q"):
            raise ConfigError(
                f"how={how}, strategy={strategy!r}, expand={expand}",
                "own heads are attended with here, and gather_q reads keys and values as stored",
                "call cplayers.attention.visit for replicated queries; leave out expand, or take "
                "another strategy",
            )
        if cached is None and (prefill.context.sources or strategy == "gather_q"):
            raise ConfigError(
                f"{prefill.context.tokens} cached tokens, strategy={strategy!r} and no cache",
                "a chunk of a prompt sees the tokens before it, and gather_q reads the cache",
                "pass cached=CachedLayer(cache, plan, layer)",
            )
        if strategy == "gather_q":
            assert cached is not None
            return visit(q, lambda: planes, cached, scoring, how, self.mesh, prefill)
        return self.fetch(q, planes, prefill, strategy, scoring, expand or _as_they_are, cached)

    def fetch(
        self,
        q: Tensor,
        planes: Planes,
        prefill: Prefill,
        strategy: str,
        scoring: Scoring,
        expand: Expand,
        cached: CachedLayer | None,
    ) -> Partial:
        """Attend with own queries to keys that come here, by ``gather_kv`` or ``ring``.

        Args:
            q: Own queries `[T, N, H]`.
            planes: What the cache stores of own rows.
            prefill: ``plan.prefill``.
            strategy: ``"gather_kv"`` or ``"ring"``.
            scoring: How keys are scored.
            expand: Planes to the keys and values that the queries read.
            cached: The layer, or ``None`` where there is no context.
        """
        scoring = scoring._replace(backend=self.backend)
        new, context = (
            (ring_new, ring_context) if strategy == "ring" else (attend_new, attend_context)
        )
        partials: Iterator[Partial]
        partials = new(q, planes, prefill, cached, expand, scoring, self.mesh)
        if cached is not None:
            over, workspace = prefill.context, self.workspace_tokens
            cached_ones = context(q, cached, over, expand, scoring, self.mesh, workspace)
            partials = chain(partials, cached_ones)
        merged = merge_stream(partials)
        if merged is None:  # no rows on this rank
            _, values = expand([plane[:0] for plane in planes])
            return empty(len(q), q.shape[1], values.shape[-1], dtype=q.dtype, device=q.device)
        return merged

    def _sizes(self, q: Tensor, planes: Planes, how: Visit) -> Sizes:
        """Of a call without a layer."""
        copies = self.mesh.size("dcp_tp") if how.replicated else 1
        return Sizes(
            own_heads=q.shape[1] // copies,
            query_dim=q.shape[2],
            value_dim=planes[-1].shape[2],
            stored=elements(planes),
            itemsize=q.dtype.itemsize,
            combine=how.combine,
            replicated=how.replicated,
        )

    def extra_repr(self) -> str:
        """Strategy, workspace, backend and size of the PCP axis."""
        return (
            f"strategy={self.strategy}, workspace_tokens={self.workspace_tokens}, "
            f"backend={self.backend}, pcp={self.mesh.size('pcp')}"
        )


def _as_they_are(planes: Planes) -> tuple[Tensor, Tensor]:
    keys, values = planes
    return keys, values

"""Predicted time of a step, layer by layer: work by the roofline, then collectives, no overlap.

T rows, C keys of a sequence, n own heads, k TP neighbours in a DCP group of g, p PCP ranks,
e bytes a value. A query-key pair costs 2*(H + V) operations a head, and with latent attention
2*(2*L + R) in the latent, or 2*(P + R + V) once keys are expanded.

    decode, a layer   attention  T*keys pairs of kn heads; reads keys*stored*e of each sequence,
                                 keys the first rank's share of C, or of its window
                      products   2*T operations a weight; reads the weights of the experts in use
                      collectives of gather_q, and all-reduces over tp
    prompt, a layer   attention  its pairs / p, of n heads; all keys are read, or expanded
                      products   2 * T/p operations a weight
                      collectives of the strategy with fewest bytes, which is what layers choose
    step              layers, and the lm_head for the last token of each sequence

Every figure is a prediction. It leaves out kernel launches, the work of the host and contention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cplayers.attention.prefill import WORKSPACE_TOKENS
from cplayers.cache import CacheConfig
from cplayers.mesh import Topology
from cplayers.planning.memory import KVMemory, sizes_of
from cplayers.planning.shape import ModelShape
from cplayers.planning.speeds import Call, Speeds
from cplayers.planning.traffic import (
    Chunk,
    all_reduce_calls,
    decode_calls,
    fetch_calls,
    sent,
    visit_calls,
)
from cplayers.planning.weights import weights_of

MOST_STEPS = 64
"""Steps of a prompt that are reckoned one by one; a step's time is piecewise linear in what is
cached, so that one in the middle stands for its neighbours."""


class Seconds(NamedTuple):
    """Where the time of a step, or of one layer, goes.

    Attributes:
        attention: Attention itself.
        products: Matrix products with weights.
        collectives: Talk between ranks.
    """

    attention: float = 0.0
    products: float = 0.0
    collectives: float = 0.0

    @property
    def total(self) -> float:
        """One after the other."""
        return self.attention + self.products + self.collectives

    def plus(self, other: Seconds, times: int = 1) -> Seconds:
        """The sum with ``times`` of another.

        Args:
            other: What is added.
            times: How often.
        """
        return Seconds(*(a + times * b for a, b in zip(self, other, strict=True)))


class TimeModel:
    """Predicted times of a model on a layout.

    Args:
        shape: The model.
        topology: The ranks, in a valid layout.
        speeds: How fast they are.
        cache: Block and interleave size.
        dtype: Of activations and cache.
        precision: Of the weights; by default as published.
        replicate_q: Whether a rank projects the queries of its whole DCP group.
        combine: How partial results are combined.
        workspace_tokens: Most cached tokens that are gathered at a time.

    Raises:
        ConfigError: On an unknown precision.
    """

    def __init__(
        self,
        shape: ModelShape,
        topology: Topology,
        speeds: Speeds,
        *,
        cache: CacheConfig | None = None,
        dtype: torch.dtype = torch.bfloat16,
        precision: str | None = None,
        replicate_q: bool = False,
        combine: str = "a2a",
        workspace_tokens: int = WORKSPACE_TOKENS,
    ) -> None:
        self.shape, self.topology, self.speeds = shape, topology, speeds
        self.precision = precision or shape.precision
        self.workspace_tokens = workspace_tokens
        self.memory = KVMemory(shape, topology, cache, dtype, replicate_q=replicate_q)
        self.weights = weights_of(shape, topology, replicate_q=replicate_q)
        self.weights.nbytes(self.precision)  # refuses an unknown one
        self.sizes = sizes_of(
            shape, topology, dtype=dtype, replicate_q=replicate_q, combine=combine
        )

    # One layer's attention

    def decode_attention(self, context: int, rows: int = 1, window: int | None = None) -> Seconds:
        """Attention of decode rows in one layer, before o_proj.

        Args:
            context: Tokens of each sequence, the new one included.
            rows: Sequences that decode one token each.
            window: Sliding window of the layer, or ``None``.
        """
        seen = context if window is None else min(context, window)
        keys = self.memory.layout.count_before(seen, 0)
        heads = self.sizes.own_heads * self.topology.dcp_tp
        flops = rows * keys * heads * self._pair_flops(expanded=False)
        read = rows * keys * self.sizes.stored * self.sizes.itemsize
        calls = decode_calls(self.sizes, self.topology, rows)
        return Seconds(self.speeds.local(flops, read), 0.0, self.speeds.talk(calls))

    def prompt_attention(
        self,
        tokens: int,
        cached: int = 0,
        window: int | None = None,
        strategy: str | None = None,
    ) -> Seconds:
        """Attention of a chunk of a prompt in one layer, before o_proj.

        Args:
            tokens: New tokens.
            cached: Tokens before them.
            window: Sliding window of the layer, or ``None``.
            strategy: ``"gather_q"`` or ``"gather_kv"``; by default as `prompt_strategy` says.
        """
        strategy = strategy or self.prompt_strategy(tokens, cached)
        pairs = causal_pairs(tokens, cached, window) / self.topology.pcp
        keys = cached + tokens
        read = keys * self.sizes.stored * self.sizes.itemsize
        if strategy == "gather_q":
            calls = visit_calls(self.sizes, self.topology, Chunk.of(self.topology, tokens))
            flops = pairs * self.sizes.own_heads * self._pair_flops(expanded=False)
            return Seconds(
                self.speeds.local(flops, read / self.topology.dcp), 0.0, self.speeds.talk(calls)
            )
        flops = self._own_flops(pairs, keys) * self.sizes.own_heads
        return Seconds(
            self.speeds.local(flops, read), 0.0, self.speeds.talk(self._fetch(tokens, cached))
        )

    def prompt_strategy(self, tokens: int, cached: int = 0) -> str:
        """What `PCPPrefillAttention` chooses: queries where they are fewer bytes than keys.

        Args:
            tokens: New tokens.
            cached: Tokens before them.
        """
        topology = self.topology
        if topology.dcp == 1 or (topology.pcp == 1 and not cached):
            return "gather_kv"
        queries = visit_calls(self.sizes, topology, Chunk.of(topology, tokens))
        return "gather_q" if sent(queries) < sent(self._fetch(tokens, cached)) else "gather_kv"

    def _fetch(self, tokens: int, cached: int) -> list[Call]:
        chunk = Chunk.of(self.topology, tokens)
        return fetch_calls(self.sizes, self.topology, chunk, cached, self.workspace_tokens)

    def _pair_flops(self, *, expanded: bool) -> int:
        """Operations of one head for a query and a key."""
        if (latent := self.shape.latent) is None or expanded:
            return 2 * (self.shape.head_dim + self.shape.value_dim)
        return 2 * (2 * latent.kv_rank + latent.rope_dim)

    def _own_flops(self, pairs: float, keys: int) -> float:
        """Operations of one head with keys at hand; latents are expanded where that is cheaper."""
        plain = pairs * self._pair_flops(expanded=True)
        if (latent := self.shape.latent) is None:
            return plain
        expansion = 2 * latent.kv_rank * (latent.nope_dim + self.shape.value_dim) * keys
        return min(plain + expansion, pairs * self._pair_flops(expanded=False))

    # Whole steps

    def decode_step(self, context: int, rows: int = 1) -> Seconds:
        """One token of each sequence of a replica: the time per output token.

        Args:
            context: Tokens of each sequence.
            rows: Sequences of a replica.
        """
        full = self.decode_attention(context, rows)
        window = self.shape.window
        windowed = self.decode_attention(context, rows, window) if window else full
        return self._step(full, windowed, rows, rows)

    def prompt_step(self, tokens: int, cached: int = 0) -> Seconds:
        """One chunk of one prompt.

        Args:
            tokens: New tokens.
            cached: Tokens before them.
        """
        full = self.prompt_attention(tokens, cached)
        window = self.shape.window
        windowed = self.prompt_attention(tokens, cached, window) if window else full
        return self._step(full, windowed, -(-tokens // self.topology.pcp), 1)

    def first_token(self, prompt: int, chunk: int) -> Seconds:
        """The time to the first token of a prompt that has the replica to itself.

        Of a prompt of many chunks `MOST_STEPS` are reckoned, and each stands for its neighbours.

        Args:
            prompt: Its tokens.
            chunk: Tokens that are computed in one step.
        """
        whole, rest = divmod(prompt, chunk)
        seconds = self.prompt_step(rest, whole * chunk) if rest else Seconds()
        runs = min(whole, MOST_STEPS)
        for run in range(runs):  # steps that follow one another count as the one in their middle
            first, end = run * whole // runs, (run + 1) * whole // runs
            middle = self.prompt_step(chunk, (first + end - 1) * chunk // 2)
            seconds = seconds.plus(middle, end - first)
        return seconds

    def _step(self, full: Seconds, windowed: Seconds, rows: int, last_rows: int) -> Seconds:
        """All layers and the lm_head, of ``rows`` rows of this rank."""
        shape, weights = self.shape, self.weights
        seconds = Seconds().plus(full, shape.num_layers - shape.windowed_layers)
        seconds = seconds.plus(windowed, shape.windowed_layers)
        head = weights.head or weights.embedding
        flops = 2 * (rows * weights.multiplied(shape) + last_rows * head)
        products = self.speeds.local(flops, weights.read(shape, self.precision, rows))
        return seconds.plus(Seconds(0.0, products, self._sums(rows, last_rows)))

    def _sums(self, rows: int, last_rows: int) -> float:
        """Seconds of the collectives over tp: after o_proj, MLPs and experts, and of the lm_head.

        A layer with routed and shared experts sums them apart.
        """
        shape, topology, itemsize = self.shape, self.topology, self.sizes.itemsize
        if topology.tp == 1:
            return 0.0
        extra = shape.experts.layers if shape.experts and shape.experts.shared_width else 0
        calls = all_reduce_calls(topology, rows, shape.hidden_size, itemsize)
        seconds = (2 * shape.num_layers + extra) * self.speeds.talk(calls)
        logits = (topology.tp - 1) * last_rows * (shape.vocab_size // topology.tp) * itemsize
        return seconds + self.speeds.talk([Call("tp", "all_gather", logits)])


def causal_pairs(tokens: int, cached: int = 0, window: int | None = None) -> int:
    """Query-key pairs of one head: the sum over new tokens of the keys that each sees.

    Args:
        tokens: New tokens, at positions from ``cached`` on.
        cached: Tokens before them.
        window: Sliding window, or ``None``.
    """
    if window is None:
        return tokens * cached + tokens * (tokens + 1) // 2
    growing = min(max(window - cached, 0), tokens)  # rows that see all keys up to their own
    return growing * cached + growing * (growing + 1) // 2 + (tokens - growing) * window

"""How many weights a rank holds, and in how many bytes: by formula, as the layers are cut.

Per layer, with t = tp, or tp / k where queries are replicated in a DCP group of k TP neighbours:

    grouped-query   q: h*N*H / t      k, v: h*H * KV heads of a rank      o: N*H*h / tp
    latent (MLA)    q_a: h*q_rank, or nothing     q_b: (q_rank or h)*N*(P + R) / t
                    kv_a: h*(L + R)               kv_b: L*N*(P + V) / t      o: N*V*h / tp
    dense MLP       3*h*width / tp, whole where tp does not divide the width
    experts         count * 3*h*width / tp, the slice padded to a multiple of 8 features
    router          count*h, whole

    embedding       vocab*h, whole
    lm_head         vocab*h / tp, whole where tp does not divide it; none where it is tied and tp=1

Norms and biases, less than 0.1 % of a model, are left out. Of the sizes published with a model,
those of its multi-token prediction layers are not counted either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cplayers.attention.heads import head_shard
from cplayers.errors import ConfigError
from cplayers.mesh import Topology
from cplayers.planning.shape import ModelShape

BF16, FP8 = 2.0, 1.0
MXFP4 = 4.25 / 8
"""Bytes: 4 bits, and a scale of 8 bits for each 32 of them (OCP Microscaling Formats, v1.0)."""
PRECISIONS: Mapping[str, tuple[float, float, float]] = {
    "bf16": (BF16, BF16, BF16),
    "fp32": (4.0, 4.0, 4.0),
    "fp8": (FP8, FP8, BF16),
    "mxfp4": (BF16, MXFP4, BF16),
}
"""Bytes of a weight in attention and dense MLPs, in routed experts, and elsewhere. In fp8 one scale
of 4 bytes for 128 x 128 weights is not counted."""
_SLICE = 8  # features to a multiple of which a slice of experts is padded, `cplayers.hf.experts`


def require_precision(precision: str) -> None:
    """Raise ConfigError unless ``precision`` is one of `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise ConfigError(
            f"weights={precision}",
            "weights are counted in a known precision",
            f"pass weights= one of {', '.join(PRECISIONS)}",
        )


@dataclass(frozen=True)
class Weights:
    """Weights of one rank, in numbers of elements.

    Attributes:
        attention: Projections of all layers.
        dense: Dense MLPs and shared experts of all layers.
        experts: Routed experts of all layers.
        router: Routers of all layers.
        embedding: Input embedding.
        head: lm_head, 0 where it is the embedding.
    """

    attention: int
    dense: int
    experts: int
    router: int
    embedding: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        layers = self.attention + self.dense + self.experts + self.router
        return layers + self.embedding + self.head

    def nbytes(self, precision: str) -> int:
        """Bytes in memory.

        Args:
            precision: One of `PRECISIONS`.

        Raises:
            ConfigError: On another one.
        """
        require_precision(precision)
        linear, experts, rest = PRECISIONS[precision]
        others = self.router + self.embedding + self.head
        return int(linear * (self.attention + self.dense) + experts * self.experts + rest * others)

    def read(self, shape: ModelShape, precision: str, tokens: float) -> float:
        """Bytes that a step reads: all but the embedding, and of the experts those in use.

        Args:
            shape: The model.
            precision: One of `PRECISIONS`.
            tokens: Tokens in the step; each uses a random choice of experts.
        """
        linear, experts, rest = PRECISIONS[precision]
        head = self.head or self.embedding
        used = 0.0
        if shape.experts is not None:
            share = shape.experts.active / shape.experts.count
            used = (1 - (1 - share) ** tokens) * self.experts
        return linear * (self.attention + self.dense) + experts * used + rest * (self.router + head)

    def multiplied(self, shape: ModelShape) -> float:
        """Weights of the layers with which one token is multiplied; the lm_head is apart.

        Args:
            shape: The model.
        """
        share = shape.experts.active / shape.experts.count if shape.experts else 0.0
        return self.attention + self.dense + share * self.experts + self.router


def weights_of(shape: ModelShape, topology: Topology, *, replicate_q: bool = False) -> Weights:
    """Weights of the rank that holds most of them.

    Args:
        shape: The model.
        topology: The ranks, in a layout that `cplayers.mesh.validate` accepts.
        replicate_q: Whether a rank projects the queries of its whole DCP group.
    """
    tp, hidden = topology.tp, shape.hidden_size
    attention = shape.num_layers * _attention(shape, topology, replicate_q)
    dense = shape.dense_layers * 3 * hidden * _part(shape.intermediate_size, tp)
    experts = router = 0
    if (mixture := shape.experts) is not None:
        width = _part(mixture.width, tp)
        if width < mixture.width:
            width += -width % _SLICE
        experts = mixture.layers * mixture.count * 3 * hidden * width
        router = mixture.layers * mixture.count * hidden
        dense += mixture.layers * 3 * hidden * _part(mixture.shared_width, tp)
    embedding = shape.vocab_size * hidden
    head = hidden * _part(shape.vocab_size, tp)
    if shape.tied and head == embedding:
        head = 0
    return Weights(attention, dense, experts, router, embedding, head)


def _attention(shape: ModelShape, topology: Topology, replicate_q: bool) -> int:
    """Projections of one layer."""
    hidden, heads = shape.hidden_size, shape.num_heads
    shard = head_shard(topology, 0, heads, shape.num_kv_heads or 1, replicate_q=replicate_q)
    projected = shard.num_group if replicate_q else shard.num_own
    out = shard.num_own * shape.value_dim * hidden
    if (latent := shape.latent) is None:
        kv = hidden * shard.num_kv * (shape.head_dim + shape.value_dim)
        return hidden * projected * shape.head_dim + kv + out
    q_in, q_a = latent.q_rank or hidden, hidden * (latent.q_rank or 0)
    q_b = q_in * projected * shape.head_dim
    kv_a = hidden * (latent.kv_rank + latent.rope_dim)
    kv_b = latent.kv_rank * projected * (latent.nope_dim + shape.value_dim)
    return q_a + q_b + kv_a + kv_b + out


def _part(width: int, tp: int) -> int:
    """A rank's features of ``width``, all of them where tp does not divide it."""
    return width // tp if width % tp == 0 else width

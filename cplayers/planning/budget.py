"""What fills a card: weights, KV cache and the workspace of a step.

    weights    `cplayers.planning.weights`, by formula
    KV cache   `cplayers.planning.memory`, by formula, equal to what is allocated
    workspace  an estimate of the largest tensors that live at once in a step:
               rows*(4*h + 3*width of MLPs in use + own heads*(query + 2*value dim))*e
               + gathered keys: min(workspace_tokens, context)*stored*e, where dcp is above 1
               + expanded latents of these keys, own heads*(query + value dim)*e each
               + logits: sequences*vocab*4
                 rows: of a chunk, or the sequences that decode, whichever are more

h is the model's width, e the bytes of an activation. All of it is for one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cplayers.attention.prefill import WORKSPACE_TOKENS
from cplayers.cache import CacheConfig
from cplayers.mesh import Topology
from cplayers.planning.memory import KVMemory, sizes_of
from cplayers.planning.shape import ModelShape
from cplayers.planning.weights import weights_of


@dataclass(frozen=True)
class Budget:
    """Memory of one card under a load; the card that holds most.

    Attributes:
        capacity: Bytes that may be used.
        weights: Bytes of weights.
        workspace: Bytes of a step, an estimate.
        sequence: KV bytes of one sequence.
        sequences: Sequences on a replica.
        max_context: Tokens to which each of these sequences may grow, with the workspace of such
            a context.
        max_concurrency: Sequences of this context that all replicas hold, with their workspace.
    """

    capacity: int
    weights: int
    workspace: int
    sequence: int
    sequences: int
    max_context: int
    max_concurrency: int

    @property
    def kv(self) -> int:
        """KV bytes of all sequences of a replica."""
        return self.sequences * self.sequence

    @property
    def used(self) -> int:
        """All of it."""
        return self.weights + self.workspace + self.kv

    @property
    def free(self) -> int:
        """Bytes for the KV cache, below 0 where the weights alone are too large."""
        return self.capacity - self.weights - self.workspace

    @property
    def fits(self) -> bool:
        """Whether the load fits on the card."""
        return self.used <= self.capacity


def budget_of(
    shape: ModelShape,
    topology: Topology,
    *,
    capacity: int,
    context: int,
    concurrency: int,
    chunk: int,
    cache: CacheConfig,
    dtype: torch.dtype,
    precision: str,
    replicate_q: bool = False,
) -> Budget:
    """Memory of a card.

    Args:
        shape: The model.
        topology: The ranks, in a valid layout.
        capacity: Bytes of a card that may be used.
        context: Tokens of each sequence.
        concurrency: Sequences of all replicas.
        chunk: Tokens of a prompt that are computed in one step.
        cache: Block and interleave size.
        dtype: Of the cache and of activations.
        precision: Of the weights.
        replicate_q: Whether a rank projects the queries of its whole DCP group.

    Raises:
        ConfigError: On an unknown precision.
    """
    sequences = -(-concurrency // topology.dp)
    memory = KVMemory(shape, topology, cache, dtype, replicate_q=replicate_q)
    weights = weights_of(shape, topology, replicate_q=replicate_q).nbytes(precision)

    def free(context: int, sequences: int) -> int:
        """Bytes for the cache beside the step of such a load: more of it leave less."""
        return (
            capacity
            - weights
            - workspace_bytes(
                shape, topology, context=context, sequences=sequences, chunk=chunk, dtype=dtype
            )
        )

    def holds(context: int, sequences: int) -> bool:
        return memory.nbytes(context, sequences) <= free(context, sequences)

    # no load has more room than the smallest one
    most_tokens = memory.max_context(sequences, free(1, sequences))
    most_sequences = memory.max_sequences(context, free(context, 1))
    most = _largest(lambda count: holds(context, count), most_sequences)
    return Budget(
        capacity=capacity,
        weights=weights,
        workspace=capacity - weights - free(context, sequences),
        sequence=memory.nbytes(context),
        sequences=sequences,
        max_context=_largest(lambda tokens: holds(tokens, sequences), most_tokens),
        max_concurrency=topology.dp * most,
    )


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that holds, where all below it do; 0 where none does."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least


def workspace_bytes(
    shape: ModelShape,
    topology: Topology,
    *,
    context: int,
    sequences: int,
    chunk: int,
    dtype: torch.dtype,
    workspace_tokens: int = WORKSPACE_TOKENS,
) -> int:
    """An estimate of the memory of a step, see the module's text.

    Args:
        shape: The model.
        topology: The ranks, in a valid layout.
        context: Tokens of each sequence.
        sequences: Sequences of a replica.
        chunk: Tokens of a prompt that are computed in one step.
        dtype: Of activations.
        workspace_tokens: Most cached tokens that are gathered at a time.
    """
    sizes = sizes_of(shape, topology, dtype=dtype)
    rows = max(-(-min(chunk, context) // topology.pcp), sequences)
    width = shape.intermediate_size
    if (mixture := shape.experts) is not None:
        width = max(width if shape.dense_layers else 0, mixture.active * mixture.width)
    heads = sizes.own_heads * (shape.head_dim + 2 * shape.value_dim)
    row = 4 * shape.hidden_size + 3 * -(-width // topology.tp) + heads
    gathered = min(workspace_tokens, context) if topology.dcp > 1 else 0
    expanded = 0
    if shape.latent is not None:
        gathered = min(workspace_tokens, context)
        expanded = gathered * sizes.own_heads * (shape.head_dim + shape.value_dim)
    elements = rows * row + gathered * sizes.stored + expanded
    return elements * dtype.itemsize + 4 * sequences * shape.vocab_size

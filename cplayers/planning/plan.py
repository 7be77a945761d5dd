"""Which (tp, dcp, pcp, dp) a model can run on, and what each would cost.

All ways of using the cards are judged by `cplayers.mesh.validate`; memory is by formula, times are
predictions. A load is ``concurrency`` requests that arrive together, each with a prompt and some
tokens to generate; a replica computes its prompts one after another and then decodes them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from cplayers.attention.combine import require_combine
from cplayers.cache import CacheConfig
from cplayers.errors import ConfigError
from cplayers.mesh import Topology, legal_dcp
from cplayers.planning.budget import Budget, budget_of
from cplayers.planning.memory import check_layout
from cplayers.planning.shape import ModelShape
from cplayers.planning.speeds import ASSUMED, Assumed, Hardware
from cplayers.planning.times import Seconds, TimeModel
from cplayers.planning.weights import require_precision

MOST_CARDS = 1024
"""Of one plan: all of its layouts are judged."""
MOST = 1 << 40
"""Tokens or requests of a load; far above what fits, and small enough for floats to be exact."""


@dataclass(frozen=True)
class Load:
    """What is asked of the cards.

    Args:
        context: Tokens of a sequence, prompt and generated ones together.
        concurrency: Requests at a time.
        output: Generated tokens of a request, fewer than ``context``; by default 1,024, or a
            quarter of a shorter context.
        chunk: Prompt tokens that are computed in one step.

    Raises:
        ConfigError: If a number is below 1 or above 2^40, or nothing is left for the prompt.
    """

    context: int
    concurrency: int = 1
    output: int | None = None
    chunk: int = 8192

    def __post_init__(self) -> None:
        if self.output is None:
            object.__setattr__(self, "output", max(1, min(1024, self.context // 4)))
        for name in ("context", "concurrency", "output", "chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{name}={value!r}", f"{name} is an int of at least 1", f"pass {name} >= 1"
                )
            if value > MOST:
                raise ConfigError(
                    f"{name} above {MOST:,}", "no cards hold so many", f"pass a smaller {name}"
                )
        if self.prompt < 1:
            raise ConfigError(
                f"output={self.output} with context={self.context}",
                "the context holds a prompt and what is generated",
                f"pass output below {self.context}, or a larger context",
            )

    @property
    def generated(self) -> int:
        """``output``, resolved."""
        assert self.output is not None
        return self.output

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.context - self.generated


@dataclass(frozen=True)
class Choices:
    """What is decided about how a model runs, apart from its layout.

    Attributes:
        cache: Block and interleave size.
        dtype: Of the cache and of activations.
        precision: Of the weights; ``None``: as published.
        combine: How partial results are combined.
        utilization: Part of a card's memory that may be used.
        assumed: What no data sheet says about the hardware.
    """

    cache: CacheConfig = field(default_factory=CacheConfig)
    dtype: torch.dtype = torch.bfloat16
    precision: str | None = None
    combine: str = "a2a"
    utilization: float = 0.9
    assumed: Assumed = ASSUMED


@dataclass(frozen=True)
class Candidate:
    """One layout.

    Attributes:
        topology: The ranks.
        replicate_q: Whether queries are replicated in a DCP group (``q_proj="tpa"``, or
            ``decode="replicate_q"`` of latent attention).
        budget: Memory of a card.
        load: What is asked.
        first_token: Predicted time to the first token of a prompt on an idle replica.
        token: Predicted time of a decode step, all sequences of a replica at full context.
    """

    topology: Topology
    replicate_q: bool
    budget: Budget
    load: Load
    first_token: Seconds
    token: Seconds

    @property
    def fits(self) -> bool:
        """Whether the load fits on the cards."""
        return self.budget.fits

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """tp, dcp, pcp, dp."""
        return self.topology.tp, self.topology.dcp, self.topology.pcp, self.topology.dp

    @property
    def total(self) -> float:
        """Predicted seconds of the whole load."""
        prompts = self.budget.sequences * self.first_token.total
        return prompts + self.load.generated * self.token.total

    def to_dict(self) -> dict[str, Any]:
        """As plain data; times and workspace stand under ``predicted``."""
        budget = self.budget
        return {
            **dict(zip(("tp", "dcp", "pcp", "dp"), self.degrees, strict=True)),
            "q_proj": "tpa" if self.replicate_q else "gather",
            "fits": self.fits,
            "weight_bytes": budget.weights,
            "kv_bytes": budget.kv,
            "kv_bytes_per_sequence": budget.sequence,
            "sequences_per_replica": budget.sequences,
            "predicted": {
                "workspace_bytes": budget.workspace,
                "max_context": budget.max_context,
                "max_concurrency": budget.max_concurrency,
                "ttft_s": self.first_token.total,
                "ttft_parts_s": self.first_token._asdict(),
                "tpot_s": self.token.total,
                "tpot_parts_s": self.token._asdict(),
                "load_s": self.total,
            },
        }


def candidates(
    shape: ModelShape, hardware: Hardware, gpus: int, load: Load, choices: Choices | None = None
) -> list[Candidate]:
    """All valid layouts of the cards: the fastest that fit first, then those that miss by least.

    Args:
        shape: The model.
        hardware: The cards.
        gpus: How many.
        load: What is asked of them.
        choices: How the model runs.

    Raises:
        ConfigError: On an unknown precision or way of combining, on a number of cards or a
            utilization that makes no sense, and on heads that no layout can split.
    """
    choices = choices or Choices()
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        raise ConfigError(f"gpus={gpus!r}", "at least one card computes", "pass gpus >= 1")
    if gpus > MOST_CARDS:
        raise ConfigError(
            f"gpus above {MOST_CARDS:,}",
            f"layouts of up to {MOST_CARDS:,} cards are judged",
            "plan one replica, and run several of it",
        )
    # cards that do not share a model: what is refused here is refused on every layout
    check_layout(shape, Topology(dp=gpus), choices.cache)
    if not 0 < choices.utilization <= 1:
        raise ConfigError(
            f"utilization={choices.utilization}",
            "it is the part of a card's memory that may be used",
            "pass a number above 0 and up to 1",
        )
    require_precision(choices.precision or shape.precision)
    require_combine(choices.combine)
    found = [
        _evaluate(shape, hardware, topology, replicate_q, load, choices)
        for topology, replicate_q in layouts(shape, gpus)
    ]
    return sorted(
        found, key=lambda c: (not c.fits, c.total if c.fits else c.budget.used, c.degrees)
    )


def any_fits(
    shape: ModelShape, hardware: Hardware, gpus: int, load: Load, choices: Choices
) -> bool:
    """Whether the load fits on some layout of so many cards; no times are predicted.

    Args:
        shape: The model.
        hardware: The cards.
        gpus: How many.
        load: What is asked of them.
        choices: How the model runs.
    """
    return any(
        _budget(shape, hardware, topology, replicate_q, load, choices).fits
        for topology, replicate_q in layouts(shape, gpus)
    )


def layouts(shape: ModelShape, gpus: int) -> Iterator[tuple[Topology, bool]]:
    """Every valid layout of so many cards, with and without replicated queries where that matters.

    Args:
        shape: The model.
        gpus: Cards.
    """
    for tp in _divisors(gpus):
        for pcp in _divisors(gpus // tp):
            axes = Topology(tp=tp, pcp=pcp, dp=gpus // tp // pcp)
            for replicate_q in (False, True):
                for dcp in legal_dcp(
                    axes,
                    num_heads=shape.num_heads,
                    num_kv_heads=shape.num_kv_heads,
                    replicate_q=replicate_q,
                ):
                    topology = Topology(tp, dcp, pcp, axes.dp)
                    if not replicate_q or topology.dcp_tp > 1:
                        yield topology, replicate_q


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _evaluate(
    shape: ModelShape,
    hardware: Hardware,
    topology: Topology,
    replicate_q: bool,
    load: Load,
    choices: Choices,
) -> Candidate:
    budget = _budget(shape, hardware, topology, replicate_q, load, choices)
    model = TimeModel(
        shape,
        topology,
        hardware.speeds(topology, choices.assumed),
        cache=choices.cache,
        dtype=choices.dtype,
        precision=choices.precision,
        replicate_q=replicate_q,
        combine=choices.combine,
    )
    first = model.first_token(load.prompt, load.chunk)
    token = model.decode_step(load.context, budget.sequences)
    return Candidate(topology, replicate_q, budget, load, first, token)


def _budget(
    shape: ModelShape,
    hardware: Hardware,
    topology: Topology,
    replicate_q: bool,
    load: Load,
    choices: Choices,
) -> Budget:
    return budget_of(
        shape,
        topology,
        capacity=int(choices.utilization * hardware.memory),
        context=load.context,
        concurrency=load.concurrency,
        chunk=load.chunk,
        cache=choices.cache,
        dtype=choices.dtype,
        precision=choices.precision or shape.precision,
        replicate_q=replicate_q,
    )

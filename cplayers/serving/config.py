"""What a server may use, and from where on it prefers larger groups: explicit numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from cplayers.errors import ConfigError

NOT_INTS = ("sizes", "crossovers", "steps", "share", "same_processors")


@dataclass(frozen=True)
class ServingConfig:
    """Settings of a server; alike on all ranks.

    Attributes:
        num_blocks: Blocks of KV cache on each rank, the budget of all groups together.
        block_size: Tokens per block on one rank.
        interleave_size: Tokens that go to one rank before the next one's turn.
        sizes: How many replicas a group may have. Each size cuts the replicas into groups.
        crossovers: Size of a group -> context in tokens from which it is preferred over smaller
            ones; ``None``, or no entry, is never for its speed, only where memory asks for it.
            A calibration's numbers go here: ``crossovers(...).dcp`` of each degree.
        chunk_tokens: New prompt tokens of a group in one step, for each of its replicas.
        steps: Size of a group -> its steps between two agreed points: how the groups share the
            time of a replica. A number is that of one replica; a group of n makes
            ``max(1, steps // n)``. A size that is not named makes as many as the next smaller one.
        share: Part of the time of its replicas that a larger group may take from smaller groups
            that have work there; above 0, and 1 is never to rest. See `cplayers.serving.shares`.
        same_processors: Whether the replicas run on the same processors, such as ranks on a machine
            with fewer cores: then a larger group shares time with smaller ones anywhere.
        stretch: A group of one rank goes on decoding while larger ones are busy, for up to this
            many times its steps.
        headroom: Tokens that a request may grow by for which room is promised in advance.
        patience: Agreed points for which a request is overtaken by others; then room is kept
            for it.
        max_running: Requests of a group that run at a time.

    Raises:
        ConfigError: On a number below 1, a share outside 0..1, sizes that do not ascend, or
            crossovers that fall.
    """

    num_blocks: int
    block_size: int = 16
    interleave_size: int = 16
    sizes: tuple[int, ...] = (1, 2, 4)
    crossovers: Mapping[int, int | None] = field(default_factory=dict)
    chunk_tokens: int = 256
    steps: int | Mapping[int, int] = 4
    share: float = 0.25
    same_processors: bool = False
    stretch: int = 4
    headroom: int = 64
    patience: int = 50
    max_running: int = 64

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in NOT_INTS:
                fine = type(value) is int and value >= 1
                _require(
                    fine, f"{each.name}={value!r}", "an int of at least 1", f"pass {each.name} >= 1"
                )
        _require(
            isinstance(self.share, int | float) and 0 < self.share <= 1,
            f"share={self.share!r}",
            "a larger group's part of the time, above 0 and at most 1",
            "e.g. 0.25",
        )
        _require(
            type(self.same_processors) is bool,
            f"same_processors={self.same_processors!r}",
            "either all replicas share processors, or none do",
            "pass True or False",
        )
        ints = isinstance(self.sizes, list | tuple) and all(type(n) is int for n in self.sizes)
        _require(
            ints
            and bool(self.sizes)
            and list(self.sizes) == sorted(set(self.sizes))
            and self.sizes[0] >= 1,
            f"sizes={self.sizes!r}",
            "sizes of groups ascend from at least 1",
            "e.g. (1, 2, 4)",
        )
        object.__setattr__(self, "sizes", tuple(self.sizes))
        self._judge_steps()
        self._judge_crossovers()

    def _judge_steps(self) -> None:
        steps = self.steps if isinstance(self.steps, Mapping) else {self.sizes[0]: self.steps}
        _require(
            self.sizes[0] in steps and all(type(n) is int and n >= 1 for n in steps.values()),
            f"steps={self.steps!r}",
            "steps of a group are an int of at least 1, and the smallest size has some",
            "e.g. {1: 8, 4: 1}",
        )

    def _judge_crossovers(self) -> None:
        mapping = isinstance(self.crossovers, Mapping)
        marks = [m for m in self.crossovers.values() if m is not None] if mapping else [0]
        _require(
            all(type(mark) is int and mark >= 1 for mark in marks),
            f"crossovers={self.crossovers!r}",
            "they map sizes to contexts of at least one token, or to None",
            "e.g. {2: 4096, 4: None}",
        )
        known = [self.crossovers.get(size) for size in self.sizes]
        marks = [mark for mark in known if mark is not None]
        _require(
            marks == sorted(marks) and set(self.crossovers) <= set(self.sizes),
            f"crossovers={dict(self.crossovers)} with sizes={self.sizes}",
            "they are contexts in tokens by size, and larger groups begin at longer ones",
            "leave out a size that wins nowhere, or give it None",
        )

    def preferred(self, length: int) -> int:
        """The size that a context of ``length`` tokens asks for by its crossover."""
        marks = ((size, self.crossovers.get(size)) for size in self.sizes)
        return max(
            (size for size, mark in marks if mark is not None and length >= mark),
            default=self.sizes[0],
        )

    def steps_of(self, size: int) -> int:
        """Steps between two agreed points of a group of ``size`` replicas."""
        if isinstance(self.steps, int):
            return max(1, self.steps // size)
        # what is left of a fleet may make a group below the smallest size
        smaller = [known for known in self.steps if known <= size]
        return self.steps[max(smaller, default=min(self.steps))]

    def chunk_of(self, size: int) -> int:
        """Most new prompt tokens in one step of a group of ``size`` replicas."""
        return self.chunk_tokens * size


def _require(fine: bool, value: str, rule: str, remedy: str) -> None:
    if not fine:
        raise ConfigError(value, rule, remedy)

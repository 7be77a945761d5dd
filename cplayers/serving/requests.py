"""A request, and where it stands: plain values that are alike on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cplayers.errors import ConfigError

Replicas = tuple[int, ...]
"""The replicas of a group, ascending: how groups are named."""


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes:
        name: Unique among the requests of a run.
        prompt: Token ids, at least one.
        max_new_tokens: Most tokens to generate.
        arrival: Seconds after the start of the server's first run.
        stop: Token ids that end the request; the one that was generated is its last token.

    Raises:
        ConfigError: On an empty prompt, no token to generate, or values of another type.
    """

    name: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival: float = 0.0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.name) is not str:
            raise ConfigError(
                f"a request named {self.name!r}", "names are str", f"pass {str(self.name)!r}"
            )
        for what, ids in (("prompt", self.prompt), ("stop", self.stop)):
            given = [ids] if type(ids) is not tuple else [t for t in ids if not _is_token(t)]
            if given:
                raise ConfigError(
                    f"request {self.name!r} with {given[0]!r} in its {what}",
                    "token ids are a tuple of ints from 0 on",
                    "pass e.g. tuple(ids.tolist())",
                )
        if type(self.arrival) not in (int, float) or not math.isfinite(self.arrival):
            raise ConfigError(
                f"request {self.name!r} with arrival={self.arrival!r}",
                "arrivals are finite seconds after the start",
                "pass e.g. 0.0",
            )
        if not self.prompt or type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise ConfigError(
                f"request {self.name!r} with {len(self.prompt)} prompt tokens and "
                f"max_new_tokens={self.max_new_tokens!r}",
                "a request has a prompt and generates at least one token",
                "pass a prompt, and an int max_new_tokens >= 1",
            )

    @property
    def most_cached(self) -> int:
        """Tokens in the cache at its end, if nothing stops it: the last one is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1

    def is_over(self, new: list[int]) -> bool:
        """Whether ``new`` generated tokens end the request."""
        return len(new) >= self.max_new_tokens or (bool(new) and new[-1] in self.stop)


def _is_token(token: object) -> bool:
    return type(token) is int and token >= 0


@dataclass
class Progress:
    """A request as it stands at an agreed point.

    Attributes:
        request: What was asked for.
        number: Order of arrival; the latest one is the first to give way.
        new: Tokens generated so far.
        times: When each of them was generated, in seconds after the start.
        group: The group that holds it, ``None`` while it waits.
        cached: Its tokens in the cache of that group.
        cramped: Whether its group had no blocks for it at the last agreed point.
        waited: Agreed points for which it has waited since it last ran.
        history: Groups that held it, in order.
        recomputed: How often it was begun again from its tokens.
        refused: Why it cannot run at all, or empty.
    """

    request: Request
    number: int
    new: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    group: Replicas | None = None
    cached: int = 0
    cramped: bool = False
    waited: int = 0
    history: list[Replicas] = field(default_factory=list)
    recomputed: int = 0
    refused: str = ""

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt, *self.new]

    @property
    def length(self) -> int:
        """Their number."""
        return len(self.request.prompt) + len(self.new)

    @property
    def decodes(self) -> bool:
        """Whether all tokens but the last are cached."""
        return bool(self.new) and self.cached == self.length - 1

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return bool(self.refused) or self.request.is_over(self.new)

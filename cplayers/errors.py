"""The errors that cplayers raises.

Every message names the value that is wrong, the rule that it breaks and the remedy. Errors about
configuration and capacity are raised before anything is changed, and alike on all ranks.
"""

from __future__ import annotations


class CPLayersError(Exception):
    """Base class of all errors raised by cplayers."""


class ConfigError(CPLayersError, ValueError):
    """A value, or a combination of values, that cannot work.

    Args:
        value: What was given, as the user would recognise it, e.g. ``"tp=6, num_kv_heads=4"``.
        rule: The rule that it breaks.
        remedy: What to do instead.
    """

    def __init__(self, value: str, rule: str, remedy: str) -> None:
        super().__init__(f"{value}: {rule}. Remedy: {remedy}.")
        self.value = value
        self.rule = rule
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str, str]]:
        return type(self), (self.value, self.rule, self.remedy)


class TransferError(ConfigError):
    """Blocks that arrived are not what was sent, or do not fit where they go; none was taken."""


class CacheFullError(CPLayersError, RuntimeError):
    """The block pool cannot hold a step. Raised by ``plan``, before anything is written."""


class StateError(CPLayersError, RuntimeError):
    """An object was used in an order that it does not allow, e.g. a stale plan was committed."""


class RankFailedError(CPLayersError, RuntimeError):
    """Another rank raised or died while this one was waiting for it.

    Args:
        message: What happened, naming the rank.
        rank: Global rank at the root of the failure, or ``None`` when it cannot be told.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[str, int | None]]:
        return type(self), (str(self), self.rank)

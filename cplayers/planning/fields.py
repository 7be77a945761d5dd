"""Reading JSON that others wrote: fields have types, and a mistake is an error that names one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cplayers.errors import ConfigError

MOST = 1 << 40
"""Of a size in a config: a larger one is a mistake, and would not be finite in all formulas."""
_SHOWN = 60  # letters of a value in a message


def shown(value: object) -> str:
    """A value for a message, shortened.

    Args:
        value: Anything that JSON holds.
    """
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        return "an int of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_object(path: Path, missing: ConfigError) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: Of the file.
        missing: What to raise where there is no such file; it says what is read.

    Raises:
        ConfigError: ``missing``; or if the file cannot be read or does not hold a JSON object.
    """
    try:
        if not path.is_file():
            raise missing
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            missing.value, f"it cannot be read ({error.strerror})", missing.remedy
        ) from None
    except (ValueError, RecursionError) as error:
        if error is missing:
            raise
        raise ConfigError(
            missing.value, f"it is not JSON ({shown(str(error))})", "pass a file with a JSON object"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(
            missing.value, f"it holds {shown(data)} and no fields", "pass a file with a JSON object"
        )
    return data


class Fields:
    """Fields of a ``config.json``.

    Args:
        name: Of the model, for messages.
        config: The fields. Those that are null count as not given.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self.config = {key: value for key, value in config.items() if value is not None}

    def __contains__(self, key: str) -> bool:
        return key in self.config

    def error(self, key: str, rule: str) -> ConfigError:
        """What to raise where a field breaks a rule.

        Args:
            key: The field.
            rule: That it breaks.
        """
        return ConfigError(
            f"model={self.name} with {key}={shown(self.config.get(key))}",
            rule,
            "pass the config.json of a decoder with softmax attention",
        )

    def count(self, key: str, default: int | None = None, *, most: int = MOST) -> int:
        """A field that is an int of at least 1.

        Args:
            key: The field.
            default: Where it is not given; without one it has to be.
            most: The largest value.

        Raises:
            ConfigError: If it is not such an int, or not given.
        """
        return self._int(key, default, 1, most)

    def natural(self, key: str, default: int = 0) -> int:
        """A field that is an int of at least 0.

        Args:
            key: The field.
            default: Where it is not given.

        Raises:
            ConfigError: If it is not such an int.
        """
        return self._int(key, default, 0, MOST)

    def _int(self, key: str, default: int | None, least: int, most: int) -> int:
        value = self.config.get(key, default)
        if value is None:
            raise ConfigError(
                f"model={self.name} without {key}",
                f"{key} is one of the sizes that are counted, an int of at least {least}",
                f"add {key}: some configs leave out what the class of their model has as a default",
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"{key} is an int of at least {least}")
        if value > most:
            raise self.error(key, f"{key} is at most {most:,}")
        return value

    def first(self, *keys: str) -> int | None:
        """The first of ``keys`` that is given, an int of at least 0.

        Args:
            *keys: Names that one field has in different models.
        """
        return next((self.natural(key) for key in keys if key in self), None)

    def text(self, key: str, default: str = "") -> str:
        """A field that is a text.

        Args:
            key: The field.
            default: Where it is not given.
        """
        value = self.config.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"{key} is a text")
        return value

    def switch(self, key: str, *, default: bool = False) -> bool:
        """A field that is true or false.

        Args:
            key: The field.
            default: Where it is not given.
        """
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"{key} is true or false")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """A field that is a list, empty where it is not given.

        Args:
            key: The field.
            kind: Of its items, ``str`` or ``int``.
        """
        value = self.config.get(key, [])
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.error(key, f"{key} is a list of {'texts' if kind is str else 'ints'}")
        return value

    def inner(self, key: str) -> Fields:
        """The fields of a field, none where it is not given.

        Args:
            key: The field.
        """
        value = self.config.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, f"{key} is an object")
        return Fields(self.name, value)

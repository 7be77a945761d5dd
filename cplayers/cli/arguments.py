"""Arguments of the form ``key=value``, and flags."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cplayers.errors import ConfigError

_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TIMES = {"ms": 1e-3, "us": 1e-6, "s": 1.0}
REQUIRED = object()
MOST = 1 << 40
MOST_SECONDS = 1_000_000_000
LEAST_FRACTION = 1e-6
"""Bounds of what is given: whatever is reckoned within them stays finite."""
_SHOWN = 60  # letters of a value in a message


class Option(NamedTuple):
    """One argument.

    Attributes:
        parse: Text to its value; raises ConfigError.
        default: Where it is not given; ``REQUIRED`` if it must be.
        text: What it is, for the help.
    """

    parse: Callable[[str, str], Any]
    default: Any
    text: str


class Flag(NamedTuple):
    """An argument that begins with ``--``.

    Attributes:
        text: What it does.
        value: What follows it, e.g. ``PATH``; empty for a flag that is on or off.
    """

    text: str
    value: str = ""


def parse(
    words: Sequence[str], options: Mapping[str, Option], flags: Mapping[str, Flag]
) -> dict[str, Any]:
    """Values by name, those of flags without the dashes.

    Args:
        words: Arguments of a command.
        options: By key.
        flags: By name without dashes.

    Raises:
        ConfigError: On what is unknown, missing, given twice or cannot be read.
    """
    given: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if word.startswith("--"):
            name = name.removeprefix("--")
            flag = flags.get(name)
            if flag is None:
                raise _unknown(f"--{name}", [f"--{known}" for known in flags])
            if not flag.value and equals:
                raise ConfigError(word, f"--{name} takes no value", f"pass --{name} alone")
            if flag.value and not equals:
                text = rest.pop(0) if rest else ""
            if flag.value and not text:
                raise ConfigError(f"--{name}", "it wants a value", f"pass --{name} {flag.value}")
            value: Any = text if flag.value else True
        else:
            if name not in options:
                known = [*options, *(f"--{flag}" for flag in flags if word.startswith("-"))]
                raise _unknown(word if not equals else name, known)
            if not equals or not text:
                raise ConfigError(word, "arguments are key=value", f"pass {name}=...")
            value = options[name].parse(name, text)
        if name in given:
            raise ConfigError(f"{name} given twice", "an argument is given once", "leave one out")
        given[name] = value
    for name, option in options.items():
        if option.default is REQUIRED and name not in given:
            raise ConfigError(f"no {name}", f"{name} is needed", f"pass {name}=...: {option.text}")
    defaults = {name: option.default for name, option in options.items()}
    switched_off = {name: None if flag.value else False for name, flag in flags.items()}
    return {**defaults, **switched_off, **given}


def _unknown(word: str, known: Sequence[str]) -> ConfigError:
    close = difflib.get_close_matches(word, known, n=1)
    remedy = f"write {close[0]}" if close else f"use one of {', '.join(known)}"
    return ConfigError(word, "not an argument of this command", remedy)


def count(name: str, text: str) -> int:
    """A number from 1 to `MOST`: 4, 1_000, 128K, 1M. K, M and G are powers of 1,024.

    Args:
        name: Of the argument.
        text: What was given.
    """
    return _count(name, text, MOST)


def up_to(most: int) -> Callable[[str, str], int]:
    """A number as `count` reads it, that may be at most so large.

    Args:
        most: The largest.
    """
    return lambda name, text: _count(name, text, most)


def _count(name: str, text: str, most: int) -> int:
    digits, unit = text, 1
    if text[-1].upper() in _SIZES:
        digits, unit = text[:-1], _SIZES[text[-1].upper()]
    digits = digits.replace("_", "").replace(",", "")
    if not (digits.isascii() and digits.isdecimal() and digits.strip("0")):
        raise ConfigError(
            _given(name, text),
            f"{name} is a whole number of at least 1, or one with K, M or G",
            f"write {name}=8 or 128K",
        )
    # long ones are not read: Python refuses those of thousands of digits
    if len(digits.lstrip("0")) > len(str(most)) or int(digits.lstrip("0")) * unit > most:
        raise ConfigError(
            _given(name, text), f"{name} is at most {most:,}", f"write {name}={most:,} or less"
        )
    return int(digits.lstrip("0")) * unit


def duration(name: str, text: str) -> float:
    """Seconds: 2s, 500ms, 20us.

    Args:
        name: Of the argument.
        text: What was given.
    """
    for suffix, unit in _TIMES.items():
        if text.endswith(suffix):
            seconds = _float(text.removesuffix(suffix))
            if seconds is not None and 0 < seconds * unit <= MOST_SECONDS:
                return seconds * unit
    raise ConfigError(
        _given(name, text),
        f"{name} is a time above 0, up to {MOST_SECONDS:,} s, with its unit",
        f"write {name}=2s or 500ms",
    )


def fraction(name: str, text: str) -> float:
    """A number from `LEAST_FRACTION` to 1.

    Args:
        name: Of the argument.
        text: What was given.
    """
    number = _float(text)
    if number is None or not LEAST_FRACTION <= number <= 1:
        raise ConfigError(
            _given(name, text),
            f"{name} is a number above 0 (at least {LEAST_FRACTION:g}) and up to 1",
            f"write {name}=0.9",
        )
    return number


def word(name: str, text: str) -> str:
    """Any text.

    Args:
        name: Of the argument.
        text: What was given.
    """
    return text


def one_of(*choices: str) -> Callable[[str, str], str]:
    """One of some words.

    Args:
        *choices: The words.
    """

    def parse_choice(name: str, text: str) -> str:
        if text not in choices:
            raise ConfigError(
                f"{name}={text}",
                f"{name} is one of {', '.join(choices)}",
                f"pass {name}={choices[0]}",
            )
        return text

    return parse_choice


def _given(name: str, text: str) -> str:
    """An argument as it was given, shortened."""
    return f"{name}={text}" if len(text) <= _SHOWN else f"{name}={text[:_SHOWN]}..."


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def describe(options: Mapping[str, Option], flags: Mapping[str, Flag]) -> str:
    """The arguments of a command for its help.

    Args:
        options: By key.
        flags: By name.
    """
    lines = ["Arguments:"]
    for name, option in options.items():
        default = ""
        if option.default not in (REQUIRED, None):
            default = f" [{option.default}]"
        elif option.default is REQUIRED:
            default = " (needed)"
        lines.append(f"  {name + '=':20}{option.text}{default}")
    lines += ["", "Flags:"]
    for name, flag in flags.items():
        lines.append(f"  {f'--{name} {flag.value}'.rstrip():20}{flag.text}")
    return "\n".join(lines)

"""What a command of ``cplayers`` is, and what all of them share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cplayers.cli.arguments import Flag, Option, describe, up_to
from cplayers.errors import ConfigError

HELP = {"help": Flag("show this and end")}
JSON = {"json": Flag("print JSON and nothing else")}
PNG = {"png": Flag("write a picture as well", "PATH")}

MOST_DEGREE, MOST_BLOCK = 1024, 1 << 20
MOST_RANKS = 64
"""Processes that a command starts on this machine."""
DEGREES = {
    "tp": Option(up_to(MOST_DEGREE), 1, "tensor parallel degree"),
    "dcp": Option(
        up_to(MOST_DEGREE), 1, "decode context parallel degree: 1, or pcp times a divisor of tp"
    ),
    "pcp": Option(up_to(MOST_DEGREE), 1, "prefill context parallel degree"),
    "dp": Option(up_to(MOST_DEGREE), 1, "data parallel replicas"),
}
BLOCKS = {
    "block": Option(up_to(MOST_BLOCK), 16, "tokens in a block of one rank"),
    "interleave": Option(
        up_to(MOST_BLOCK), 16, "tokens that go to one rank before the next has its turn"
    ),
}


class Command(NamedTuple):
    """A command.

    Attributes:
        summary: One line.
        text: What it does, and examples.
        options: Its arguments.
        flags: Its flags.
        run: Called with the values; returns the exit code.
    """

    summary: str
    text: str
    options: Mapping[str, Option]
    flags: Mapping[str, Flag]
    run: Callable[[Mapping[str, Any]], int]

    def help(self, name: str) -> str:
        """The help text.

        Args:
            name: Of the command.
        """
        usage = f"usage: cplayers {name} key=value ... [--flag ...]"
        arguments = describe(self.options, self.flags)
        return f"{usage}\n\n{self.summary}\n\n{self.text.strip()}\n\n{arguments}\n"


def show_json(data: object) -> None:
    """Print as JSON.

    Args:
        data: Plain data.
    """
    print(json.dumps(data, indent=2, allow_nan=False))


def picture(text: str) -> Path:
    """Where ``--png`` writes, checked before anything is computed.

    Args:
        text: The path that was given.

    Raises:
        ConfigError: If no PNG file can be written there.
    """
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise ConfigError(
            f"--png {text}", "pictures are PNG files", f"write {path.stem.strip('.') or 'plan'}.png"
        )
    if not os.path.isdir(path.parent):
        raise ConfigError(
            f"--png {text}",
            "a picture is put into a folder that exists",
            f"make {path.parent} first",
        )
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise ConfigError(
            f"--png {text}", "a picture is put where it can be written", "name another file"
        )
    return path


def need(module: str, what: str) -> None:
    """Refuse what needs a package that is not installed.

    Args:
        module: Of the package.
        what: That needs it.

    Raises:
        ConfigError: If it cannot be imported.
    """
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(
            f"{what} without {module}",
            f"it needs the package {module}",
            "pip install 'cplayers[viz]', or pass --json",
        ) from None

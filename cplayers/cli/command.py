"""What a command of ``cplayers`` is, and what all of them share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cplayers.cli.arguments import Flag, Option, count, describe
from cplayers.errors import ConfigError

HELP = {"help": Flag("show this and end")}
JSON = {"json": Flag("print JSON and nothing else")}
PNG = {"png": Flag("write a picture as well", "PATH")}

DEGREES = {
    "tp": Option(count, 1, "tensor parallel degree"),
    "dcp": Option(count, 1, "decode context parallel degree: 1, or pcp times a divisor of tp"),
    "pcp": Option(count, 1, "prefill context parallel degree"),
    "dp": Option(count, 1, "data parallel replicas"),
}
BLOCKS = {
    "block": Option(count, 16, "tokens in a block of one rank"),
    "interleave": Option(count, 16, "tokens that go to one rank before the next has its turn"),
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
    print(json.dumps(data, indent=2))


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

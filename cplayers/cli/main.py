"""The ``cplayers`` command: reads arguments, runs a command, turns errors into one line.

Exit codes: 0, it is done and right; 1, what was verified is wrong, or nothing fits; 2, an argument
or a configuration that cannot work, or an unforeseen error; 130, interrupted.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

from cplayers import __version__
from cplayers.cli.arguments import parse
from cplayers.errors import ConfigError, CPLayersError

COMMANDS = {
    "plan": "Which (tp, dcp, pcp, dp) fit a model and a load on given cards, and which to run.",
    "explain": "Where each token of a request lives, who computes what, who the groups are.",
    "verify": "Run a layout on tiny random weights on this machine and compare with one process.",
    "calibrate": "Measure the ranks at hand, and from which sizes one strategy beats another.",
}
DEBUG = "CPLAYERS_DEBUG"
LONGEST = 300  # letters of an unforeseen error
USAGE = """usage: cplayers COMMAND key=value ... [--flag ...]

Knowing what to run, before the machines are rented.

Commands:
{commands}

Examples:
  cplayers plan model=deepseek-v3 hardware=h200 gpus=8 context=1M concurrency=4
  cplayers explain tokens=22 pcp=4 dcp=4 interleave=2 block=4
  cplayers verify model=llama-3-70b tp=8 dcp=2 q_proj=tpa
  cplayers calibrate pcp=2 dcp=2

Sizes may be written 128K or 1M, in powers of 1,024. cplayers COMMAND --help says more,
and cplayers --version which one this is.

Exit codes: 0 done; 1 a check failed, or nothing fits; 2 an argument or layout that cannot work.
Errors are one line; with CPLAYERS_DEBUG=1 in the environment, unforeseen ones show a traceback.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; those of this process by default.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = " ".join(["cplayers", *words[:1]])
    _prepare_streams()
    try:
        code = _run(words)
        sys.stdout.flush()  # what cannot be written shows here, not when Python ends
        return code
    except CPLayersError as error:
        return _refuse(f"{name}: {error}")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of a reader such as `head`, which has seen enough
        _write_nowhere(sys.stdout)
        return 0
    except OSError as error:
        if os.environ.get(DEBUG):
            raise
        if error.errno == errno.ENOSPC:  # what is left in the buffer has no place either
            _write_nowhere(sys.stdout)
        what = error.strerror or str(error)
        where = f"{error.filename}: " if error.filename else ""
        return _refuse(
            f"{name}: {where}{what}: the system refused it. Remedy: see that there is space, "
            "memory and permission for what it reads and writes."
        )
    except Exception as error:  # every unforeseen one becomes a line, or a traceback on demand
        if os.environ.get(DEBUG):
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return _refuse(
            f"{name}: {what[:LONGEST]}: nothing foresaw this. Remedy: set {DEBUG}=1 to "
            "see where it is from, and report it."
        )


def _prepare_streams() -> None:
    """Let no letter that a terminal lacks, and no stream that is closed, end a command."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # of torch without numpy, which no command needs
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


def _write_nowhere(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _refuse(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help") or list(words) == ["help"]:
        commands = "\n".join(f"  {name:10} {summary}" for name, summary in COMMANDS.items())
        print(USAGE.format(commands=commands), end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"cplayers {__version__}")
        return 0
    if words[0] == "help":
        words = [*words[1:], "--help"]
    name, *rest = words
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        raise ConfigError(
            f"command {name!r}",
            f"commands are {', '.join(COMMANDS)}",
            f"write {close[0]}" if close else "run cplayers --help for examples",
        )
    command = importlib.import_module(f"cplayers.cli.{name}").COMMAND
    if {"-h", "--help"} & set(rest):
        print(command.help(name), end="")
        return 0
    code: int = command.run(parse(rest, command.options, command.flags))
    return code

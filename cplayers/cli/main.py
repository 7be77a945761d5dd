"""The ``cplayers`` command: reads arguments, runs a command, turns errors into one line.

Exit codes: 0, it is done and right; 1, what was verified is wrong, or nothing fits; 2, an argument
or a configuration that cannot work, or an unforeseen error; 130, interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

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

Sizes may be written 128K or 1M, in powers of 1,024. cplayers COMMAND --help says more.

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
    if not words or words[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:10} {summary}" for name, summary in COMMANDS.items())
        print(USAGE.format(commands=commands), end="")
        return 0 if words else 2
    name, *rest = words
    try:
        return _run(name, rest)
    except CPLayersError as error:
        print(f"cplayers {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of a reader such as `head`, which has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        print(
            f"cplayers {name}: {what[:LONGEST]}: nothing foresaw this. Remedy: set {DEBUG}=1 to "
            "see where it is from, and report it.",
            file=sys.stderr,
        )
        return 2


def _run(name: str, words: list[str]) -> int:
    if name not in COMMANDS:
        raise ConfigError(
            f"command {name!r}",
            f"commands are {', '.join(COMMANDS)}",
            "run cplayers --help for examples",
        )
    command = importlib.import_module(f"cplayers.cli.{name}").COMMAND
    if {"-h", "--help"} & set(words):
        print(command.help(name), end="")
        return 0
    code: int = command.run(parse(words, command.options, command.flags))
    return code

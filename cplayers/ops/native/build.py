"""Compiles a C file of this folder once per machine, and loads it.

The library is kept in the user's cache folder, under a name made of all that it depends on: the
source, the options, the compiler and the processor. Ranks that compile at the same time each write
a file of their own and rename it, so that none loads a part of one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
OPTIONS = (
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),  # without OpenMP, as compilers on macOS: one thread
    (),
)
"""Tried in this order; a compiler refuses what it or the processor does not know."""

COMPILE_S = 120.0
"""How long a compiler may take; it needs less than a second."""


class BuildError(Exception):
    """Why a library could not be had, in one line."""


@cache
def library(source: str, defines: tuple[str, ...]) -> ctypes.CDLL:
    """The library made from a C file.

    Args:
        source: Name of the file in this folder.
        defines: Macros, ``NAME`` or ``NAME=VALUE``.

    Raises:
        BuildError: There is no compiler, it refused, or there is nowhere to write.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C compiler is on the path ({', '.join(COMPILERS)})")
    path = Path(__file__).with_name(source)
    stat = Path(compiler).resolve().stat()
    code = tuple([file.read_text() for file in (path, *sorted(path.parent.glob("*.h")))])
    parts = (code, defines, OPTIONS, compiler, stat.st_size, stat.st_mtime_ns, _processor())
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
    try:
        folder = _folder()
        target = folder / f"{path.stem}-{name}.so"
        if not target.exists():
            _compile(compiler, path, defines, target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(f"cannot keep or load a library: {error}") from error


def _compile(compiler: str, path: Path, defines: tuple[str, ...], target: Path) -> None:
    handle, part = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    macros = [f"-D{define}" for define in defines]
    said = ""
    try:
        for options in OPTIONS:
            command = [compiler, "-O3", "-std=gnu11", "-shared", "-fPIC", *options, *macros]
            try:
                done = subprocess.run(
                    [*command, "-o", part, str(path), "-lm"],
                    capture_output=True,
                    text=True,
                    timeout=COMPILE_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                said = f"{compiler} took more than {COMPILE_S:.0f} s"
                break
            if done.returncode == 0:
                Path(part).replace(target)
                return
            said = next(iter(done.stderr.strip().splitlines()), f"exit {done.returncode}")
    finally:
        Path(part).unlink(missing_ok=True)
    raise BuildError(f"{compiler} did not compile {path.name}: {said}")


def _folder() -> Path:
    """The user's cache folder, or one that lives as long as this process."""
    try:
        folder = Path.home() / ".cache" / "cplayers"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Code is loaded from it: nobody else may be able to put any there.
        stat = folder.stat()
        own = stat.st_uid == os.getuid() and not stat.st_mode & 0o022
        if own and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return _own_folder()


@cache
def _own_folder() -> Path:
    import atexit

    folder = tempfile.mkdtemp(prefix="cplayers-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _processor() -> str:
    """What code for this processor may use; a home folder may be shared by several kinds."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() + platform.machine()
    lines = info.read_text().splitlines()
    return platform.machine() + next((x for x in lines if x.startswith(("flags", "Features"))), "")

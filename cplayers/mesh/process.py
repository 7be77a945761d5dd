"""Names of operating system processes, and whether they still live."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple


class ProcessId(NamedTuple):
    """A process, told apart from others with the same number: on other hosts, or later ones."""

    host: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> ProcessId:
        """This process."""
        return cls(_host(), os.getpid(), _started_and_alive(os.getpid()) or "")

    def is_gone(self) -> bool:
        """Whether it is known to have ended; False for a process of another host."""
        return self.host == _host() and _started_and_alive(self.pid) != self.started

    def is_alive(self) -> bool:
        """Whether it is known to live; False for a process of another host."""
        return bool(self.started) and self.host == _host() and not self.is_gone()


def _host() -> str:
    """This host; containers that share a host name differ in their namespace of processes."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{namespace.readlink() if namespace.is_symlink() else ''}"


def _started_and_alive(pid: int) -> str | None:
    """Start time of a live process; "" where the system has no /proc; None for an ended one."""
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        # The name in brackets may hold blanks and brackets itself; state is the first field after.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]

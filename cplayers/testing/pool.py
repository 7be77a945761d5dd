"""Live ranks that are started once and run functions again and again.

The first rank costs seconds, for a server that has imported torch; further ranks are forked from
it in a tenth of one. A call costs milliseconds: draw examples in the parent and send them.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

from cplayers.errors import ConfigError, StateError
from cplayers.testing.rank import Call, Outcome, by_value, serve

START_S = 120.0
"""How long a rank may take to start."""
GRACE_S = 10.0
"""How long the other ranks may take to end by themselves once one has failed."""


class RankPoolError(RuntimeError):
    """A call failed on some ranks; the message names them and holds their tracebacks."""


class _Rank(NamedTuple):
    process: ForkServerProcess
    connection: Connection
    stack_file: Path


class RankPool:
    """``world_size`` processes on this machine (gloo, file rendezvous, one thread each).

    Use it as a context manager, or ``close`` it; it also ends with the interpreter.

    Args:
        world_size: How many ranks to start.
        timeout: Seconds that a call may take.
    """

    def __init__(self, world_size: int, timeout: float = 120.0) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(
                f"world_size={world_size!r}", "a pool has at least one rank", "pass 1 or more"
            )
        self.world_size = world_size
        self.timeout = timeout
        self._directory = Path(tempfile.mkdtemp(prefix="cplayers-ranks-"))
        self._ranks: dict[int, _Rank] = {}
        self._groups_made = 0
        self._rendezvous: tuple[int, str] | None = None
        self._finalizer = weakref.finalize(self, _end, self._ranks, self._directory)
        self._start_missing()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        n: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on the first ``n`` ranks.

        Inside, torch.distributed is initialised with exactly n ranks; with n=1 it is not
        initialised. Everything travels by value.

        Args:
            fn: A function that can be pickled: one of a module, or a partial of one.
            args: Its positional arguments, alike on all ranks.
            n: How many ranks; all of them by default.
            timeout: Seconds that this call may take, instead of the pool's.
            kwargs: Its keyword arguments.

        Returns:
            What each rank returned, by rank.

        Raises:
            RankPoolError: Some ranks raised, died or missed the deadline. They are replaced.
            Exception: All ranks raised this same type.
        """
        n = self.world_size if n is None else n
        if not 1 <= n <= self.world_size:
            raise ConfigError(
                f"n={n}", f"this pool has {self.world_size} ranks", f"pass 1 to {self.world_size}"
            )
        if not self._finalizer.alive:
            raise StateError("this pool is closed; make a new one")
        self._start_missing()
        work = by_value((fn, args, kwargs))
        call = by_value(Call(n, self._rendezvous_of(n), sys.path, work))
        try:
            for rank in range(n):
                with suppress(BrokenPipeError):  # of a rank that has just died: found below
                    self._ranks[rank].connection.send_bytes(call)
            outcomes = self._collect(n, self.timeout if timeout is None else timeout)
        except BaseException:
            # Late answers must not be taken for those of the next call.
            self._drop(n)
            raise
        lost = {rank: self._describe_lost(rank) for rank in range(n) if rank not in outcomes}
        in_step = {outcome.in_step for outcome in outcomes.values()}
        if lost or "no" in in_step or len(in_step) > 1:
            self._drop(n)
        if not lost and not any(outcome.error_type for outcome in outcomes.values()):
            return [outcomes[rank].value for rank in range(n)]
        raise _failure(outcomes, lost)

    def close(self) -> None:
        """End all ranks. Closing twice is allowed."""
        self._finalizer()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start_missing(self) -> None:
        """Start the ranks that are not there, side by side, and wait until they can be called."""
        for rank in [r for r, at in self._ranks.items() if not at.process.is_alive()]:
            self._ranks.pop(rank).connection.close()
            self._rendezvous = None
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])
        missing = [rank for rank in range(self.world_size) if rank not in self._ranks]
        for rank in missing:
            ours, theirs = context.Pipe()
            stack_file = self._directory / f"stack-{rank}"
            process = context.Process(
                target=serve, args=(rank, theirs, str(stack_file)), daemon=True, name=f"rank{rank}"
            )
            process.start()
            theirs.close()
            self._ranks[rank] = _Rank(process, ours, stack_file)
        for rank in missing:
            connection = self._ranks[rank].connection
            try:
                if not connection.poll(START_S):
                    raise RankPoolError(f"rank {rank} did not start within {START_S:.0f} s")
                connection.recv_bytes()
            except EOFError:
                self._ranks.pop(rank).process.kill()
                raise RankPoolError(f"rank {rank} died while it started; see its output") from None

    def _rendezvous_of(self, n: int) -> str:
        """The rendezvous file of the current process group of size n, a new one if need be."""
        if self._rendezvous is None or self._rendezvous[0] != n:
            self._groups_made += 1
            self._rendezvous = n, str(self._directory / f"rendezvous-{self._groups_made}")
        return self._rendezvous[1]

    def _collect(self, n: int, timeout: float) -> dict[int, Outcome]:
        """Outcomes by rank; a rank that died or missed the deadline is absent."""
        deadline = time.monotonic() + timeout
        waiting = {self._ranks[rank].connection: rank for rank in range(n)}
        outcomes: dict[int, Outcome] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                with suppress(EOFError, ConnectionResetError):
                    outcomes[rank] = pickle.loads(connection.recv_bytes())
                if rank not in outcomes or outcomes[rank].error_type:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return outcomes

    def _describe_lost(self, rank: int) -> str:
        """Why there is no outcome: the exit code, or where the rank is while it runs late."""
        process, _, stack_file = self._ranks[rank]
        process.join(0.1)
        if process.exitcode is not None:
            cause = process.exitcode
            name = signal.Signals(-cause).name if cause < 0 else f"exit code {cause}"
            return f"died of {name}"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return f"did not answer in time; it was at\n{stack_file.read_text()}"

    def _drop(self, n: int) -> None:
        """End the ranks of a call; the next call starts new ones, in a new process group."""
        self._rendezvous = None
        ended = [self._ranks.pop(rank) for rank in range(n)]
        for rank in ended:
            rank.process.kill()
        for rank in ended:
            rank.process.join()
            rank.process.close()
            rank.connection.close()


def _failure(outcomes: dict[int, Outcome], lost: dict[int, str]) -> BaseException:
    """The exception to raise in the parent."""
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.error_type}
    first = failed[min(failed)] if failed else None
    alike = not lost and {outcome.error_type for outcome in outcomes.values()}
    if first and first.error is not None and alike == {first.error_type}:
        first.error.add_note(f"raised on ranks {sorted(failed)}; rank {min(failed)}:")
        first.error.add_note(first.traceback)
        return first.error
    # A rank that was stopped by another is a consequence, and so is one that waits for it.
    roots = {r: o.traceback for r, o in failed.items() if o.error_type != "RankFailedError"}
    dead = {rank: what for rank, what in lost.items() if what.startswith("died")}
    causes = (
        dict(sorted({**roots, **dead}.items())) or lost or {r: failed[r].traceback for r in failed}
    )
    others = sorted((failed.keys() | lost.keys()) - causes.keys())
    lines = [f"rank {rank}: {what}" for rank, what in causes.items()]
    if others:
        lines.append(f"ranks {others} failed in consequence")
    return RankPoolError("\n".join(lines))


def _end(ranks: dict[int, _Rank], directory: Path) -> None:
    for rank in ranks.values():
        rank.process.kill()
    for rank in ranks.values():
        rank.process.join()
        rank.connection.close()
    ranks.clear()
    shutil.rmtree(directory, ignore_errors=True)

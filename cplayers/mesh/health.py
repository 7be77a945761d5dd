"""A rank that raises or dies ends the others' waiting with an error that names it.

How: a wait is cut into slices. Between two slices a rank looks, in the store of the default process
group, for failure notes of the ranks it waits for, and whether their processes still live. A rank
that is stopped in this way posts a note of its own, with the same root, so that the news travels
from group to group. A rank that raises inside ``guard`` posts a note before it lets go.

An interrupted group is out of step for good: its next operation would pair with one that is still
pending elsewhere. So a rank that was stopped refuses all further collectives, and a rank that
raised first makes sure, before it goes on, that every peer raised as well. An exception that is
raised alike on all ranks is thus harmless, and one raised alone cannot be retried into wrong sums.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from cplayers.errors import ConfigError, RankFailedError
from cplayers.mesh.process import ProcessId

SLICE_S = 2.0
"""How long a rank waits before it looks for failures; a wait that succeeds is not delayed."""
WIRE_GRACE_S = 2.0
"""How long a broken connection may stay unexplained before the members of the group are named."""
SETTLE_S = 20.0
"""How long a rank that raised waits for the others to raise as well, before it goes on."""
MEET_S = 600.0
"""How long a rank waits for the others to build the same mesh."""


class Note(NamedTuple):
    """A failure as posted: which rank is at its root, and that rank's error."""

    serial: int
    root: int | None
    error: str
    state: str
    """raised by this rank itself; settled once all its peers raised too; stopped by another."""


class Health:
    """Failure notes and liveness of the ranks of the default process group.

    Args:
        rank: This rank.
        world_size: Ranks in the default process group.
        store: Its store.
        names: How errors name the ranks, where these are some of a larger group.
        processes: Processes by name, as far as they are known; meetings add to them.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        names: Sequence[int] | None = None,
        processes: dict[int, ProcessId] | None = None,
    ) -> None:
        self.rank = rank
        self._names = names or range(world_size)
        self._ranks = range(world_size)
        self._store = store
        self._meetings = 0
        self._processes = {} if processes is None else processes
        self._settled: dict[int, int] = {}
        self._serial = 0
        self._raised: Note | None = None
        self._stopped: RankFailedError | None = None

    @property
    def in_step(self) -> str:
        """The word yes; raised, after an exception that is not settled yet; no, once stopped."""
        return "no" if self._stopped else "raised" if self._raised else "yes"

    def wait(self, work: dist.Work, members: Sequence[int], what: str) -> None:
        """Finish ``work``, a collective named ``what`` among ``members``.

        Raises:
            RankFailedError: A member raised, died, or was itself stopped by a failing rank.
        """
        while True:
            try:
                work.wait(timedelta(seconds=SLICE_S))
                return
            except RuntimeError as error:
                ended, cause = work.is_completed(), error
            if ended:
                # The operation itself failed, or it ended well just after its slice ran out.
                self._finish(work, members, what)
                return
            # A slice that runs out leaves the operation running; waiting again picks it up.
            if not self._raise_if_failed(members, what):
                self.explain(members, what, cause)

    def ready(self, scope: Iterable[int]) -> None:
        """Make sure that this rank may start a step with the ranks of ``scope``.

        Raises:
            RankFailedError: This rank was stopped before, or raised where its peers did not.
        """
        if self._stopped is not None:
            raise RankFailedError(str(self._stopped), self._stopped.rank)
        if self._raised is not None:
            self._settle(self._raised, scope)

    def is_gone(self, rank: int) -> bool:
        """Whether the process of ``rank`` is known to have ended; it has met this one before."""
        process = self._processes.get(self._names[rank])
        return process is not None and process.is_gone()

    def leave(self, reason: str) -> None:
        """Refuse further collectives, and end the waiting of those who wait for this rank."""
        if self._stopped is None:
            self._stopped = RankFailedError(f"this group is not used any more: {reason}")
            self._post(None, reason, "stopped")

    @contextmanager
    def guard(self, scope: Iterable[int]) -> Iterator[None]:
        """Tell the other ranks when the block raises; settle an earlier failure on entry."""
        self.ready(scope)
        try:
            yield
        except BaseException as error:
            # Also KeyboardInterrupt and SystemExit: the others wait all the same.
            if self._raised is None and self._stopped is None:
                self._raised = self._post(self.rank, f"{type(error).__name__}: {error}", "raised")
            raise

    def meet(self, subject: str) -> None:
        """Wait until every rank is about to do ``subject``, and learn their processes.

        Raises:
            ConfigError: The ranks are about to do different things.
            RankFailedError: A rank failed, or did not come in ``MEET_S``.
        """
        self.ready(self._ranks)
        self._meetings += 1
        keys = [f"cplayers/meeting/{self._meetings}/{rank}" for rank in self._ranks]
        self._store.set(keys[self.rank], json.dumps([subject, ProcessId.current()]))
        deadline = time.monotonic() + MEET_S
        while not self._all_set(keys):
            self._raise_if_failed(self._ranks, subject)
            if time.monotonic() > deadline:
                absent = [rank for rank in self._ranks if not self._store.check([keys[rank]])]
                raise self._stop(
                    absent[0] if len(absent) == 1 else None,
                    f"ranks {absent} did not come within {MEET_S:.0f} s",
                    subject,
                )
        subjects = {}
        for rank in self._ranks:
            subjects[rank], process = json.loads(self._store.get(keys[rank]))
            self._processes[self._names[rank]] = ProcessId(*process)
        if len(set(subjects.values())) > 1:
            raise ConfigError(
                f"{subjects}", "all ranks build the same mesh", "pass equal degrees on every rank"
            )

    def _all_set(self, keys: list[str]) -> bool:
        """Whether all keys are set within a slice."""
        with suppress(RuntimeError):  # raised when the slice runs out
            self._store.wait(keys, timedelta(seconds=SLICE_S))
        return bool(self._store.check(keys))

    def _finish(self, work: dist.Work, members: Sequence[int], what: str) -> None:
        """Return if the work ended well, else explain why the wire broke."""
        try:
            work.wait()
        except RuntimeError as error:
            self.explain(members, what, error)

    def explain(self, members: Sequence[int], what: str, cause: RuntimeError) -> NoReturn:
        """Raise for a broken connection: who posted a note, who is gone, else who is left over."""
        deadline = time.monotonic() + WIRE_GRACE_S
        while time.monotonic() < deadline:
            self._raise_if_failed(members, what, cause)
            time.sleep(0.05)
        others = [rank for rank in members if rank != self.rank]
        root, names = others[0] if len(others) == 1 else None, [self._names[r] for r in others]
        reason = str(cause).splitlines()[0]
        raise self._stop(root, f"lost the connection to ranks {names}: {reason}", what) from cause

    def _raise_if_failed(
        self, members: Iterable[int], what: str, cause: RuntimeError | None = None
    ) -> bool:
        """Raise for a failure that can be named; else whether the store could be asked."""
        others = [rank for rank in members if rank != self.rank]
        reachable = True
        # Notes first: a rank that raised and then ended is better known by its error.
        for rank in others:
            try:
                note = self._read(rank)
            except RuntimeError:
                reachable = False
                break
            if note is None or note.state == "settled" or note.serial <= self._settled.get(rank, 0):
                continue
            raise self._stop(note.root, note.error, what) from cause
        # A store that is lost was served by a rank that is gone, most often 0, whoever waits here.
        for rank in others if reachable else self._ranks:
            if self.is_gone(rank):
                pid = self._processes[self._names[rank]].pid
                raise self._stop(rank, f"its process {pid} is gone", what) from cause
        return reachable

    def _stop(self, root: int | None, error: str, what: str) -> RankFailedError:
        """Mark the group as out of step, tell the peers, and make the error to raise."""
        name = None if root is None else self._names[root]
        who = "a rank" if name is None else f"rank {name}"
        self._stopped = RankFailedError(
            f"{who} failed while rank {self._names[self.rank]} was waiting in {what}: {error}. "
            "Remedy: mend that failure, then start the process group anew; this one is out of step",
            name,
        )
        self._post(root, error, "stopped")
        return self._stopped

    def _settle(self, mine: Note, scope: Iterable[int]) -> None:
        """Wait until every rank of ``scope`` has raised too."""
        what = f"a new step after it raised {mine.error}"
        pending = {rank for rank in scope if rank != self.rank}
        deadline = time.monotonic() + SETTLE_S
        while True:
            for rank in sorted(pending):
                note = self._read(rank)
                if note is not None and note.state == "stopped":
                    raise self._stop(note.root, note.error, what)
                # Ranks in step raise equally often; one that is ahead may have raised again.
                if note is None or note.serial < mine.serial:
                    continue
                self._settled[rank] = mine.serial
                pending.discard(rank)
            if not pending:
                break
            if time.monotonic() > deadline:
                alone = f"{mine.error} was raised there, but not on ranks {sorted(pending)}"
                raise self._stop(self.rank, alone, what)
            time.sleep(0.01)
        self._raised = None
        self._write(mine._replace(state="settled"))

    def _post(self, root: int | None, error: str, state: str) -> Note:
        self._serial += 1
        note = Note(self._serial, root, error, state)
        self._write(note)
        return note

    def _write(self, note: Note) -> None:
        # Where the rank that serves the store has died, the connections to it tell the others.
        with suppress(RuntimeError):
            self._store.set(f"cplayers/failure/{self.rank}", json.dumps(note))

    def _read(self, rank: int) -> Note | None:
        key = f"cplayers/failure/{rank}"
        return Note(*json.loads(self._store.get(key))) if self._store.check([key]) else None

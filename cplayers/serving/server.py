"""Dynamic context parallelism: a server on N replicas that share contexts only where it pays.

    every rank      say what its groups computed, how many blocks are used, what time it is
    every rank      the same decisions from the same numbers (`Scheduler`)        an agreed point
    every rank      requests that change group are handed over, all at once
    its groups      the largest first: some steps each, talking only inside the group
    ... and again

A rank is in one group of every size, which share its KV budget. Groups that work on different
requests wait for each other only at the agreed points, and there for some steps at most, because a
step has a bounded number of prompt tokens.

When a rank dies, those that live find each other, rebuild the groups, and agree on how far each
request had come (`cplayers.serving.recovery`). What was only in the lost memory is computed again
from its tokens, which every rank knows.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from cplayers.errors import RankFailedError, StateError
from cplayers.mesh import CPMesh, Topology, gather_bytes, meshes_over
from cplayers.serving.book import Round
from cplayers.serving.config import ServingConfig
from cplayers.serving.fit import require_replicas, require_requests
from cplayers.serving.fleet import Fleet
from cplayers.serving.handover import Passage, hand_over
from cplayers.serving.recovery import TRIES, Past, hold, is_loss, settle
from cplayers.serving.requests import Progress, Replicas, Request
from cplayers.serving.runner import Runner
from cplayers.serving.scheduler import Scheduler
from cplayers.serving.served import ServedModel

IDLE_S = 0.005
"""How long a rank without work sleeps before the next agreed point."""


class Server:
    """One rank of a server; all ranks make it alike, and call `run` alike.

    Args:
        model: The model of this rank's replica.
        config: Settings.
        num_replicas: Replicas.
        ranks_per_replica: Ranks of one replica (tp).
        dcp_per_replica: Ranks of one replica that share a sequence (dcp / pcp).

    Attributes:
        scheduler: The requests and the decisions about them.
        trace: Settings, decisions and use of memory, as plain values; alike on all ranks.
        runners: This rank's groups.
        council: The mesh of all ranks that live.

    Raises:
        ConfigError: If the groups cannot be formed, or the model is not cut as a replica is;
            before anything is built.
    """

    def __init__(
        self,
        model: ServedModel,
        config: ServingConfig,
        *,
        num_replicas: int,
        ranks_per_replica: int = 1,
        dcp_per_replica: int = 1,
    ) -> None:
        fleet = Fleet(num_replicas, ranks_per_replica, config.sizes)
        require_replicas(model, fleet, dcp_per_replica)
        self.model, self.config, self._dcp = model, config, dcp_per_replica
        self.scheduler = Scheduler(config, fleet, dcp_per_replica)
        self.runners: dict[Replicas, Runner] = {}
        self._past = Past(fleet.ranks(fleet.replicas))
        self._arrivals: list[Request] = []
        self._began = time.monotonic()
        self._digest = self._digested = 0  # of the decisions so far, and of how many
        layout = self.scheduler.router.layout(1)
        self._slots = model.new_cache(layout, config.num_blocks, CPMesh(Topology()))
        self._seat(*self._open(fleet))

    @property
    def fleet(self) -> Fleet:
        """The groups that there are."""
        return self.scheduler.router.fleet

    @property
    def live(self) -> tuple[int, ...]:
        """Global ranks that live, ascending."""
        return self.fleet.ranks(self.fleet.replicas)

    @property
    def rank(self) -> int:
        """This global rank."""
        return self._rank

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV storage on this rank, which all its groups share."""
        return self._slots.nbytes

    @property
    def trace(self) -> list[dict[str, Any]]:
        """See the class."""
        config = {"event": "config", "replicas": self.fleet.num_replicas, **asdict(self.config)}
        return [config, *self.scheduler.decisions]

    def run(self, requests: Iterable[Request]) -> list[Progress]:
        """Serve requests to their end.

        Args:
            requests: Each is taken in once its arrival has come, by the clock that is furthest
                ahead; alike on all ranks.

        Returns:
            The requests as they ended, in the order given: tokens, times, groups, refusals.

        Raises:
            ConfigError: If two requests have one name, or the model does not know a token; before
                anything is served.
        """
        given = list(requests)
        require_requests(self.model, given, self.scheduler.requests)
        if not self.scheduler.requests:
            self._began = time.monotonic()
        self._arrivals += sorted(given, key=lambda request: request.arrival)
        with self._past.leaving():
            goes_on = True
            while goes_on:
                try:
                    with self.council.guard():
                        self._serve()
                except RankFailedError as error:
                    self._go_on(error)
                goes_on = bool(self._arrivals or self.scheduler.unfinished)
        self.model.restore()
        return [self.scheduler.requests[request.name] for request in given]

    def clock(self) -> float:
        """Seconds after the start on this rank."""
        return time.monotonic() - self._began

    def _serve(self) -> None:
        """From one agreed point to the next; at the end of all requests there is nothing to do."""
        self._past.stay()
        result = self._absorb(gather_bytes(self.council, self._report(), "pcp"))
        self._execute(result)
        if not self.scheduler.placed and self._arrivals:
            time.sleep(IDLE_S)

    def _report(self) -> bytes:
        """What this rank has to say; of each group, its first rank speaks."""
        used, progress, spent = 0, dict[str, Any](), list[Any]()
        for runner in self.runners.values():
            used |= runner.cache.pool.used_mask
            if self.fleet.ranks(runner.group)[0] == self.rank:
                progress |= runner.report()
                spent += [[runner.group, runner.spent]] if runner.spent else []
        for entry in self.scheduler.decisions[self._digested :]:
            self._digest = zlib.crc32(json.dumps(entry).encode(), self._digest)
        self._digested = len(self.scheduler.decisions)
        said = {
            "now": self.clock(),
            "used": hex(used),
            "progress": progress,
            "spent": spent,
            "digest": self._digest,
        }
        return json.dumps(said).encode()

    def _absorb(self, said: Sequence[bytes]) -> Round:
        """Take in what every rank said at an agreed point, in their order, and decide."""
        self._past.add(said)
        reports = [json.loads(text) for text in said]
        if len({report["digest"] for report in reports}) > 1:
            raise StateError(f"ranks disagree on the decisions before point {self._past.point}")
        now = max(max(report["now"] for report in reports), self.scheduler.now)
        for report in reports:
            for name, (cached, new, times) in report["progress"].items():
                self.scheduler.advance(name, cached, new, times)
        for runner in self.runners.values():
            runner.reported()
        while self._arrivals and self._arrivals[0].arrival <= now:
            self.scheduler.submit(self._arrivals.pop(0), now)
        masks = dict(zip(self.live, (int(report["used"], 16) for report in reports), strict=True))
        used = {replica: masks[self.fleet.ranks((replica,))[0]] for replica in self.fleet.replicas}
        spent = {tuple(group): took for report in reports for group, took in report["spent"]}
        return self.scheduler.decide(now, used, spent)

    def _execute(self, result: Round) -> None:
        for group, runner in self.runners.items():
            runner.cache.pool.lend(result.lend.get(group, ()))
        for name, group in result.evict:
            if group in self.runners:
                self.runners[group].leave(name)
        self._hand_over(result.move)
        for name, group in result.admit:
            if group in self.runners:
                self.runners[group].join(self.scheduler.requests[name])
        until = self.clock() + result.lasts
        for group, runner in self.runners.items():  # the largest first, on every rank
            if group not in result.resting:
                with runner.mesh.guard():  # its members wait for each other, not in the council
                    runner.run(result.stalled, result.extra.get(group, 0), until)

    def _hand_over(self, moves: Sequence[tuple[str, Replicas, Replicas]]) -> None:
        if not moves:
            return
        head, passages = self.model.first_head, []
        for name, *groups in moves:
            runners = [self.runners.get(group) for group in groups]
            source, target = (None if each is None else each.cache for each in runners)
            passages.append(Passage(name, source, target, head, head))
        hand_over(self.council, "pcp", passages)
        for name, source_group, target_group in moves:
            if source_group in self.runners:
                self.runners[source_group].leave(name)
            if target_group in self.runners:
                self.runners[target_group].join(self.scheduler.requests[name])

    # Groups, and what is left of them after a failure

    def _open(self, fleet: Fleet) -> tuple[CPMesh, dict[Replicas, CPMesh]]:
        """Meshes of a fleet: of all ranks that live, and of each group that this one is in."""
        groups, live = fleet.groups, fleet.ranks(fleet.replicas)
        shapes = [(live, Topology(pcp=len(live)))]
        for group in groups:
            size = len(group)
            shape = Topology(tp=fleet.ranks_per_replica, pcp=size, dcp=size * self._dcp)
            shapes.append((fleet.ranks(group), shape))
        meshes = meshes_over(shapes, self.model.device.type, generation=self._past.generation)
        council, *others = meshes
        assert council is not None
        mine = zip(groups, others, strict=True)
        return council, {group: mesh for group, mesh in mine if mesh is not None}

    def _seat(self, council: CPMesh, meshes: dict[Replicas, CPMesh]) -> None:
        """Use these meshes; groups that were there before keep their caches and requests."""
        before, self.runners, self.council = self.runners, {}, council
        self._rank = self.live[council.rank("pcp")]
        for group, mesh in meshes.items():
            if group in before:
                self.runners[group] = before[group]
                before[group].mesh = mesh
                continue
            cache = self.model.new_cache(self.scheduler.router.layout(len(group)), 1, mesh)
            cache.share_slots(self._slots)
            runner = Runner(group, mesh, cache, self.model, self.config, self.clock)
            self.runners[group] = runner

    def _go_on(self, error: RankFailedError) -> None:
        """Recover from a failure, and again where another rank fails meanwhile."""
        vain, done = 0, False
        while not done:
            before = self._past.ranks
            try:
                self._recover()
                done = True
            except RankFailedError as another:
                if another.rank == self.rank:  # left behind
                    raise
                error = another
                vain = vain + 1 if self._past.ranks == before else 0
            if max(vain, self._past.vain) > TRIES:
                raise error

    def _recover(self) -> None:
        """See `cplayers.serving.recovery`."""
        left = self._past.regroup()
        fleet = self.fleet.without(set(self.live) - set(left))
        if self.rank not in fleet.ranks(fleet.replicas):
            raise RankFailedError(
                f"rank {self.rank} is left of a replica that lost others. Remedy: end it",
                self.rank,
            )
        council, meshes = self._open(fleet)
        with council.guard():
            missed = self._past.catch_up(council)
            if missed is not None:
                self._take_in(missed)
            held = {
                group: self.runners[group].report() for group in meshes if group in self.runners
            }
            self._take_in(gather_bytes(council, hold(fleet, held), "pcp"))
        self._seat(council, meshes)

    def _take_in(self, said: Sequence[bytes]) -> None:
        """Go past an agreed point: of a round, which is not carried out any more, or of a loss."""
        if is_loss(said):
            self._past.add(said)
            settle(said, self.scheduler, self.runners)
        else:
            self._absorb(said)

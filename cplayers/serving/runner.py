"""One rank's part in one group: its cache, and the steps of the requests that it holds.

All members of a group run the same code on the same requests, so they agree on every step without
talking, and talk only inside the model. Nothing here knows of other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from cplayers.cache import PagedKVCache
from cplayers.mesh import CPMesh
from cplayers.serving.config import ServingConfig
from cplayers.serving.requests import Progress, Replicas, Request
from cplayers.serving.served import ServedModel


@dataclass
class Resident:
    """A request in this group.

    Attributes:
        request: What was asked for.
        new: Tokens generated so far.
        times: When those were generated that the other ranks do not know of yet.
        unknown: How many of ``new`` the other ranks do not know of yet.
    """

    request: Request
    new: list[int]
    times: list[float] = field(default_factory=list)
    unknown: int = 0

    @property
    def length(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.prompt) + len(self.new)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids ``start..stop``."""
        prompt = self.request.prompt
        first = list(prompt[start:stop])
        return first + self.new[max(0, start - len(prompt)) : max(0, stop - len(prompt))]


class Runner:
    """A group as seen by one of its ranks.

    Args:
        group: Its replicas.
        mesh: Its ranks.
        cache: This rank's cache.
        model: The model.
        config: Settings.
        clock: Seconds after the start.

    Attributes:
        residents: The requests, by name.
        spent: Seconds of the steps that it made at least since the last agreed point.
    """

    def __init__(
        self,
        group: Replicas,
        mesh: CPMesh,
        cache: PagedKVCache,
        model: ServedModel,
        config: ServingConfig,
        clock: Callable[[], float],
    ) -> None:
        self.group, self.mesh, self.cache = group, mesh, cache
        self._model, self._config, self._clock = model, config, clock
        self.residents: dict[str, Resident] = {}
        self.spent = 0.0

    def join(self, progress: Progress) -> None:
        """Take in a request; its cache entry exists if it was moved here.

        Args:
            progress: As the ranks know it.
        """
        request = progress.request
        self.residents[request.name] = Resident(request, list(progress.new))
        if request.name not in self.cache.seqs:
            self.cache.add(request.name)

    def leave(self, name: str) -> None:
        """Give a request's blocks back."""
        del self.residents[name]
        self.cache.free(name)

    def run(self, stalled: Collection[str], extra: int = 0, until: float = 0.0) -> None:
        """Make the steps until the next agreed point, or fewer if there is nothing left to do.

        Args:
            stalled: Requests that make no step.
            extra: Steps that may follow, which decode only. Above 0 on groups of one rank only:
                others would have to agree on the time.
            until: The time at which no further one of those begins, in seconds after the start.
        """
        began = self._clock()
        for _ in range(self._config.steps_of(len(self.group))):
            batch = self._batch(stalled)
            if not batch:
                break
            self._step(batch)
        self.spent += self._clock() - began
        for _ in range(extra):
            batch = self._batch(stalled, prompts=False)
            if not batch or self._clock() >= until:
                return
            self._step(batch)

    def _batch(self, stalled: Collection[str], prompts: bool = True) -> list[tuple[Resident, int]]:
        """The requests of a step with their new tokens; without ``prompts``, those that decode.

        All that decode, one token each. Of what a step computes of prompts, the request that has
        been here longest gets up to a half, and the shortest rests come first with what is left:
        so a long prompt moves on, and short ones do not wait for its end.
        """
        steps = [
            (each, each.length - self.cache.length(name))
            for name, each in self.residents.items()
            if name not in stalled and not each.request.is_over(each.new)
        ]
        batch = [(each, 1) for each, left in steps if left == 1]
        rests = [(each, left) for each, left in steps if prompts and left > 1]
        budget = self._config.chunk_of(len(self.group))
        first = min(rests[0][1], -(-budget // 2)) if rests else 0
        budget -= first
        for each, left in sorted(rests, key=lambda pair: pair[1]):
            count = first if each is rests[0][0] else 0
            count += min(left - count, budget)
            budget -= count if each is not rests[0][0] else count - first
            if count:
                batch.append((each, count))
        return batch

    def _step(self, batch: list[tuple[Resident, int]]) -> None:
        cache = self.cache
        starts = [cache.length(each.request.name) for each, _ in batch]
        packed: list[int] = []
        for (each, count), start in zip(batch, starts, strict=True):
            packed += each.tokens(start, start + count)
        plan = cache.plan([(each.request.name, count) for each, count in batch])
        tokens = torch.tensor(packed, device=self._model.device)
        logits = self._model.logits(tokens, plan, cache, self.mesh)
        chosen = logits.argmax(-1).tolist()
        cache.commit(plan)
        now = self._clock()
        for (each, count), start, token in zip(batch, starts, chosen, strict=True):
            if start + count == each.length:
                each.new.append(token)
                each.times.append(now)
                each.unknown += 1

    def report(self) -> dict[str, tuple[int, list[int], list[float]]]:
        """By request: cached tokens, and the tokens and times that the others do not know yet."""
        return {
            name: (
                self.cache.length(name),
                each.new[len(each.new) - each.unknown :],
                [round(t, 5) for t in each.times],
            )
            for name, each in self.residents.items()
        }

    def reported(self) -> None:
        """All ranks know of what there is now; requests that are over leave."""
        self.spent = 0.0
        for name, each in list(self.residents.items()):
            each.times, each.unknown = [], 0
            if each.request.is_over(each.new):
                self.leave(name)

    def restore(self, name: str, cached: int, new: list[int]) -> None:
        """Go back to where all members of the group were.

        Args:
            name: The request.
            cached: Tokens in the cache.
            new: Generated tokens, a prefix of those here.
        """
        self.cache.truncate(name, cached)
        resident = self.residents[name]
        resident.new, resident.times, resident.unknown = list(new), [], 0

"""How the ranks that live go on after one was lost.

1. regroup   all waiting ends, and they agree on who is left.
2. rebuild   process groups and meshes of what is left, anew, because old ones are out of step.
3. catch up  a rank may have died amid the exchange of an agreed point, which has then come to an
             end on some ranks only. Those tell the others what was said, so that all have taken the
             same decisions.
4. compare   every rank tells which requests it holds, and how far. A request is whole where every
             rank of a group that is left holds it; the ranks go back to where the one that is
             furthest behind is, which is one step at most. All other requests begin again.

Nothing but what was caught up changes before the last exchange has ended; so a rank that dies
meanwhile only makes the others begin with 1 again. What happens here is 3 and 4; see `Server`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cplayers.mesh import CPMesh, gather_bytes
from cplayers.serving.fleet import Fleet
from cplayers.serving.requests import Progress, Replicas

Report = dict[str, tuple[int, list[int], list[float]]]
"""By request: tokens in the cache, and what was generated since the last agreed point, and when."""


class Whole(NamedTuple):
    """A request that survived, and how far all ranks of its group had come.

    Attributes:
        group: Where it is.
        cached: Tokens in the cache.
        new: Tokens that were generated since the last agreed point.
        times: When.
    """

    group: Replicas
    cached: int
    new: list[int]
    times: list[float]


def catch_up(council: CPMesh, point: int, said: Sequence[bytes]) -> list[bytes] | None:
    """What was said at an agreed point that came to its end on other ranks, but not on this one.

    Args:
        council: The ranks that live.
        point: The last agreed point of this rank.
        said: What was said there.

    Returns:
        What was said at the next point, ``None`` where this rank knows of the last one.
    """
    mine = {"point": point, "said": [text.decode() for text in said]}
    told = [json.loads(text) for text in gather_bytes(council, json.dumps(mine).encode(), "pcp")]
    newest = max(told, key=lambda each: each["point"])
    if newest["point"] == point:
        return None
    return [text.encode() for text in newest["said"]]


def compare(
    council: CPMesh, fleet: Fleet, placed: Iterable[Progress], mine: Mapping[Replicas, Report]
) -> dict[str, Whole]:
    """Requests that every rank of some group holds.

    Args:
        council: The ranks that live.
        fleet: What is left.
        placed: Requests that a group should hold.
        mine: What this rank holds, by group.
    """
    text = json.dumps([[list(group), report] for group, report in mine.items()])
    told: list[Any] = [json.loads(each) for each in gather_bytes(council, text.encode(), "pcp")]
    held: dict[tuple[Replicas, int], Report] = {}
    for rank, reports in zip(fleet.ranks(fleet.replicas), told, strict=True):
        for group, report in reports:
            held[tuple(group), rank] = report
    found = {}
    for progress in placed:
        name, at = progress.request.name, progress.group
        # the group where it should be first: it may have been amid a move
        for group in sorted(fleet.groups, key=lambda group: group != at):
            shares = [held.get((group, rank), {}).get(name) for rank in fleet.ranks(group)]
            whole = [share for share in shares if share is not None]
            if len(whole) == len(shares):
                cached = min(share[0] for share in whole)
                _, new, times = min(whole, key=lambda share: len(share[1]))
                found[name] = Whole(group, cached, new, times)
                break
    return found

"""Which blocks each group may take until the next agreed point, and who goes without.

A group is lent as many blocks as its requests can fill in their steps. Where fewer are free on all
of its replicas, requests make no step this time, those that arrived last first: one that was to
join waits on, one that was to move in stays where it is, and one that is there already is marked
as cramped, so that the next point finds it another place. Blocks for steps beyond those that a
group makes at least are lent where there are enough. A group that rests is lent what moves in.
"""

from __future__ import annotations

from cplayers.serving.book import Book, Round
from cplayers.serving.requests import Progress, Replicas
from cplayers.serving.room import Room


def lend(book: Book, room: Room, result: Round) -> None:
    """Fill in ``result.lend``, and who is stalled.

    Args:
        book: The requests.
        room: Free blocks.
        result: The round, whose admissions and moves may be taken back.
    """
    for group in book.router.fleet.groups:
        there = room.common(group) + result.freed.get(group, 0)
        extra = book.router.extra(group)
        needs = _needs(book, group, result, extra)
        if sum(needs.values()) <= there:
            result.extra[group] = extra
        else:
            needs = _needs(book, group, result)
        while sum(needs.values()) > there:
            latest = [name for name, blocks in needs.items() if blocks][-1]
            _stall(book, book.requests[latest], group, result)
            del needs[latest]
        more = max(0, sum(needs.values()) - result.freed.get(group, 0))
        if more or book.running(group):
            result.lend[group] = room.lend(group, more)


def _needs(book: Book, group: Replicas, result: Round, extra: int = 0) -> dict[str, int]:
    """Blocks that each request of ``group`` can fill until the next agreed point, by arrival.

    Args:
        book: The requests.
        group: Whose.
        result: The round.
        extra: Steps that decode only, after the others.
    """
    moving = {name for name, _, _ in result.move}
    size, rests = len(group), group in result.resting
    needs = {}
    for progress in book.running(group):
        name = progress.request.name
        if name not in result.stalled:
            growth = 0 if rests else book.router.growth(progress, size, extra)
            held = 0 if name in moving else progress.cached
            after = book.router.blocks(size, progress.cached + growth)
            needs[name] = after - book.router.blocks(size, held)
    return needs


def _stall(book: Book, progress: Progress, group: Replicas, result: Round) -> None:
    """Let a request of ``group`` make no step."""
    name = progress.request.name
    if (name, group) in result.admit:
        result.admit.remove((name, group))
        book.log("postpone", progress, group=group, reason="blocks are short")
        book.place(progress, None)
        progress.history.pop()
        progress.waited += 1
        return
    source = next((source for moving, source, _ in result.move if moving == name), None)
    if source is None:
        progress.cramped = True
    else:
        result.move.remove((name, source, group))
        book.log("postpone", progress, group=source, source=group, reason="blocks are short")
        book.place(progress, source)
        progress.history.pop()
    result.stalled.add(name)

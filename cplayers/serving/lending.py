"""Which blocks each group may take until the next agreed point, and who goes without.

A group is lent as many blocks as its requests can fill in their steps. Where fewer are free on all
of its replicas, requests make no step this time, those that arrived last first: one that was to
join waits on, one that was to move in stays where it is, and one that is there already is marked
as cramped, so that the next point finds it another place.
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
        need = _need(book, group, result)
        while need - result.freed.get(group, 0) > room.common(group):
            _stall_latest(book, group, room, result)
            need = _need(book, group, result)
        more = max(0, need - result.freed.get(group, 0))
        if more or book.running(group):
            result.lend[group] = room.lend(group, more)


def _need(book: Book, group: Replicas, result: Round) -> int:
    """Blocks that the requests of ``group`` can fill until the next agreed point."""
    moving = {name for name, _, _ in result.move}
    size, blocks = len(group), 0
    for progress in book.running(group):
        if progress.request.name in result.stalled:
            continue
        after = progress.cached + book.router.growth(progress, size)
        held = 0 if progress.request.name in moving else progress.cached
        blocks += book.router.blocks(size, after) - book.router.blocks(size, held)
    return blocks


def _stall_latest(book: Book, group: Replicas, room: Room, result: Round) -> None:
    """Let the request of ``group`` that arrived last make no step."""
    steps = [p for p in book.running(group) if p.request.name not in result.stalled]
    progress: Progress = steps[-1]
    name = progress.request.name
    if (name, group) in result.admit:
        result.admit.remove((name, group))
        room.promise(group, -book.promised(progress, group))
        book.log("postpone", progress, group=group, reason="blocks are short")
        progress.group = None
        progress.history.pop()
        return
    source = next((source for moving, source, _ in result.move if moving == name), None)
    if source is None:
        progress.cramped = True
    else:
        result.move.remove((name, source, group))
        book.log("postpone", progress, group=source, source=group, reason="blocks are short")
        progress.group = source
        progress.history.pop()
    result.stalled.add(name)

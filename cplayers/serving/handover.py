"""Sequences from the caches of some ranks to those of others, over one axis that joins them all.

    say      every rank describes what it gives and takes           gather of some hundred bytes
    decide   which tokens go from whom to whom                       nothing: all know the same
    agree    whether all ranks can give and take that                all-reduce of one number
    send     exactly the tokens that change owner                    exchange
    verify   a checksum per block of the source                      exchange of 8 bytes each
    agree    whether all ranks have verified what came               all-reduce of one number
    take     write, and let the sequences count                      nothing

What is said of a sequence is some hundred bytes, and 36 for each hashed unit of its prompt. Until
the last line no cache has changed; a rank that refuses makes all of them refuse. A rank that gives
and takes keeps what it has: such tokens are copied from its one cache to its other. The giving
caches keep the sequences; free them afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from cplayers.cache import Landing, Move, PagedKVCache, ShardHeader, moves
from cplayers.cache.blocks import chain_hash
from cplayers.cache.header import require_fit, require_one_sequence
from cplayers.cache.landing import Arrival
from cplayers.cache.shard import checksum, require_checksum
from cplayers.errors import TransferError
from cplayers.mesh import CPMesh, exchange, gather_bytes


@dataclass(frozen=True)
class Passage:
    """One sequence on its way, as one rank sees it.

    Attributes:
        seq: Its name, in both caches and alike on all ranks.
        source: The cache that gives it, on ranks that have it.
        target: The cache that takes it, on ranks that are to have it.
        source_head: KV head of the model that is the first in ``source``.
        target_head: The same for ``target``.
        tokens: Token ids of its prompt, to keep it findable, see `PagedKVCache.import_blocks`;
            alike on all ranks that take it.
    """

    seq: Hashable
    source: PagedKVCache | None = None
    target: PagedKVCache | None = None
    source_head: int = 0
    target_head: int = 0
    tokens: Sequence[int] | None = None


@dataclass(frozen=True)
class Route:
    """How one sequence travels; alike on all ranks.

    Attributes:
        headers: What each giving rank has.
        moves: Who sends what to whom.
    """

    headers: dict[int, ShardHeader]
    moves: list[Move]

    def row_bytes(self, move: Move) -> int:
        """Bytes of a token in ``move``."""
        header = self.headers[move.source]
        itemsize: int = getattr(torch, header.dtype.removeprefix("torch.")).itemsize
        return header.num_layers * header.width(move.heads) * itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that change owner."""
        return sum(
            len(move.positions) * self.row_bytes(move)
            for move in self.moves
            if move.source != move.target
        )

    def blocks(self, move: Move) -> tuple[list[int], list[int]]:
        """The source's blocks that the rows of ``move`` are in, and how many are in each."""
        layout = self.headers[move.source].layout
        index = layout.local_index(move.positions) // layout.block_size
        ids, counts = torch.unique_consecutive(index, return_counts=True)
        return ids.tolist(), counts.tolist()


def hand_over(mesh: CPMesh, axis: str, passages: Sequence[Passage]) -> list[int]:
    """Copy sequences from the caches that give them to those that take them.

    Args:
        mesh: Ranks of which each gives, takes, does both or neither.
        axis: The axis over which they all talk.
        passages: The sequences, in the same order on all ranks of the axis.

    Returns:
        Bytes of each sequence that were sent from one rank to another.

    Raises:
        TransferError: If what came is not what was sent, or does not fit; on all ranks, and no
            cache has changed. A rank that refuses for another reason raises that error.
        RankFailedError: A rank failed.
    """
    n, here = mesh.size(axis), mesh.rank(axis)
    said = gather_bytes(mesh, _description(passages), axis)
    landings: dict[int, Landing] = {}
    refusals: list[Exception] = []  # see `PagedKVCache.import_blocks`
    arrivals: list[Arrival | None] = [None] * len(passages)
    try:  # whatever fails on a rank alone, the others learn of it: they wait for this one
        routes = _routes(said)
        for i, (passage, route) in enumerate(zip(passages, routes, strict=True)):
            if passage.target is not None and route.headers:
                landing = landings.setdefault(id(passage.target), Landing(passage.target))
                arrivals[i] = landing.expect(
                    passage.seq,
                    next(iter(route.headers.values())),
                    first_head=passage.target_head,
                    tokens=passage.tokens,
                )
        packed = _pack(here, n, mesh.device_type, passages, routes)
    except Exception as error:
        refusals.append(error)
    _agree(mesh, axis, passages, refusals)
    came = [exchange(mesh, parts, sizes, axis) for parts, sizes in packed]
    del packed  # what was sent, and below what came, is out of memory before caches are written
    try:
        _receive(here, routes, arrivals, *came)
    except Exception as error:  # of any kind, for the same reason
        refusals.append(error)
    _agree(mesh, axis, passages, refusals)
    del came
    for landing in landings.values():
        landing.commit()
    return [route.nbytes for route in routes]


def _agree(mesh: CPMesh, axis: str, passages: Sequence[Passage], refusals: list[Exception]) -> None:
    """Raise on all ranks if one refuses: there what it found, elsewhere that another did."""
    refused = torch.tensor([len(refusals)], dtype=torch.int32, device=mesh.device_type)
    if mesh.all_reduce(refused, axis, "max").item():
        if refusals:
            raise refusals.pop()
        raise TransferError(
            f"sequences {[passage.seq for passage in passages]}",
            "all ranks take them or none does, and another rank refuses",
            "see the error of that rank",
        )


def _description(passages: Sequence[Passage]) -> bytes:
    """What this rank gives and takes; why it cannot, e.g. where a sequence is unknown."""
    entries = []
    try:
        for passage in passages:
            give = take = None
            if passage.source is not None:
                give = passage.source.describe(passage.seq, first_head=passage.source_head)
            if passage.target is not None:
                take = passage.target.blank(first_head=passage.target_head)
            known = None if passage.tokens is None else chain_hash(b"", passage.tokens).hex()
            said = [None if each is None else each.to_json() for each in (give, take)]
            entries.append([_spelled(passage.seq), known, *said])
        return json.dumps(entries).encode()
    except Exception as error:  # the others wait for what this rank says, and refuse as it does
        return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


def _spelled(name: Hashable) -> str:
    """Text that is the same for equal names on all ranks; of a name that is not plain, its type."""
    if isinstance(name, tuple):
        return f"({', '.join(map(_spelled, name))})"
    plain = name is None or isinstance(name, str | bytes | int | float)
    return repr(name) if plain else type(name).__name__


def _require_alike(what: str, said: dict[int, str | None]) -> None:
    """Raise TransferError unless all ranks in ``said`` say the same."""
    if len(set(said.values())) > 1:
        raise TransferError(
            f"{what} {said} by rank",
            "all ranks name the same sequences in the same order, with the same tokens or none",
            "pass them alike; those that do not concern a rank without source and target",
        )


def _routes(descriptions: Sequence[bytes]) -> list[Route]:
    """The routes of all sequences, from what all ranks said; raises alike on all of them."""
    said = [json.loads(text) for text in descriptions]
    for rank, entries in enumerate(said):
        if isinstance(entries, dict):
            raise TransferError(
                f"rank {rank}: {entries['error']}", "a rank gives what it has", "name another"
            )
    if len({len(entries) for entries in said}) > 1:
        raise TransferError(
            f"{[len(entries) for entries in said]} sequences by rank",
            "all ranks name the same sequences in the same order",
            "pass those that do not concern a rank without source and target",
        )
    routes = []
    for entries in zip(*said, strict=True):
        _require_alike("sequences", {rank: entry[0] for rank, entry in enumerate(entries)})
        give, take = (
            {
                rank: ShardHeader.from_json(entry[side])
                for rank, entry in enumerate(entries)
                if entry[side] is not None
            }
            for side in (2, 3)
        )
        _require_alike("hashes of prompts", {rank: entries[rank][1] for rank in take})
        if not take:
            routes.append(Route({}, []))
            continue
        header = require_one_sequence(list(give.values()))
        for each, own in product(give.values(), take.values()):
            require_fit(each, own)
        sources = {rank: each.holding for rank, each in give.items()}
        targets = {rank: each.holding for rank, each in take.items()}
        routes.append(Route(give, moves(sources, targets, header.oldest, header.length)))
    return routes


def _mine(here: int, routes: Sequence[Route]) -> Iterator[tuple[int, Route, Move]]:
    """Moves that this rank takes part in, with the sequence that they belong to, in order."""
    for i, route in enumerate(routes):
        for move in route.moves:
            if here in (move.source, move.target):
                yield i, route, move


def _pack(
    here: int, n: int, device: str, passages: Sequence[Passage], routes: Sequence[Route]
) -> list[tuple[list[Tensor], list[int]]]:
    """Rows, and the checksums of their blocks, both as bytes: for each rank, and how many come."""
    rows: list[list[Tensor]] = [[] for _ in range(n)]
    sums: list[list[int]] = [[] for _ in range(n)]
    row_sizes, sum_sizes = [0] * n, [0] * n
    for i, route, move in _mine(here, routes):
        if move.target == here:
            row_sizes[move.source] += len(move.positions) * route.row_bytes(move)
            sum_sizes[move.source] += 8 * len(route.blocks(move)[0])
        if move.source == here:
            passage, header = passages[i], route.headers[here]
            assert passage.source is not None
            part = passage.source.rows_at(passage.seq, move.positions)
            part = header.select(part, move.heads).contiguous()
            rows[move.target].append(part.view(torch.uint8).flatten())
            digest, edge = header.digest(), 0
            for block, count in zip(*route.blocks(move), strict=True):
                sums[move.target].append(checksum(digest, block, part[edge : edge + count]))
                edge += count
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    parts = [torch.cat([empty, *pieces]) for pieces in rows]
    numbers = [torch.tensor(each, dtype=torch.int64).view(torch.uint8) for each in sums]
    return [(parts, row_sizes), ([each.to(empty.device) for each in numbers], sum_sizes)]


def _receive(
    here: int,
    routes: Sequence[Route],
    arrivals: Sequence[Arrival | None],
    rows: Sequence[Tensor],
    sums: Sequence[Tensor],
) -> None:
    """Verify what came and fill it in, beside the caches."""
    at = [0] * len(rows)
    # copied, so that the bytes are aligned for wider numbers
    numbers = [iter(each.clone().view(torch.int64).tolist()) for each in sums]
    for i, route, move in _mine(here, routes):
        if move.target != here:
            continue
        header, arrival = route.headers[move.source], arrivals[i]
        size = len(move.positions) * route.row_bytes(move)
        part = rows[move.source][at[move.source] : at[move.source] + size].clone()
        at[move.source] += size
        dtype: torch.dtype = getattr(torch, header.dtype.removeprefix("torch."))
        came = part.view(dtype).view(len(move.positions), header.num_layers, -1)
        digest, edge = header.digest(), 0
        for block, count in zip(*route.blocks(move), strict=True):
            piece = came[edge : edge + count]
            require_checksum(digest, block, piece, next(numbers[move.source]))
            edge += count
        assert arrival is not None
        arrival.fill(move.positions, move.heads, came)

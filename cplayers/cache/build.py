"""Builds a `StepPlan` from plain numbers: layout, block tables, lengths. No cache, no process group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cplayers.cache.layouts import InterleavedLayout, ZigzagLayout
from cplayers.cache.plan import Prefill, Shard, StepPlan, Writes
from cplayers.ops import Spans, spans, tile_rows


@dataclass(frozen=True)
class Request:
    """One sequence in a step: ``cached`` tokens before it, ``new`` tokens in it, all its blocks."""

    seq: Hashable
    cached: int
    new: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class RankView:
    """What distinguishes one rank's plan from another's."""

    layout: InterleavedLayout
    cp_rank: int
    pcp_rank: int
    pcp_size: int
    device: torch.device


def build_plan(requests: Sequence[Request], view: RankView, version: int) -> StepPlan:
    """The plan of one step on one rank. Everything rank-invariant is computed alike on all ranks."""
    starts = _offsets([request.new for request in requests])
    decode = [i for i, request in enumerate(requests) if request.cached]
    fresh = [i for i, request in enumerate(requests) if not request.cached]
    order = decode + fresh
    table = _block_table([requests[i].blocks for i in order])

    decode_rows = [torch.arange(requests[i].cached, requests[i].cached + requests[i].new) for i in decode]
    zigzags = [ZigzagLayout(view.pcp_size, requests[i].new) for i in fresh]
    shares = [
        [zigzag.positions(rank, zigzag.length) for zigzag in zigzags]
        for rank in range(view.pcp_size)
    ]
    own = decode_rows + shares[view.pcp_rank]
    num_decode = sum(len(rows) for rows in decode_rows)

    positions = _cat(own)
    row_slot = _repeat(range(len(order)), own)  # row of the block table for each row
    firsts = [starts[i] - requests[i].cached for i in order]
    tokens = positions + _repeat(firsts, own)
    lengths = [len(rows) for rows in own]

    def slots(pos: Tensor, row: Tensor) -> Tensor:
        if not len(pos):
            return pos
        return view.layout.slots(pos, table[row], view.cp_rank)

    decode_slots = slots(positions[:num_decode], row_slot[:num_decode])
    prefill = prefill_slots = None
    if fresh:
        prefill, pieces = _build_prefill(shares, zigzags, view)
        slot_rows = range(len(decode), len(order))
        prefill_slots = torch.full((len(pieces) * prefill.width,), -1)
        for rank, piece in enumerate(pieces):
            at = rank * prefill.width
            prefill_slots[at : at + len(piece)] = slots(piece, _repeat(slot_rows, shares[rank]))
    owner, index = _owners(requests, starts, decode, fresh, shares, num_decode)
    none = positions[:0]
    return StepPlan(
        seqs=tuple(request.seq for request in requests),
        cached=tuple(request.cached for request in requests),
        new=tuple(request.new for request in requests),
        positions=positions.to(view.device),
        tokens=tokens.to(view.device),
        cu_seqlens_q=torch.tensor(_offsets(lengths)).to(view.device),
        row_order=torch.tensor(order, dtype=torch.long),
        is_decode=(torch.arange(len(positions)) < num_decode).to(view.device),
        num_decode=num_decode,
        block_table=table.to(view.device),
        slot_mapping=torch.cat([decode_slots, none if prefill_slots is None else prefill_slots]).to(
            view.device
        ),
        spans=spans(positions, lambda n: view.layout.count_before(n, view.cp_rank)),
        prefill=prefill,
        owner=owner,
        index=index,
        decode_writes=Writes.of(decode_slots, view.device),
        prefill_writes=tuple(
            Writes.of(piece, view.device)
            for piece in ([] if prefill_slots is None else prefill_slots.chunk(view.pcp_size))
        ),
        version=version,
        _runs=_decode_runs([requests[i] for i in decode], view),
    )


def _build_prefill(
    shares: list[list[Tensor]], zigzags: list[ZigzagLayout], view: RankView
) -> tuple[Prefill, list[Tensor]]:
    """The prefill part, and the positions of each PCP rank's rows."""
    pieces = [_cat(share) for share in shares]
    own = shares[view.pcp_rank]
    shards = []
    for rank, share in enumerate(shares):
        offsets = _offsets([len(rows) for rows in share])
        parts = []
        for zigzag, rows, offset in zip(zigzags, own, offsets[:-1], strict=True):
            lo, hi = spans(rows, lambda n, z=zigzag, r=rank: z.count_before(n, r))
            parts.append(Spans(lo + offset, hi + offset))
        lo, hi = _cat([part.lo for part in parts]), _cat([part.hi for part in parts])
        shards.append(Shard(lo, hi, tile_rows(lo, hi)))
    counts = tuple(len(piece) for piece in pieces)
    return Prefill(counts, max(counts), tuple(shards)), pieces


def _owners(
    requests: Sequence[Request],
    starts: list[int],
    decode: list[int],
    fresh: list[int],
    shares: list[list[Tensor]],
    num_decode: int,
) -> tuple[Tensor, Tensor]:
    """For each packed token the PCP rank that computes it and its row there."""
    owner = torch.zeros(starts[-1], dtype=torch.long)
    index = torch.zeros(starts[-1], dtype=torch.long)
    row = 0
    for i in decode:
        new = requests[i].new
        index[starts[i] : starts[i] + new] = torch.arange(row, row + new)
        row += new
    for rank, share in enumerate(shares):
        row = num_decode
        for i, rows in zip(fresh, share, strict=True):
            owner[starts[i] + rows] = rank
            index[starts[i] + rows] = torch.arange(row, row + len(rows))
            row += len(rows)
    return owner, index


def _decode_runs(
    requests: list[Request], view: RankView
) -> tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]:
    """Per decode request its rows and the (first slot, length) of each run of its local shard."""
    size, row, result = view.layout.block_size, 0, []
    for request in requests:
        left = view.layout.count_before(request.cached + request.new, view.cp_rank)
        runs: list[tuple[int, int]] = []
        previous = -2
        for block in request.blocks:
            if left <= 0:
                break
            take = min(size, left)
            if block == previous + 1:
                slot, length = runs[-1]
                runs[-1] = slot, length + take
            else:
                runs.append((block * size, take))
            left -= take
            previous = block
        result.append((row, row + request.new, tuple(runs)))
        row += request.new
    return tuple(result)


def _block_table(tables: list[Sequence[int]]) -> Tensor:
    width = max((len(table) for table in tables), default=0)
    return torch.tensor(
        [[*table, *[-1] * (width - len(table))] for table in tables], dtype=torch.long
    ).reshape(len(tables), width)


def _offsets(lengths: Sequence[int]) -> list[int]:
    result = [0]
    for length in lengths:
        result.append(result[-1] + length)
    return result


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=torch.long)


def _repeat(values: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    counts = torch.tensor([len(part) for part in parts], dtype=torch.long)
    return torch.tensor(list(values), dtype=torch.long).repeat_interleave(counts)

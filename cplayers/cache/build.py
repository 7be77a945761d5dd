"""Builds a `StepPlan` from plain numbers: layout, block tables, lengths. It knows no cache.

The cost does not depend on the length of the context: of a sequence's blocks only those are looked
at into which the step may write.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cplayers.cache.context import Context, Source
from cplayers.cache.plan import StepPlan
from cplayers.cache.prefill import Chunks, Prefill, build_prefill
from cplayers.cache.sequences import Draft
from cplayers.cache.table_store import TableStore
from cplayers.cache.tables import Request
from cplayers.cache.view import RankView, Writes
from cplayers.cache.zigzag import PackedZigzag


def build_plan(
    draft: Draft,
    view: RankView,
    tables: TableStore,
    version: int,
    max_decode_tokens: int,
) -> StepPlan:
    """The plan of one step on one rank, from requests that are the same on all ranks."""
    requests = ordered = draft.requests
    counts, lengths = [r.new for r in requests], [r.cached for r in requests]
    num_new, starts = sum(counts), [0, *accumulate(counts)]
    chunks = [i for i, n in enumerate(counts) if n > max_decode_tokens or not lengths[i]]
    decode = order = list(range(len(requests)))
    if chunks:
        apart = set(chunks)
        decode = [i for i in order if i not in apart]
        order = decode + chunks
        ordered = tuple([requests[i] for i in order])
    table_rows = tables.load(ordered)
    num_decode = num_new - sum([counts[i] for i in chunks])

    # The step's tokens in the order decode, prefill: request, position, place in the packed batch.
    new, cached, first = torch.tensor([counts, lengths, starts[:-1]], dtype=torch.long)
    if chunks:
        new, cached, first = (t[torch.tensor(order)] for t in (new, cached, first))
    row_request, offset = _expand(new, num_new)
    positions = cached[row_request] + offset
    tokens = first[row_request] + offset
    slots = _slots(positions, row_request, table_rows, tables.host, view)
    decode_writes = Writes.of(slots[:num_decode], view.device)

    owner, index = torch.zeros_like(tokens), tokens  # of a step without prefill
    prefill: Prefill | None = None
    # one entry per PCP rank: shards are written where they arrive, never put together
    prefill_writes: tuple[Writes, ...] = ()
    if len(tokens) > num_decode:
        zigzag = PackedZigzag(
            view.pcp_size,
            new[len(decode) :],
            row_request[num_decode:] - len(decode),
            offset[num_decode:],
        )
        index = torch.empty_like(tokens)
        index[tokens[:num_decode]] = torch.arange(num_decode)
        index[tokens[num_decode:]] = num_decode + zigzag.row
        owner[tokens[num_decode:]] = zigzag.owner
        packed_positions, packed_slots = positions[num_decode:], slots[num_decode:]
        prefill_slots = zigzag.gathered(packed_slots, fill=-1)
        prefill_writes = tuple(
            Writes.of(piece, view.device) for piece in prefill_slots.chunk(view.pcp_size)
        )
        slots = torch.cat([slots[:num_decode], prefill_slots])
        rows = torch.cat([torch.arange(num_decode), num_decode + zigzag.piece(view.pcp_rank)])
        row_request, positions, tokens = row_request[rows], positions[rows], tokens[rows]
        context = _context(ordered, len(decode), row_request, positions[num_decode:], view)
        prefill = build_prefill(
            zigzag,
            context,
            view,
            Chunks(ordered[len(decode) :], table_rows[len(decode) :], tables.table),
            packed_positions,
            packed_slots,
        )
    return StepPlan(
        seqs=tuple([request.seq for request in requests]),
        cached=tuple(lengths),
        new=tuple(counts),
        positions=positions.to(view.device),
        tokens=tokens.to(view.device),
        num_decode=num_decode,
        slot_mapping=slots.to(view.device),
        prefill=prefill,
        owner=owner,
        index=index,
        decode_writes=decode_writes,
        prefill_writes=prefill_writes,
        version=version,
        decode_choices={},
        _view=view,
        _requests=ordered,
        _num_decoding=len(decode),
        _table=tables.table,
        _table_rows=tuple(table_rows),
        _order=tuple(order),
        _positions=positions,
        _row_request=row_request,
    )


def _expand(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For rows ``counts[i]`` times i: i, and how many rows of the same i come before."""
    row = torch.arange(len(counts))
    if total == len(counts) and bool((counts == 1).all()):  # the usual decode step, at a third
        return row, torch.zeros_like(row)
    row = row.repeat_interleave(counts)
    return row, torch.arange(total) - (counts.cumsum(0) - counts)[row]


def _context(
    requests: Sequence[Request], first: int, row_request: Tensor, positions: Tensor, view: RankView
) -> Context:
    """The cached tokens of the requests from index ``first`` on, whose rows come last."""
    counts = row_request.bincount(minlength=len(requests))[first:].tolist()
    sources, row1 = [], 0
    for request, rows in zip(requests[first:], counts, strict=True):
        row0, row1 = row1, row1 + rows
        if request.cached and request.new:
            sources.append(Source(request, request.cached, row0, row1))
    return Context(tuple(sources), view.layout, view.cp_rank, positions, view.device)


def _slots(
    positions: Tensor, row_request: Tensor, table_rows: list[int], table: Tensor, view: RankView
) -> Tensor:
    """Slot of each token on this rank, from the block tables."""
    start = torch.tensor(table_rows, dtype=torch.long) * table.shape[1]
    return view.layout.slots(positions, table.view(-1), view.cp_rank, start[row_request])

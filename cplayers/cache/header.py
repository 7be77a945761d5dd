"""What a shard says of itself: plain values from which everything about its shape follows.

The features of a token and layer are the spec's planes one after the other, head by head. A block
is one of the source's cache blocks, and only the slots that hold a token are in it: a sequence of
16 tokens on 4 ranks with interleave and block size 16 is one block on rank 0 and none elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from cplayers.cache.layouts import InterleavedLayout
from cplayers.cache.spec import Plane
from cplayers.cache.transfer import Holding
from cplayers.errors import ConfigError, TransferError

FORMAT = 1
"""Version of what a header says; others are refused."""
LARGEST = 2**40
"""Above any size, position or rank that a header may state."""
LARGEST_CYCLE = 2**62
"""Above the product of a layout's sizes, so that positions are int64 on every way to them."""
HASH_BYTES = 16
"""Of the hash of a prefix, see `cplayers.cache.blocks.chain_hash`."""


@dataclass(frozen=True)
class ShardHeader:
    """Description of a shard in plain values; everything about its shape follows from it.

    Attributes:
        spec: Name of the cache spec's class.
        planes: Its planes, with the heads of this rank.
        value_dim: Dimension of the values, which planes alone need not tell.
        dtype: Storage type, as torch names it.
        num_layers: Attention layers.
        layout: How the sequence is spread over its group.
        cp_rank: The rank's place in that group.
        first_head: KV head of the model that is the rank's first.
        model_heads: KV heads of the model, if the exporter said how many.
        length: Tokens of the sequence, all ranks together.
        oldest: Tokens before this position were forgotten.
        hashes: Of the whole units of known tokens, in hexadecimal.
    """

    spec: str
    planes: tuple[Plane, ...]
    value_dim: int
    dtype: str
    num_layers: int
    layout: InterleavedLayout
    cp_rank: int
    first_head: int
    model_heads: int | None
    length: int
    oldest: int
    hashes: tuple[str, ...]

    @property
    def num_heads(self) -> int:
        """Heads that can go to different ranks; 1 where the planes differ in theirs."""
        heads = {plane.heads for plane in self.planes}
        return heads.pop() if len(heads) == 1 else 1

    @property
    def holding(self) -> Holding:
        """The positions and heads of this shard."""
        heads = self.first_head, self.first_head + self.num_heads
        return Holding(self.layout, self.cp_rank, heads)

    @property
    def features(self) -> int:
        """Values of a token in one layer."""
        return sum(plane.heads * plane.dim for plane in self.planes)

    @property
    def start(self) -> int:
        """Local index of the first row."""
        return self.layout.count_before(self.oldest, self.cp_rank)

    @property
    def num_rows(self) -> int:
        """Tokens of this shard (T)."""
        return self.layout.count_before(self.length, self.cp_rank) - self.start

    @property
    def blocks(self) -> range:
        """Indices of its non-empty blocks in the sequence's block table."""
        size, stop = self.layout.block_size, self.start + self.num_rows
        return range(self.start // size, -(-stop // size) if self.num_rows else self.start // size)

    def block_rows(self, block: int) -> tuple[int, int]:
        """First row and last row + 1 of a block."""
        size = self.layout.block_size
        low, high = block * size - self.start, (block + 1) * size - self.start
        return max(0, low), min(self.num_rows, high)

    def to_json(self) -> str:
        """Text from which `from_json` makes an equal header."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ShardHeader:
        """Read what `to_json` wrote, or refuse it.

        Raises:
            TransferError: If a field is missing, of another type or out of range.
        """
        try:
            values = json.loads(text)
            if type(values) is not dict or values.pop("format", None) != FORMAT:
                raise ValueError(f"it is not of format {FORMAT}")
            if values.keys() != {field.name for field in fields(cls)}:
                raise ValueError(f"it has the fields {sorted(values)}")
            values["planes"] = tuple(Plane(**plane) for plane in values["planes"])
            values["layout"] = InterleavedLayout(**values["layout"])
            values["hashes"] = tuple(values["hashes"])
            header = cls(**values)
            header._check()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise TransferError(
                f"a header that cannot be read ({error})",
                "a shard says what it is, as export_blocks does",
                "export the sequence again",
            ) from error
        return header

    def _check(self) -> None:
        names = (self.spec, self.dtype, *(plane.name for plane in self.planes), *self.hashes)
        counts = (
            self.num_layers,
            self.value_dim,
            *(n for p in self.planes for n in (p.heads, p.dim)),
        )
        layout = (self.layout.cp_size, self.layout.interleave_size, self.layout.block_size)
        others = (self.cp_rank, self.first_head, self.length, self.oldest)
        if not all(type(name) is str for name in names) or not self.planes:
            raise ValueError("a name is not text, or there are no planes")
        if not all(type(n) is int and 1 <= n < LARGEST for n in (*counts, *layout)):
            raise ValueError("a size is not an int of at least 1")
        if not all(type(n) is int and 0 <= n < LARGEST for n in others):
            raise ValueError("a position, rank or head is not an int of at least 0")
        if math.prod(layout) >= LARGEST_CYCLE:
            raise ValueError("a layout repeats beyond any position")
        if self.cp_rank >= self.layout.cp_size or self.oldest > self.length:
            raise ValueError("a rank or position is out of range")
        if self.model_heads is not None and type(self.model_heads) is not int:
            raise ValueError("the number of KV heads is not an int")
        self.require_heads()
        if any(len(bytes.fromhex(text)) != HASH_BYTES for text in self.hashes):
            raise ValueError("a hash has another length")

    def require_heads(self) -> None:
        """Raise ConfigError unless the model has the heads that this says it is of."""
        low, high = self.holding.heads
        most = self.model_heads
        if low < 0 or (most is not None and not high <= most < LARGEST):
            raise ConfigError(
                f"first_head={low}, model_heads={most} for a rank with {high - low} KV heads",
                "heads are counted from 0 through those of all ranks",
                "pass those of the model, not those of this rank",
            )

    def digest(self) -> bytes:
        """Fingerprint that goes into the checksum of every block."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).digest()

    def select(self, rows: Tensor, heads: tuple[int, int]) -> Tensor:
        """Of rows `[T, layers, features]`, those features that are of the model's ``heads``."""
        if heads == self.holding.heads:
            return rows
        return rows[:, :, self.columns(heads).to(rows.device)]

    def width(self, heads: tuple[int, int]) -> int:
        """How many features those are."""
        if heads == self.holding.heads:
            return self.features
        return (heads[1] - heads[0]) * sum(plane.dim for plane in self.planes)

    def columns(self, heads: tuple[int, int]) -> Tensor:
        """Which these are, int64."""
        low, high = heads[0] - self.first_head, heads[1] - self.first_head
        parts, at = [], 0
        for plane in self.planes:
            parts.append(torch.arange(at + low * plane.dim, at + high * plane.dim))
            at += plane.heads * plane.dim
        return torch.cat(parts)


def require_one_sequence(headers: Sequence[ShardHeader]) -> ShardHeader:
    """The first of headers that describe shards of one sequence in one group.

    Raises:
        TransferError: If there are none, or they do not belong together.
    """
    if not headers:
        raise TransferError("no shards", "a sequence has at least one", "pass those of all ranks")
    names = ("spec", "dtype", "num_layers", "layout", "model_heads", "length", "oldest", "hashes")
    for name in names:
        values = {getattr(header, name) for header in headers}
        if len(values) > 1:
            raise TransferError(
                f"shards that differ in {name}: {sorted(map(str, values))[:4]}",
                "the shards of one import are of one sequence, exported at one time",
                "pass the shards of one export",
            )
    return headers[0]


def require_whole(headers: Sequence[ShardHeader]) -> None:
    """Raise unless shards of one sequence have, of every position, all KV heads.

    Which these are the shards say; otherwise those that any of them has. This does not depend on
    the rank that asks.

    Raises:
        TransferError: If some are missing.
    """
    heads: dict[int, set[tuple[int, int]]] = {}
    rows: dict[int, int] = {}
    for header in headers:
        heads.setdefault(header.cp_rank, set()).add(header.holding.heads)
        rows[header.cp_rank] = header.num_rows
    top = headers[0].model_heads
    if top is None:
        top = max(high for runs in heads.values() for _, high in runs)
    expected = headers[0].length - headers[0].oldest
    for cp_rank, runs in heads.items():
        reached = 0
        for low, high in sorted(runs):
            reached = max(reached, high) if low <= reached else reached
        expected -= rows[cp_rank] if reached == top else 0
    if expected:
        raise TransferError(
            f"shards of ranks {sorted(heads)} of {headers[0].layout.cp_size}",
            f"{expected} tokens of the sequence are, with KV heads 0 to {top - 1}, in none of them",
            "pass the shards of all ranks of the group that exported",
        )


def require_fit(header: ShardHeader, own: ShardHeader) -> None:
    """Raise TransferError unless shards like ``header`` can be stored as ``own`` describes."""
    for name in ("spec", "dtype", "num_layers"):
        theirs, ours = getattr(header, name), getattr(own, name)
        if theirs != ours:
            raise TransferError(
                f"a shard with {name}={theirs}",
                f"the cache that takes it has {name}={ours}",
                "send it to a cache of the same model",
            )
    divided = all(len({plane.heads for plane in each.planes}) == 1 for each in (header, own))
    shapes = [
        [(plane.name, 1 if divided else plane.heads, plane.dim) for plane in each.planes]
        for each in (header, own)
    ]
    if shapes[0] != shapes[1] or header.value_dim != own.value_dim:
        raise TransferError(
            f"a shard with planes {header.planes} and values of {header.value_dim} features",
            f"the cache that takes it stores {own.planes} with values of {own.value_dim}",
            "send it to a cache of the same model",
        )

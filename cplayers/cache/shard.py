"""What one rank exports of a sequence: its non-empty blocks, described and with a checksum each.

header      what the rows are: spec, dtype, layers, layout, rank, length        `ShardHeader`
rows        [T, layers, features], the rank's tokens in increasing position
checksums   [blocks], of the header, the block's index and its rows             int64
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from cplayers.cache.header import ShardHeader
from cplayers.errors import TransferError


@dataclass(frozen=True)
class BlockShard:
    """The exported blocks of one rank; see the module's text.

    Attributes:
        header: What the rows are.
        rows: `[T, layers, features]`.
        checksums: One per block, int64 `[blocks]`.
    """

    header: ShardHeader
    rows: Tensor
    checksums: Tensor

    @classmethod
    def of(cls, header: ShardHeader, rows: Tensor) -> BlockShard:
        """With the checksums of ``rows``."""
        digest = header.digest()
        sums = [
            checksum(digest, block, rows[slice(*header.block_rows(block))])
            for block in header.blocks
        ]
        return cls(header, rows, torch.tensor(sums, dtype=torch.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.numel() * self.rows.element_size()

    def require_shape(self) -> None:
        """Raise TransferError unless rows and checksums are as the header says."""
        header = self.header
        shape = (header.num_rows, header.num_layers, header.features)
        found = (tuple(self.rows.shape), str(self.rows.dtype))
        sums = (tuple(self.checksums.shape), self.checksums.dtype)
        if found != (shape, header.dtype) or sums != ((len(header.blocks),), torch.int64):
            raise TransferError(
                f"rows of shape {found[0]} in {found[1]} with {sums[0]} checksums",
                f"the header announces {shape} in {header.dtype} in {len(header.blocks)} blocks",
                "export the sequence again",
            )

    @property
    def heads(self) -> tuple[int, int]:
        """KV heads of the model, half-open."""
        return self.header.holding.heads

    def verified(self, needed: Tensor, everything: bool) -> tuple[Tensor, Tensor]:
        """A copy of the blocks in which a row is needed, verified.

        Args:
            needed: Which rows are, bool `[T]`.
            everything: Whether to take and verify all blocks instead.

        Returns:
            Their rows `[N, layers, features]`, and the index of each, int64 `[N]`.

        Raises:
            TransferError: If they are not what was exported.
        """
        header, size = self.header, self.header.layout.block_size
        block_of = (torch.arange(header.num_rows) + header.start) // size - header.blocks.start
        found = torch.arange(header.num_rows)
        if not everything:
            wanted = torch.zeros(len(header.blocks), dtype=torch.bool)
            wanted[block_of[needed]] = True
            found = wanted[block_of].nonzero()[:, 0]
        rows = self.rows[found.to(self.rows.device)]  # what is used is then what was verified
        digest, edge = header.digest(), 0
        ids, counts = torch.unique_consecutive(block_of[found], return_counts=True)
        for index, count in zip(ids.tolist(), counts.tolist(), strict=True):
            expected, block = int(self.checksums[index]), header.blocks[index]
            require_checksum(digest, block, rows[edge : edge + count], expected)
            edge += count
        return rows, found


def checksum(digest: bytes, block: int, rows: Tensor) -> int:
    """Checksum of the rows of a block as a signed 64-bit int.

    Args:
        digest: Of the header, so that rows cannot pass for those of another sequence or rank.
        block: Index of the block, so that blocks cannot change places.
        rows: `[T, ...]` on any device; they are hashed on the host.
    """
    found = hashlib.blake2b(digest + block.to_bytes(8, "little"), digest_size=8)
    flat = rows.detach().to("cpu").contiguous()
    size = flat.numel() * flat.element_size()
    if size:  # a view of the tensor's memory: torch's own needs numpy, and knows no bfloat16
        found.update((ctypes.c_ubyte * size).from_address(flat.data_ptr()))
    return int.from_bytes(found.digest(), "little", signed=True)


def require_checksum(digest: bytes, block: int, rows: Tensor, expected: int) -> None:
    """Raise TransferError unless `checksum` of these is ``expected``."""
    if checksum(digest, block, rows) != expected:
        raise TransferError(
            f"block {block} with another checksum",
            "the bytes that arrive are those that were exported",
            "send it again, or compute the sequence from its tokens",
        )

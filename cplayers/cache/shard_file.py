"""Shards as safetensors files, which hold numbers and text and can run nothing when they are read.

    save_shard(cache.export_blocks("a"), "a-0.safetensors")           # on each rank of a group
    cache.import_blocks("a", [load_shard(path) for path in paths])    # on each rank of another

A file has the tensors ``rows`` and ``checksums`` and the header as its metadata. It appears at once
and whole; after a loss of power it may be cut short, which reading refuses. Keys and values tell
what a user wrote: only the owner may read a file until its mode is changed. Reading maps it into
memory: a rank touches the blocks that it verifies, and no others.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import ModuleType

from cplayers.cache.header import ShardHeader
from cplayers.cache.shard import BlockShard
from cplayers.errors import ConfigError, TransferError

METADATA_KEY = "cplayers"
"""Under which a file's metadata hold the header."""


def save_shard(shard: BlockShard, path: str | os.PathLike[str]) -> None:
    """Write a shard to a file.

    Args:
        shard: What `PagedKVCache.export_blocks` returned.
        path: The file; one that exists is replaced, as is a link.

    Raises:
        ConfigError: If safetensors is not installed.
        OSError: If it cannot be written; a file that was there stays as it was.
    """
    _require_safetensors()
    from safetensors.torch import save_file

    target = Path(path)
    handle, name = tempfile.mkstemp(prefix=".shard-", dir=target.parent)
    os.close(handle)
    try:
        tensors = {"rows": shard.rows.cpu().contiguous(), "checksums": shard.checksums}
        save_file(tensors, name, metadata={METADATA_KEY: shard.header.to_json()})
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def load_shard(path: str | os.PathLike[str]) -> BlockShard:
    """Open a file that `save_shard` wrote. Rows are verified when they are imported.

    Args:
        path: The file.

    Raises:
        TransferError: If it is cut short, damaged where it says what it holds, or of another kind.
        ConfigError: If safetensors is not installed.
        OSError: If there is no such file.
    """
    safetensors = _require_safetensors()
    with open(path, "rb"):  # a missing file is no damaged one
        pass
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA_KEY, "")
            names = sorted(file.keys())
            if names != ["checksums", "rows"]:
                raise TransferError(
                    f"{path} with the tensors {names}",
                    "a shard has checksums and rows",
                    "pass a file that save_shard wrote",
                )
            shard = BlockShard(
                ShardHeader.from_json(text), file.get_tensor("rows"), file.get_tensor("checksums")
            )
    except safetensors.SafetensorError as error:
        raise TransferError(
            f"{path} ({error})", "a shard is a whole safetensors file", "send the file again"
        ) from error
    shard.require_shape()
    return shard


def _require_safetensors() -> ModuleType:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(
            "shards in files without safetensors",
            "they are safetensors files",
            "pip install safetensors numpy",
        ) from error
    return safetensors

"""Shards as files: what is read is what was written, and a damaged file is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transfer_cases
from safetensors.torch import load_file, save_file
from transfer_cases import Case, Side, check, fill, same, snapshot

from cplayers.cache import BlockShard, PagedKVCache, load_shard, save_shard
from cplayers.cache.header import ShardHeader
from cplayers.errors import TransferError

CASE = Case(Side((2, 2, 2), model_heads=0), Side((1, 4, 4), model_heads=0), 5, 0)
SALT = 0.25


def written(case: Case, folder: Path, dtype=torch.float64) -> list[Path]:
    """Files that the ranks of the source wrote."""
    paths = []
    for rank in range(case.source.ranks):
        cache = case.source.cache(rank, 80, dtype)
        cache.add("a")
        fill(cache, case.source, rank, "a", case.length, SALT)
        cache.forget("a", case.oldest)
        paths.append(folder / f"{rank}.safetensors")
        save_shard(cache.export_blocks("a", first_head=case.source.place(rank)[1]), paths[-1])
    return paths


def taken(case: Case, paths: list[Path], rank: int = 0) -> PagedKVCache:
    cache = case.target.cache(rank, 80)
    shards = [load_shard(path) for path in paths]
    cache.import_blocks("a", shards, first_head=case.target.place(rank)[1])
    return cache


@pytest.mark.parametrize("seed", range(8))
def test_any_layout_to_any_other_through_files(seed: int, tmp_path: Path) -> None:
    case = transfer_cases.draw(seed, most_tokens=40)
    paths = written(case, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(paths), "no temporary file is left"
    for rank in range(case.target.ranks):
        check(taken(case, paths, rank), case.target, rank, "a", case.oldest, SALT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_of_narrow_floats_travels(dtype: torch.dtype, tmp_path: Path) -> None:
    cache = CASE.source.cache(0, 20, dtype)
    cache.add("a")
    fill(cache, CASE.source, 0, "a", 3, SALT)
    shard = cache.export_blocks("a")
    save_shard(shard, tmp_path / "x")
    back = load_shard(tmp_path / "x")
    assert back.header == shard.header
    assert torch.equal(back.rows.view(torch.uint8), shard.rows.view(torch.uint8))
    assert torch.equal(back.checksums, shard.checksums)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return written(CASE, tmp_path_factory.mktemp("good"))


ALL = pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])


@ALL
def test_a_file_with_any_byte_changed_is_refused_or_says_the_same(
    step: int, good: list[Path], tmp_path: Path
) -> None:
    """Byte after byte of a small file; only padding and the writing of a header may change."""
    data, damaged = good[0].read_bytes(), tmp_path / "damaged"
    cache = CASE.target.cache(0, 20)
    before, refused = snapshot(cache), 0
    for at in range(0, len(data), step):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            cache.import_blocks("a", [load_shard(damaged), load_shard(good[1])])
        except TransferError:
            refused += 1
            assert same(before, snapshot(cache))
        else:
            check(cache, CASE.target, 0, "a", 0, SALT)
            cache.free("a")
            cache = CASE.target.cache(0, 20)
    assert refused > 0.95 * len(range(0, len(data), step))


@ALL
def test_a_file_cut_anywhere_is_refused(step: int, good: list[Path], tmp_path: Path) -> None:
    data, cut = good[0].read_bytes(), tmp_path / "cut"
    for length in range(0, len(data), step):
        cut.write_bytes(data[:length])
        with pytest.raises(TransferError):
            load_shard(cut)
    cut.write_bytes(data + b"more")
    with pytest.raises(TransferError):
        load_shard(cut)


def header_of(path: Path) -> dict:
    return json.loads(load_shard(path).header.to_json())


def rewritten(path: Path, target: Path, **changes) -> Path:
    """The same tensors under a header with some fields changed; ``None`` leaves one out."""
    values = {**header_of(path), **changes}
    for field in changes:
        if changes[field] is None:
            del values[field]
    text = json.dumps(values)
    save_file(load_file(path), target, metadata={"cplayers": text})
    return target


LAYOUT = {"cp_size": 2, "interleave_size": 2, "block_size": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "not of format 1"),
        ({"format": None}, "not of format 1"),
        ({"length": None}, "it has the fields"),
        ({"extra": 1}, "it has the fields"),
        ({"length": 5.0}, "position, rank or head"),
        ({"length": True}, "position, rank or head"),
        ({"length": -1}, "position, rank or head"),
        ({"length": 10**30}, "position, rank or head"),
        ({"length": 10**11}, "the header announces"),
        ({"length": "5"}, "position, rank or head"),
        ({"oldest": 6}, "out of range"),
        ({"model_heads": 0}, "model_heads=0"),
        ({"model_heads": 2**40}, "model_heads=1099511627776"),
        ({"model_heads": True}, "the number of KV heads"),
        ({"model_heads": "2"}, "the number of KV heads"),
        ({"value_dim": 0}, "a size"),
        ({"value_dim": None}, "it has the fields"),
        ({"cp_rank": 2}, "out of range"),
        ({"num_layers": 0}, "a size"),
        ({"layout": {**LAYOUT, "block_size": 0}}, "at least 1"),
        ({"layout": {**LAYOUT, "more": 1}}, "unexpected keyword"),
        ({"layout": 7}, "cannot be read"),
        ({"planes": []}, "no planes"),
        ({"planes": [{"name": "latent", "heads": 1, "dim": 70}]}, "the header announces"),
        ({"planes": [{"name": 5, "heads": 1, "dim": 7}]}, "not text"),
        ({"hashes": ["zz"]}, "cannot be read"),
        ({"hashes": ["00"]}, "another length"),
        ({"hashes": 5}, "cannot be read"),
        ({"layout": LAYOUT | {"cp_size": True}}, "cp_size is an int"),
        ({"layout": LAYOUT | {"block_size": 2**40}}, "a size is not an int"),
        ({"layout": LAYOUT | {"cp_size": 2**32, "interleave_size": 2**31}}, "beyond any position"),
        ({"dtype": "torch.float16"}, "the header announces"),
    ],
)
def test_a_header_that_cannot_be_is_refused(
    changes: dict, words: str, good: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(TransferError, match=words):
        load_shard(rewritten(good[0], tmp_path / "x", **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spec": "GQASpec"}, "spec=GQASpec"),
        ({"first_head": 1}, "another checksum|in none of them"),
        ({"hashes": ["00" * 16]}, "differ in hashes"),
    ],
)
def test_a_header_of_something_else_is_refused(
    changes: dict, words: str, good: list[Path], tmp_path: Path
) -> None:
    paths = [rewritten(good[0], tmp_path / "x", **changes), good[1]]
    if "spec" in changes:
        paths[1] = rewritten(good[1], tmp_path / "y", **changes)
    with pytest.raises(TransferError, match=words):
        taken(CASE, paths)


@pytest.mark.parametrize("text", ["[" * 200_000, "9" * 5_000, "", "[]", '"'])
def test_a_header_that_is_no_header_is_refused(text: str) -> None:
    with pytest.raises(TransferError, match="a header that cannot be read"):
        ShardHeader.from_json(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"cp_size": 2**39, "interleave_size": 2, "block_size": 2**20},
        {"cp_size": 2**20, "interleave_size": 2**39, "block_size": 2},
        {"cp_size": 3, "interleave_size": 1, "block_size": 2**39},
    ],
    ids=str,
)
def test_a_layout_of_any_size_within_bounds_is_only_arithmetic(changes: dict) -> None:
    """A rank of it that holds nothing of 5 tokens; the others are missing, and nothing breaks."""
    header = CASE.source.cache(0, 4).blank()
    values = {**json.loads(header.to_json()), "layout": changes, "length": 5}
    cp_rank = changes["cp_size"] - 1
    if changes["cp_size"] == 3:
        values["length"] = 1
    header = ShardHeader.from_json(json.dumps({**values, "cp_rank": cp_rank}))
    shard = BlockShard.of(header, torch.empty(0, 2, header.features, dtype=torch.float64))
    cache = CASE.target.cache(0, 4)
    with pytest.raises(TransferError, match="in none of them"):
        cache.import_blocks("a", [shard], agree=bool)


@pytest.mark.parametrize("name", ["x", "n" * 255])
def test_a_file_is_replaced_whole_or_not_at_all(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one with the longest name; only its owner may read it."""
    shards = []
    for length in (3, 5):
        cache = CASE.source.cache(0, 20)
        cache.add("a")
        fill(cache, CASE.source, 0, "a", length, SALT)
        shards.append(cache.export_blocks("a"))
    path, other = tmp_path / name, tmp_path / "other"
    other.write_text("of somebody else")
    path.symlink_to(other)
    save_shard(shards[0], path)
    assert other.read_text() == "of somebody else", "a link is replaced, not followed"
    assert path.stat().st_mode & 0o777 == 0o600

    def fails(tensors: object, name: str, metadata: object) -> None:
        Path(name).write_bytes(b"half of it")
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fails)
        with pytest.raises(OSError, match="no space left"):
            save_shard(shards[1], path)
    assert load_shard(path).header.length == 3
    save_shard(shards[1], path)
    assert load_shard(path).header.length == 5
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_other_files_are_refused(good: list[Path], tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model")
    with pytest.raises(TransferError, match=r"with the tensors \['weight'\]"):
        load_shard(tmp_path / "model")
    save_file(load_file(good[0]), tmp_path / "bare")
    with pytest.raises(TransferError, match="a header that cannot be read"):
        load_shard(tmp_path / "bare")
    (tmp_path / "pickle").write_bytes(b"\x80\x04\x95")
    with pytest.raises(TransferError):
        load_shard(tmp_path / "pickle")
    with pytest.raises(FileNotFoundError):
        load_shard(tmp_path / "absent")


def test_the_shard_of_a_rank_that_holds_nothing_is_a_file_too(tmp_path: Path) -> None:
    case = Case(Side((3, 4, 4)), Side((1, 4, 4)), 4, 0)
    paths = written(case, tmp_path)
    assert isinstance(load_shard(paths[2]), BlockShard)
    check(taken(case, paths), case.target, 0, "a", 0, SALT)
    check(taken(case, paths[:1]), case.target, 0, "a", 0, SALT)

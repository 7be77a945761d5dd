"""What the kernels refuse and how they are sized: no kernel runs here."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cplayers import ConfigError
from cplayers.ops import Partial
from cplayers.ops.backends import triton
from cplayers.ops.backends.triton import TRITON
from cplayers.ops.kernels import (
    cache_write,
    merge_packed,
    merge_partials,
    pack,
    span_attention,
    tiles,
    unpack,
)
from cplayers.ops.kernels.attention import plan_span_attention
from cplayers.ops.kernels.tiles import (
    MAX_ROWS,
    MIN_ROWS,
    ceil_div,
    ceil_power,
    split_count,
    split_dim,
    tile_shape,
)

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
Q, K, V = torch.zeros(3, 4, 16), torch.zeros(2, 32, 16), torch.zeros(2, 32, 8)
SPANS = torch.zeros(3, dtype=torch.int64)
TABLE = torch.zeros(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[..., :8]}, r"q \[3, 4, 8\].*attention needs q"),
        ({"q": Q[:, :3]}, "K dividing N"),
        ({"lo": SPANS[:2]}, "lo, hi"),
        ({"q": Q.double()}, "one dtype, fp32, bf16 or fp16"),
        ({"q": Q.double(), "k_cache": K.double(), "v_cache": V.double()}, "one dtype"),
        ({"q": torch.zeros(3, 16, 4).transpose(1, 2)}, "contiguous"),
        ({"hi": torch.zeros(3, 2, dtype=torch.int64)[:, 0]}, "contiguous"),
        ({"block_table": TABLE}, "comes with the block size"),
        ({"block_size": 16}, "comes with the block size"),
        ({"block_table": TABLE, "block_size": 16}, "requests where R is above 1"),
        ({"block_table": TABLE, "block_size": 16, "request": SPANS[:2]}, "of requests"),
        ({"tile_rows": 64}, "tile_rows=64: a program holds 16 or 32 rows"),
        ({"v_cache": torch.zeros(2, 32, 513)}, "H=16, V=513: H is 1 to 576, and V 1 to 512"),
        ({}, "tensors on cpu: Triton kernels run on CUDA devices"),
    ],
)
def test_attention_refuses(change: dict[str, Any], message: str) -> None:
    given = {"q": Q, "k_cache": K, "v_cache": V, "lo": SPANS, "hi": SPANS, "scale": 1.0}
    with pytest.raises(ConfigError, match=message):
        span_attention(**(given | change))


def test_nothing_is_launched_where_there_is_nothing() -> None:
    for q, k, v in ((Q[:0], K, V), (Q, K[:, :0], V[:, :0])):
        spans = torch.zeros(len(q), dtype=torch.int64)
        out, lse = span_attention(q, k, v, spans, spans, scale=1.0)
        assert out.shape == (len(q), 4, 8)
        assert not out.any()
        assert bool((lse == -torch.inf).all())


def test_the_others_refuse() -> None:
    out, lse = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4)
    for wrong in ((out.double(), lse), (out, lse[:1]), (out[:0], lse[:0]), (out, lse.half())):
        with pytest.raises(ConfigError, match="merging needs"):
            merge_partials(*wrong)
    with pytest.raises(ConfigError, match="packed partials are"):
        merge_packed(out, torch.bfloat16)
    with pytest.raises(ConfigError, match="parts=3: packing needs"):
        pack(Partial(out[0], lse[0]), parts=3)
    with pytest.raises(ConfigError, match="unpacking needs"):
        unpack(out[..., :4], torch.float32)
    slots = torch.zeros(3, dtype=torch.int64)
    rows, store = torch.zeros(3, 2, 8), torch.zeros(2, 5, 8)
    for planes, stores in (
        ([rows[:2]], [store]),
        ([rows], [store[:1]]),
        ([rows.double()], [store]),
        ([rows, rows], [store, torch.zeros(2, 6, 8)]),
    ):
        with pytest.raises(ConfigError, match=r"rows .* go to a store"):
            cache_write(slots, planes, stores)
    with pytest.raises(ConfigError, match="every plane has a store"):
        cache_write(slots, [rows, rows], [store])


def test_the_backend_refuses_the_cpu_by_name() -> None:
    q = torch.zeros(1, 1, 16)
    assert TRITON.name == "triton"
    assert (triton.MAX_DIM, triton.MAX_VALUE_DIM) == (tiles.MAX_DIM, tiles.MAX_VALUE_DIM)
    assert TRITON.refuse(q, q, q, None) == "it runs on CUDA devices, not on the cpu"


@pytest.mark.parametrize(
    ("dim", "parts"),
    [
        (1, (16, 0)),
        (16, (16, 0)),
        (24, (32, 0)),
        (64, (64, 0)),
        (80, (64, 16)),
        (96, (64, 32)),
        (128, (128, 0)),
        (192, (128, 64)),
        (256, (256, 0)),
        (288, (256, 32)),
        (576, (512, 64)),
        (1000, (1024, 0)),
    ],
)
def test_head_dimensions_are_split(dim: int, parts: tuple[int, int]) -> None:
    assert split_dim(dim) == parts


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16, 17, 24, 32, 100, 128])
@pytest.mark.parametrize("rows", [1, 2, 7, 1000])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_hold_their_rows(group: int, rows: int, itemsize: int) -> None:
    shape = tile_shape(
        head_dim=128, value_dim=128, group=group, rows_per_request=rows, itemsize=itemsize
    )
    assert 1 <= shape.heads <= group
    assert 1 <= shape.tokens <= rows
    assert shape.heads * shape.tokens <= shape.block_m <= MAX_ROWS
    assert shape.block_m == ceil_power(shape.block_m) >= MIN_ROWS
    if rows == 1000 and itemsize == 2:
        assert shape.heads * (shape.tokens + 1) > MAX_ROWS, "another row would fit"


def test_few_rows_are_split_to_occupy_a_device() -> None:
    assert split_count(8, 100_000, processors=132) == ceil_div(264, 8)
    assert split_count(1, 100_000, processors=132) == 64
    assert split_count(1000, 100_000, processors=132) == 1
    assert split_count(8, 255, processors=132) == 1
    assert split_count(8, 1024, processors=132) == 4
    assert split_count(0, 0, processors=1) == 1


def test_splits_are_partials_in_fp32() -> None:
    q, k = Q.bfloat16(), K.bfloat16()
    launch, partial = plan_span_attention(q, k, k, SPANS, SPANS, scale=1.0, num_splits=3)
    assert launch is not None
    assert launch.grid[1] == 3
    assert (partial.out.shape, partial.out.dtype) == ((3, 3, 4, 16), torch.float32)
    launch, partial = plan_span_attention(q, k, k, SPANS, SPANS, scale=1.0)
    assert launch is not None
    assert launch.grid[1] == 1
    assert (partial.out.shape, partial.out.dtype) == ((3, 4, 16), torch.bfloat16)


def benchmark(*args: str) -> subprocess.CompletedProcess[str]:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARK), *args]
    return subprocess.run(command, capture_output=True, text=True, env=hidden, check=False)


def test_the_benchmark_says_that_there_is_no_gpu() -> None:
    done = benchmark("--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a CUDA device" in done.stderr


def load_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", BENCHMARK)
    assert spec
    assert spec.loader
    module = sys.modules["gpu_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_reads_its_arguments() -> None:
    module = load_benchmark()
    settings, as_json = module.parse(["--json", "--only", "merge", "write", "--ranks", "2"])
    assert as_json
    assert (settings.only, settings.ranks, settings.checks) == (("merge", "write"), 2, True)
    assert module.parse(["--only", "decode"])[0].decodes == module.Settings().decodes
    settings, as_json = module.parse(["--no-checks", "--seconds", "0.5"])
    assert not as_json
    assert (settings.only, settings.checks, settings.seconds) == ((), False, 0.5)
    assert module.parse(["--dry-run"])[0].device == "cpu"
    for wrong in (["--only", "nothing"], ["--ranks", "0"], ["--seconds", "-1"]):
        with pytest.raises(SystemExit) as caught:
            module.parse(wrong)
        assert caught.value.code == 2


@pytest.mark.timeout(600)
def test_a_dry_run_takes_every_line_of_the_benchmark() -> None:
    done = benchmark("--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert [check["error"] for check in facts["checks"]] == [None] * 4, facts["checks"]
    assert facts["left_out"] == []
    rows = facts["rows"]
    assert {row["what"] for row in rows} == {"decode", "rank of 2", "merge", "write", "host"}
    ours = [row for row in rows if not row["by"].startswith("torch varlen")]
    assert all(row["seconds"] > 0 for row in ours), rows
    theirs = [row["note"] for row in rows if row not in ours]
    assert len(theirs) == 2
    assert all(note.startswith("cannot: ") for note in theirs)
    assert sum("merged differs by" in row.get("note", "") for row in rows) == 2


def test_the_benchmark_stops_in_time_and_says_what_is_missing() -> None:
    module, said = load_benchmark(), list[str]()
    settings = dataclasses.replace(module.TINY, checks=False, budget=0.0, only=("write", "host"))
    facts = module.run(settings, said.append)
    assert (facts["rows"], facts["left_out"]) == ([], ["write", "host"])
    assert said[-1] == "host: 0 seconds are over, the rest is left out"

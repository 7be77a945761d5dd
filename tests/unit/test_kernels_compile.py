"""Every variant of every kernel compiles for sm_80 and sm_90, and fits; no device is needed.

What is compiled is what would be launched: the `Launch` of real tensors, specialised as Triton's
launcher does it. Registers and stack come from the machine code, by the cuobjdump inside Triton.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cplayers.ops import Partial
from cplayers.ops.kernels.attention import plan_span_attention
from cplayers.ops.kernels.launch import Launch
from cplayers.ops.kernels.merge import plan_merge, plan_merge_packed
from cplayers.ops.kernels.pack import plan_pack, plan_unpack
from cplayers.ops.kernels.write import plan_write

F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
TYPES = {F32: "fp32", B16: "bf16", F16: "fp16", torch.int16: "i16", torch.int32: "i32"}
TYPES[torch.int64] = "i64"
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # most dynamic shared memory of a block
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
slow = pytest.mark.slow
DTYPES = [pytest.param(F32, id="fp32"), pytest.param(B16, id="bf16")]
DTYPES.append(pytest.param(F16, id="fp16", marks=slow))  # as bf16, but for one instruction
DIMS = [(64, 64), (96, 96), (128, 128), (256, 256), (576, 512)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(autouse=True)
def compiler_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    yield


def specialise(launch: Launch) -> ASTSource:
    kernel: Any = launch.kernel
    kept = set(kernel.do_not_specialize or ())
    signature, constants, attributes = {}, dict(launch.constants), {}
    for index, name in enumerate(kernel.arg_names):
        value = launch.args.get(name)
        if value is None or (type(value) is int and value == 1 and name not in kept):
            signature[name] = "constexpr"
            constants.setdefault(name, value)
            continue
        if isinstance(value, float):
            signature[name] = "fp32"
            continue
        if isinstance(value, Tensor):
            signature[name], number = f"*{TYPES[value.dtype]}", value.data_ptr()
        else:
            signature[name], number = "i32" if value < 2**31 else "i64", value
        if number % 16 == 0 and name not in kept:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def build(launch: Launch | None, arch: int, folder: Path) -> Any:
    """Compile it; its shared memory, registers and spills must be within bounds."""
    assert launch is not None
    built = triton.compile(specialise(launch), GPUTarget("cuda", arch, 32), launch.options)
    assert built.metadata.shared <= SHARED_MEMORY[arch]
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    usage = subprocess.run(
        [CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    assert registers * 32 * launch.warps <= 65536, f"{registers} registers"
    assert stack == local == 0, f"spills: {usage}"
    return built


def attention(
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    group: int,
    rows: int = 3,
    requests: int = 3,
    paged: bool = True,
    softcap: float | None = None,
    num_splits: int = 4,
    kv_heads: int = 2,
    tile_rows: int | None = None,
) -> Launch:
    q = torch.empty(rows, kv_heads * group, dim, dtype=dtype)
    k = torch.empty(kv_heads, 64, dim, dtype=dtype)
    v = k[..., :value_dim] if dim == 576 else torch.empty(kv_heads, 64, value_dim, dtype=dtype)
    lo = torch.zeros(rows, dtype=torch.int64)
    table = torch.zeros(requests, 4, dtype=torch.int32)
    pages = {"block_table": table, "block_size": 16, "request": lo} if paged else {}
    launch, _ = plan_span_attention(
        q,
        k,
        v,
        lo,
        lo,
        scale=0.1,
        softcap=softcap,
        num_splits=num_splits,
        tile_rows=tile_rows,
        **pages,
    )
    assert launch is not None
    return launch


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "value_dim"), DIMS)
def test_decoding(dim: int, value_dim: int, dtype: torch.dtype, arch: int, tmp_path: Path) -> None:
    launch = attention(dim, value_dim, dtype, group=16 if dim == 576 else 8)
    assert (launch.constants["BLOCK_M"], launch.constants["TOKENS"]) == (16, 1)
    assert launch.constants["SHARED"] is (dim == 576)
    code = build(launch, arch, tmp_path).asm["ptx"]
    assert "wgmma" not in code
    if dtype != F32:
        assert "mma.sync" in code, "products off the tensor cores"
        assert "cp.async" in code, "no keys on their way while others are worked on"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize(("dim", "value_dim"), DIMS)
def test_chunks(dim: int, value_dim: int, arch: int, tmp_path: Path) -> None:
    launch = attention(dim, value_dim, B16, group=4, rows=48)
    assert (launch.constants["BLOCK_M"], launch.constants["TOKENS"]) == (32, 8)
    code = build(launch, arch, tmp_path).asm["ptx"]
    assert "wgmma" not in code
    assert "mma.sync" in code


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize(
    "options",
    [
        {"dim": 576, "value_dim": 512, "group": 128, "kv_heads": 1},
        {"dim": 576, "value_dim": 512, "group": 128, "kv_heads": 1, "tile_rows": 16},
        {"dim": 128, "value_dim": 128, "group": 3, "softcap": 30.0, "kv_heads": 1},
        {"dim": 128, "value_dim": 128, "group": 1, "num_splits": 1, "kv_heads": 8},
        {"dim": 128, "value_dim": 128, "group": 4, "paged": False, "rows": 48},
        {"dim": 192, "value_dim": 128, "group": 1, "paged": False, "rows": 48},
        {"dim": 512, "value_dim": 512, "group": 4, "rows": 48},
        {"dim": 512, "value_dim": 512, "group": 4, "rows": 48, "dtype": F32},
        {"dim": 24, "value_dim": 5, "group": 2},
    ],
    ids=str,
)
def test_other_attention(options: dict[str, Any], arch: int, tmp_path: Path) -> None:
    build(attention(**({"dtype": B16} | options)), arch, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [pytest.param(64, marks=slow), 96, pytest.param(512, marks=slow)])
def test_results_on_their_way(dim: int, dtype: torch.dtype, arch: int, tmp_path: Path) -> None:
    out, lse = torch.empty(4, 3, 8, dim, dtype=dtype), torch.empty(4, 3, 8)
    build(plan_merge(out, lse)[0], arch, tmp_path)
    launch, packed = plan_pack(Partial(out[0], lse[0]), parts=2)
    build(launch, arch, tmp_path)
    build(plan_unpack(packed, dtype)[0], arch, tmp_path)
    build(plan_merge_packed(packed, dtype)[0], arch, tmp_path)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_partials_in_fp32_to_bf16(arch: int, tmp_path: Path) -> None:
    out, lse = torch.empty(4, 3, 8, 128), torch.empty(4, 3, 8)
    build(plan_merge(out, lse, dtype=B16)[0], arch, tmp_path)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize(
    ("shapes", "rows", "store"),
    [
        (((8, 128), (8, 128)), B16, B16),
        (((8, 128), (8, 128)), F32, F16),
        (((2, 96), (2, 96)), F32, F32),
        (((1, 576),), B16, B16),
    ],
)
def test_writing(
    shapes: tuple[tuple[int, int], ...],
    rows: torch.dtype,
    store: torch.dtype,
    arch: int,
    tmp_path: Path,
) -> None:
    (launch,) = plan_write(
        torch.zeros(5, dtype=torch.int64),
        [torch.empty(5, heads, dim, dtype=rows) for heads, dim in shapes],
        [torch.empty(heads, 64, dim, dtype=store) for heads, dim in shapes],
    )
    build(launch, arch, tmp_path)

"""The Triton kernels on one GPU: are they right, and how much of the memory's speed do they reach?

    python benchmarks/gpu.py [--json] [--no-checks] [--only NAME ...]
    python benchmarks/gpu.py --dry-run     # tiny sizes on the CPU, under Triton's interpreter

Every kernel is first compared with float64 (`tests/kernel_cases.py`), in several processes, since
most of the time is the compiler's. Then come paged decoding, ranks of a DCP group one after another
on the one card, merging, packing and writing. Decoding reads every key once, so its speed is given
as a share of a device-to-device copy's. What does not fit into --budget seconds is left out, and
named. Without a CUDA device it says so and exits with 2. A dry run shows that the script works; its
times say nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import kernel_cases

from cplayers.ops import Partial, plain
from cplayers.ops.kernels import (
    cache_write,
    merge_packed,
    merge_partials,
    pack,
    span_attention,
)
from cplayers.ops.kernels.launch import interpreted
from cplayers.ops.kernels.span_kernel import span_kernel

BLOCK = 16
PAGE = 256  # torch's paged attention wants pages of 256 or more
NO_DEVICE = 2


@dataclass(frozen=True)
class Decode:
    """``requests`` decode one token each over ``context`` keys."""

    name: str
    requests: int
    context: int
    kv_heads: int
    group: int
    head_dim: int = 128
    value_dim: int = 128

    @property
    def latent(self) -> bool:
        return self.value_dim != self.head_dim

    @property
    def key_bytes(self) -> int:
        width = self.head_dim + (0 if self.latent else self.value_dim)
        return self.requests * self.context * self.kv_heads * width * 2


@dataclass(frozen=True)
class Settings:
    """What is run; the defaults are for a data-centre card."""

    device: str = "cuda"
    decodes: tuple[Decode, ...] = (
        Decode("GQA 8 x 8, one request", 1, 131_072, 8, 8),
        Decode("GQA 8 x 8", 16, 16_384, 8, 8),
        Decode("GQA 8 x 8, short", 128, 1_024, 8, 8),
        Decode("GQA 1 x 8, one request", 1, 524_288, 1, 8),
        Decode("GQA 1 x 8", 64, 16_384, 1, 8),
        Decode("MLA 16 heads", 16, 16_384, 1, 16, 576, 512),
        Decode("MLA 128 heads, one request", 1, 262_144, 1, 128, 576, 512),
        Decode("MLA 128 heads", 64, 4_096, 1, 128, 576, 512),
    )
    ranks: int = 4
    copy_bytes: int = 1 << 30
    merged: tuple[int, int, int, int] = (8, 256, 128, 512)
    written: int = 65_536
    seconds: float = 0.2
    checks: bool = True
    only: tuple[str, ...] = ()
    budget: float = 270.0
    workers: int = min(8, os.cpu_count() or 1)


TINY = Settings(
    device="cpu",
    decodes=(
        Decode("GQA 1 x 4", 2, 64, 1, 4),
        Decode("MLA 4 heads", 2, 64, 1, 4, head_dim=80, value_dim=64),
    ),
    ranks=2,
    copy_bytes=4096,
    merged=(2, 1, 4, 8),
    written=3,
    seconds=1e-9,
    workers=0,
)
"""For a dry run: every line of the script, in seconds, under Triton's interpreter."""

Row = dict[str, Any]


class Clock:
    """Seconds of a call: the median of repeated ones, on the device's clock where it has one."""

    def __init__(self, device: str, seconds: float) -> None:
        self.cuda, self.seconds = device == "cuda", seconds

    def __call__(self, fn: Callable[[], Any]) -> float:
        fn()  # compiles
        first = self._once(fn)
        count = min(200, max(3 if self.cuda else 1, int(self.seconds / max(first, 1e-6))))
        return statistics.median(self._once(fn) for _ in range(count))

    def _once(self, fn: Callable[[], Any]) -> float:
        if not self.cuda:
            start = time.perf_counter()
            fn()
            return time.perf_counter() - start
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


CHECKS: dict[str, tuple[dict[str, Any], Callable[[Any, str], None]]] = {
    "span_attention": (kernel_cases.ATTENTION, kernel_cases.check_attention),
    "merge": ({str(s): s for s in kernel_cases.MERGES}, kernel_cases.check_merge),
    "pack": ({str(s): s for s in kernel_cases.PACKS}, kernel_cases.check_pack),
    "cache_write": (kernel_cases.WRITES, kernel_cases.check_write),
}


def check(kernel: str, name: str, device: str) -> Row:
    """One case of `tests/kernel_cases.py`; what is wrong is reported, and the exit status is 1."""
    cases, compare = CHECKS[kernel]
    error = None
    try:
        compare(cases[name], device)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {"kernel": kernel, "case": name, "error": error}


def checks(settings: Settings) -> Iterator[Row]:
    """All cases on the device; in a dry run, one of each kernel."""
    wanted = [
        (kernel, name, settings.device)
        for kernel, (cases, _) in CHECKS.items()
        for name in (cases if settings.device == "cuda" else list(cases)[:1])
    ]
    if not settings.workers:
        yield from (check(*case) for case in wanted)
        return
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(settings.workers, spawn) as pool:
        yield from pool.map(check, *zip(*wanted, strict=True))


def copy_speed(settings: Settings, clock: Clock) -> float:
    """Bytes a second, read and written, of a device-to-device copy."""
    source = torch.empty(settings.copy_bytes, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    return 2 * settings.copy_bytes / clock(lambda: target.copy_(source))


def paged(decode: Decode, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, both cache planes, a shuffled block table, and hi."""
    blocks = -(-decode.context // BLOCK)
    slots = decode.requests * blocks * BLOCK
    k = torch.randn(decode.kv_heads, slots, decode.head_dim, device=device).bfloat16()
    v = k[..., : decode.value_dim] if decode.latent else torch.randn_like(k)
    heads = decode.kv_heads * decode.group
    q = torch.randn(decode.requests, heads, decode.head_dim, device=device).bfloat16()
    table = torch.randperm(decode.requests * blocks, device=device, dtype=torch.int32)
    hi = torch.full((decode.requests,), decode.context, dtype=torch.int64, device=device)
    return q, k, v, table.view(decode.requests, blocks), hi


def decoding(settings: Settings, clock: Clock) -> Iterator[Row]:
    for decode in settings.decodes:
        q, k, v, table, hi = paged(decode, settings.device)
        request = torch.arange(len(q), dtype=torch.int32, device=settings.device)
        lo, scale = torch.zeros_like(hi), decode.head_dim**-0.5

        def ours(*, inputs: Any = (q, k, v, lo, hi, table, request, scale), **options: Any) -> Any:
            q, k, v, lo, hi, table, request, scale = inputs
            pages = {"block_table": table, "block_size": BLOCK, "request": request}
            return span_attention(q, k, v, lo, hi, scale=scale, **pages, **options)

        row = {"what": "decode", "shape": decode.name, "bytes": decode.key_bytes}
        for name, tile_rows in (("cplayers", None), ("cplayers, tiles of 16", 16)):
            if tile_rows is None or decode.group > 16:
                seconds = clock(lambda ours=ours, tile_rows=tile_rows: ours(tile_rows=tile_rows))
                yield {**row, "by": name, "seconds": seconds}
        expected = ours().out.float()
        for name, peer in peers(decode, q, k, v, table).items():
            yield {**row, "by": name, **attempt(peer, expected, clock)}


def attempt(peer: Callable[[], Tensor], expected: Tensor, clock: Clock) -> Row:
    """A peer's seconds, or why it cannot do this, or that it finds something else."""
    try:
        out = peer().reshape(expected.shape).float()
        difference = relative(out, expected)
        if not difference < 0.05:
            return {"note": f"differs by {difference:.2g} of the largest"}
        return {"seconds": clock(peer)}
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        return {"note": f"cannot: {str(error).splitlines()[0][:60]}"}


def relative(out: Tensor, expected: Tensor) -> float:
    return float((out - expected).abs().max() / expected.abs().max())


def peers(
    decode: Decode, q: Tensor, k: Tensor, v: Tensor, table: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """torch's attention over the same keys, each in the layout that it wants."""
    if decode.latent:
        return {}  # no fused one takes 576 dimensions, and the unfused copies keys for every head
    block = torch.arange(BLOCK, device=q.device)
    slots = (table.long().unsqueeze(-1) * BLOCK + block).flatten(1)[:, : decode.context]
    near_k, near_v = (t[:, slots].transpose(0, 1) for t in (k, v))  # [requests, K, context, H]
    query = q.unsqueeze(2)

    def sdpa() -> Tensor:
        return functional.scaled_dot_product_attention(query, near_k, near_v, enable_gqa=True)

    pages = -(-decode.context // PAGE)
    row = torch.arange(decode.requests * pages, dtype=torch.int32, device=q.device)
    used = torch.full((decode.requests,), decode.context, dtype=torch.int32, device=q.device)
    edges = torch.arange(decode.requests + 1, dtype=torch.int32, device=q.device)

    def page(near: Tensor) -> Tensor:
        spare = pages * PAGE - decode.context
        rows = functional.pad(near.transpose(1, 2), (0, 0, 0, 0, 0, spare))
        return rows.reshape(-1, PAGE, *rows.shape[2:])

    paged_k, paged_v = page(near_k), page(near_v)

    def varlen(**options: Any) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(
            q,
            paged_k,
            paged_v,
            edges,
            edges,
            1,
            decode.context,
            enable_gqa=True,
            seqused_k=used,
            block_table=row.view(decode.requests, pages),
            **options,
        )

    return {
        "torch sdpa, contiguous": sdpa,
        f"torch varlen, pages of {PAGE}": varlen,
        "torch varlen, one split": lambda: varlen(num_splits=1),
    }


def ranks(settings: Settings, clock: Clock) -> Iterator[Row]:
    """A DCP group's ranks one after another: attend, pack, and merge what would have arrived."""
    n = settings.ranks
    for decode in settings.decodes:
        group = decode.group * decode.kv_heads
        if group % n or decode.context % (n * BLOCK):
            continue
        q, k, v, table, hi = paged(decode, settings.device)
        request = torch.arange(len(q), dtype=torch.int32, device=settings.device)
        lo, scale = torch.zeros_like(hi), decode.head_dim**-0.5
        # Interleaved by blocks: rank r holds blocks r, r + n, ... of every request.
        shares = [table[:, r::n].contiguous() for r in range(n)]

        def attend(table: Tensor, hi: Tensor, rest: Any = (q, k, v, lo, request, scale)) -> Partial:
            q, k, v, lo, request, scale = rest
            pages = {"block_table": table, "block_size": BLOCK, "request": request}
            return span_attention(q, k, v, lo, hi, scale=scale, **pages)

        partials = [attend(share, hi // n) for share in shares]
        sent = [pack(p, parts=n) for p in partials]
        arrived = torch.stack([message[0] for message in sent])  # at the first rank
        merged = merge_packed(arrived, q.dtype).out.float()
        whole = attend(table, hi).out.float()[:, : merged.shape[1]]
        row = {"what": f"rank of {n}", "shape": decode.name}
        note = f"merged differs by {relative(merged, whole):.1g} of the largest from the whole"
        seconds = clock(lambda a=attend, s=shares[0], h=hi // n: a(s, h))
        yield {
            **row,
            "by": "attend",
            "bytes": decode.key_bytes // n,
            "seconds": seconds,
            "note": note,
        }
        moved = sum(p.out.numel() * 2 + p.lse.numel() * 4 for p in partials[:1]) * 2
        yield {
            **row,
            "by": "pack",
            "bytes": moved,
            "seconds": clock(lambda p=partials[0]: pack(p, parts=n)),
        }
        yield {
            **row,
            "by": "merge_packed",
            "bytes": arrived.numel() * 2 + merged.numel() * 2,
            "seconds": clock(lambda a=arrived: merge_packed(a, torch.bfloat16)),
        }


def merging(settings: Settings, clock: Clock) -> Iterator[Row]:
    n, num_tokens, num_heads, dim = settings.merged
    out = torch.randn(n, num_tokens, num_heads, dim, device=settings.device).bfloat16()
    lse = torch.randn(n, num_tokens, num_heads, device=settings.device)
    packed = torch.stack([pack(Partial(*p)) for p in zip(out, lse, strict=True)])
    moved = (n + 1) * (out[0].numel() * 2 + lse[0].numel() * 4)
    row = {"what": "merge", "shape": f"{n} of {num_tokens} x {num_heads} x {dim}"}
    for name, fn in {
        "cplayers": lambda: merge_partials(out, lse),
        "cplayers, packed": lambda: merge_packed(packed, torch.bfloat16),
        "torch": lambda: plain.merge_partials(out, lse),
        "torch, packed": lambda: plain.merge_packed(packed, torch.bfloat16),
    }.items():
        yield {**row, "by": name, "bytes": moved, "seconds": clock(fn)}


def writing(settings: Settings, clock: Clock) -> Iterator[Row]:
    heads, dim = 8, 128
    for count in (settings.written, 64):
        rows = torch.randn(count, 2, heads, dim, device=settings.device).bfloat16().unbind(1)
        stores = [
            torch.zeros(heads, count * 2, dim, device=settings.device).bfloat16() for _ in "kv"
        ]
        slots = torch.randperm(count * 2, device=settings.device)[:count]
        row = {"what": "write", "shape": f"{count} rows of 2 x {heads} x {dim}"}
        row["bytes"] = 2 * 2 * rows[0].numel() * 2
        for name, fn in {
            "cplayers": lambda r=rows, s=stores, at=slots: cache_write(at, r, s),
            "torch": lambda r=rows, s=stores, at=slots: plain.cache_write(at, r, s),
        }.items():
            yield {**row, "by": name, "seconds": clock(fn)}


def launching(settings: Settings, clock: Clock) -> Iterator[Row]:
    """What a call costs on the host: as many as fit in the queue, without waiting for any."""
    decode = Decode("one key", 1, 1, 1, 1)
    q, k, v, table, hi = paged(decode, settings.device)
    lo = torch.zeros_like(hi)

    def call() -> None:
        span_attention(q, k, v, lo, hi, scale=1.0, block_table=table, block_size=BLOCK)

    clock(call)
    calls = 100 if clock.cuda else 1
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - start) / calls
    yield {
        "what": "host",
        "shape": decode.name,
        "by": "cplayers",
        "bytes": decode.key_bytes,
        "seconds": seconds,
    }


PARTS = {"decode": decoding, "ranks": ranks, "merge": merging, "write": writing, "host": launching}


def run(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything that was asked for, as facts that JSON can hold."""
    clock = Clock(settings.device, settings.seconds)
    end = time.monotonic() + settings.budget
    facts: dict[str, Any] = {"machine": machine(settings.device), "checks": [], "rows": []}
    facts["left_out"] = []
    say(", ".join(f"{key} {value}" for key, value in facts["machine"].items()))
    if settings.checks:
        facts["checks"] = list(checks(settings))
        facts["seconds_of_checks"] = settings.budget - (end - time.monotonic())
        wrong = [c for c in facts["checks"] if c["error"]]
        say(f"{len(facts['checks']) - len(wrong)} of {len(facts['checks'])} checks pass")
        for case in wrong:
            say(f"  {case['kernel']} {case['case']}: {case['error']}")
    speed = facts["copy_bytes_per_second"] = copy_speed(settings, clock)
    say(f"device-to-device copy: {speed / 1e9:.0f} GB/s, read and written")
    say(f"{'what':<12}{'shape':<34}{'by':<28}{'us':>10}{'GB/s':>8}{'share':>7}")
    for part, rows in PARTS.items():
        if settings.only and part not in settings.only:
            continue
        measured = rows(settings, clock)
        while time.monotonic() < end and (row := next(measured, None)) is not None:
            if "seconds" in row:
                row["share_of_copy"] = row["bytes"] / row["seconds"] / speed
            facts["rows"].append(row)
            say(line(row))
        if time.monotonic() >= end:
            facts["left_out"].append(part)
            say(f"{part}: {settings.budget:.0f} seconds are over, the rest is left out")
    return facts


def line(row: Row) -> str:
    start = f"{row['what']:<12}{row['shape']:<34}{row['by']:<28}"
    if "seconds" in row:
        rate = row["bytes"] / row["seconds"] / 1e9
        start += f"{row['seconds'] * 1e6:10.1f}{rate:8.0f}{row['share_of_copy']:7.2f}"
    return f"{start}  {row.get('note', '')}".rstrip()


def machine(device: str) -> dict[str, Any]:
    facts = {"torch": torch.__version__, "triton": triton.__version__}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
        }
    return facts


def parse(argv: Sequence[str]) -> tuple[Settings, bool]:
    """Settings, and whether JSON is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--no-checks", action="store_true", help="measure without checking first")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], help="parts to run")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--budget", type=float, default=270, help="seconds, then it stops")
    parser.add_argument("--ranks", type=int, default=4, help="size of the DCP group")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each measurement")
    given = parser.parse_args(argv)
    if given.ranks < 1 or given.seconds <= 0 or given.budget <= 0:
        parser.error("--ranks, --seconds and --budget are above 0")
    settings = TINY if given.dry_run else replace(Settings(), ranks=given.ranks)
    settings = replace(
        settings,
        seconds=settings.seconds if given.dry_run else given.seconds,
        budget=given.budget,
        checks=not given.no_checks,
        only=tuple(given.only),
    )
    return settings, given.json


def main(argv: Sequence[str]) -> int:
    settings, as_json = parse(argv)
    if settings.device == "cpu":
        if not interpreted(span_kernel):  # Triton decides it when a kernel is defined
            environment = os.environ | {"TRITON_INTERPRET": "1"}
            os.execve(sys.executable, [sys.executable, __file__, *argv], environment)
    elif not torch.cuda.is_available():
        print(
            f"benchmarks/gpu.py needs a CUDA device, and torch {torch.__version__} finds none. "
            "Nothing was run.",
            file=sys.stderr,
        )
        return NO_DEVICE
    facts = run(settings, (lambda _: None) if as_json else print)
    if as_json:
        print(json.dumps(facts, indent=1))
    return int(any(check["error"] for check in facts["checks"]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

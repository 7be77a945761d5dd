"""Runs benchmarks one after another; writes what each found before the next begins."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from benchmarks import (
    chunk_prefill,
    dcp_decode,
    host_time,
    local_decode,
    machine,
    mla_decode,
    peers,
    planning,
    prefill,
)
from benchmarks.bench import Bench
from benchmarks.report import bar_table, table
from benchmarks.results import Result, size_of, to_json
from benchmarks.settings import Settings
from cplayers.errors import ConfigError
from cplayers.testing import RankPool

MODULES: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        local_decode,
        dcp_decode,
        prefill,
        chunk_prefill,
        mla_decode,
        planning,
        host_time,
    )
}
FILE = "results.json"


def run_suite(
    settings: Settings, pool: RankPool | None = None, console: Console | None = None
) -> list[Result]:
    """Run ``settings.benchmarks``; on ``pool`` where there is one.

    Raises:
        ConfigError: If one of them does not exist, before any is run.
    """
    unknown = [name for name in settings.benchmarks if name not in MODULES]
    if unknown:
        raise ConfigError(
            f"benchmarks={settings.benchmarks}",
            f"there is no benchmark {', '.join(unknown)}",
            f"choose from {', '.join(MODULES)}",
        )
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    if not peers.has_lucidrains():
        console.print(f"{peers.MISSING}; its rows are left out", style="yellow", markup=False)
    out = None if settings.out is None else Path(settings.out)
    about = machine.describe(settings.threads)
    console.print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}")
    results: list[Result] = []
    with ExitStack() as stack:
        if pool is None:
            pool = stack.enter_context(RankPool(most_ranks(settings)))
        status = stack.enter_context(console.status("")) if console.is_terminal else None
        for name in settings.benchmarks:
            result = _run(name, settings, pool, console, status)
            results.append(result)
            console.print(table(result))
            if out is not None:
                _write(out, about, results, settings.plots)
    bars = [bar for result in results for bar in result.bars]
    if bars:
        console.print(bar_table(bars))
    if out is not None:
        console.print(f"written to {out / FILE}, in {sum(r.seconds for r in results):.0f} s")
    return results


def most_ranks(settings: Settings) -> int:
    """Ranks that the chosen benchmarks need."""
    chosen = (getattr(settings, name) for name in settings.benchmarks)
    return max((n for section in chosen for n in getattr(section, "ranks", [])), default=1)


def _run(name: str, settings: Settings, pool: RankPool, console: Console, status: Any) -> Result:
    module, section, start = MODULES[name], getattr(settings, name), time.perf_counter()

    def tell(what: str) -> None:
        if status is not None:
            status.update(f"{name}: {what}")

    cases = []
    for case in module.run(Bench(pool, settings.budget, settings.threads, tell), section):
        cases.append(case)
        size = size_of(case.at)
        console.print(f"{name}: {size} done, {time.perf_counter() - start:.0f} s", style="dim")
    bars = module.bars(cases, section)
    return Result(name, module.TITLE, cases, bars, time.perf_counter() - start)


def _write(out: Path, about: dict[str, object], results: list[Result], plots: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    data = {"machine": about, "benchmarks": [to_json(result) for result in results]}
    (out / FILE).write_text(json.dumps(data, indent=1))
    if plots:
        from benchmarks.plots import draw

        draw(results[-1], out / f"{results[-1].name}.png")

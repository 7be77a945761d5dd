"""One decode step of a latent attention layer over a million cached tokens, on many local ranks.

    python benchmarks/long_context.py [--help]

The layer has the attention dimensions of DeepSeek-V3, but 16 heads and a narrow model. The defaults
are the layout that is documented for GLM-5.2 up to its limit of 1,024,000 tokens: TP 16, DCP 16,
interleave 128, block 128. That model is not run here, and nothing is measured of it.

    fill    every rank draws the cached latents that it owns, 65,536 tokens of the sequence a step
    step    the layer on every rank, for the new tokens; committed, then taken back and repeated
    attend  `attend_cached` alone: what a rank computes between the collectives
    read    each rank sums its shard as int64: one pass over the bytes that a step has to read
    exact   float64 in one process, without the library: softmax over chunks of 16,384 keys

The three times are taken in turn, so that noise of the machine meets all of them; each is the
median over the steps of the slowest rank's.

Errors are relative to the largest value. Two things are compared with float64. What attention
gives, before o_proj: the bar is twice the error of the same layer on one rank, in the same dtype.
And the layer's output, where o_proj adds up the ranks' parts in that dtype, with or without DCP:
the bar is twice the error of the layer under plain TP (dcp 1), whose attention is that of one rank.

Logits have a deviation of 4: of a million keys a few dozen matter, and the ranks hold unequal
shares of the mass. So merging with equal weights must miss the bars, and that is checked as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from long_context_exact import DTYPES, HIDDEN, LATENT, ROPE, VALUE, WIDTH, Settings, exact
from long_context_rank import plain_tp, run_rank

from cplayers import ConfigError
from cplayers.testing import RankPool

COMBINES = ("a2a", "ag_rs", "ar")
PARTS = ("attention", "layer")


def expected(settings: Settings, decode: str, combine: str) -> list[tuple[str, str, int, str]]:
    """Collectives of a step: axis, operation, bytes that a rank sends, formula."""
    g, t, n = settings.ranks, settings.new, settings.heads // settings.ranks
    e, d = DTYPES[settings.dtype].itemsize, LATENT if decode == "gather_q" else VALUE
    name = "L" if decode == "gather_q" else "V"
    calls = []
    if decode == "gather_q":
        calls.append(("dcp", "all_gather", (g - 1) * t * n * WIDTH * e, "(g-1) T n (L+R) e"))
    if combine == "a2a":
        sent = (g - 1) * t * n * (d * e + 4)
        calls.append(("dcp", "all_to_all", sent, f"(g-1) T n ({name} e + 4)"))
    else:
        calls.append(("dcp", "all_gather", (g - 1) * t * g * n * 4, "(g-1) T g n 4"))
    if combine == "ag_rs":
        sent = (g - 1) * t * n * d * 4
        calls.append(("dcp", "reduce_scatter", sent, f"(g-1) T n {name} 4"))
    if combine == "ar":
        sent = 2 * (g - 1) * t * n * d * 4
        calls.append(("dcp", "all_reduce", sent, f"2 (g-1)/g T g n {name} 4"))
    sent = -(-2 * (g - 1) * t * HIDDEN * e // g)
    return [*calls, ("tp", "all_reduce", sent, "2 (g-1)/g T hidden e")]


def measure(settings: Settings, pool: RankPool) -> dict[str, Any]:
    """Run everything on the ranks of ``pool``; returns the facts, which JSON can hold."""
    begin, load = time.perf_counter(), os.getloadavg()[0]
    say = print if settings.progress else lambda *_, **__: None
    say(f"filling {settings.ranks} ranks", flush=True)
    ranks = pool.run(run_rank, settings, settings.ranks, n=settings.ranks, timeout=600)
    say("filling one rank with all of it: the unsharded layer", flush=True)
    once = replace(settings, decode=("gather_q",), combine=("a2a",), steps=1)
    alone = pool.run(run_rank, once, 1, n=1, timeout=600)[0]
    (unsharded,) = alone["runs"]
    by_tp = pool.run(plain_tp, settings, unsharded["attention"], n=settings.ranks)[0]
    say("float64 reference", flush=True)
    start = time.perf_counter()
    right, wrong = exact(settings)
    exact_s = time.perf_counter() - start

    def error(got: Any, name: str) -> float:
        wanted = getattr(right, name)
        return float((got - wanted).abs().max() / wanted.abs().max())

    token_bytes = WIDTH * DTYPES[settings.dtype].itemsize
    facts: dict[str, Any] = {
        "settings": asdict(settings),
        "machine": {
            "cores": os.cpu_count(),
            "load": load,
            "machine": platform.machine(),
            "torch": torch.__version__,
        },
        "error": {
            "unsharded": {name: error(unsharded[name], name) for name in PARTS},
            "plain_tp": {"layer": error(by_tp, "layer")},
            "equal_weights": {name: error(getattr(wrong, name), name) for name in PARTS},
        },
        "memory": {
            "tokens": [rank["tokens"] for rank in ranks],
            "used_bytes": [rank["used_bytes"] for rank in ranks],
            "cache_bytes": [rank["cache_bytes"] for rank in ranks],
            "peak_bytes": [rank["peak_bytes"] for rank in ranks],
            "unsharded_bytes": settings.tokens * token_bytes,
            "unsharded_peak_bytes": alone["peak_bytes"],
            "token_bytes": token_bytes,
        },
        "seconds": {"fill": max(rank["fill_s"] for rank in ranks), "exact": exact_s},
        "unsharded_step": unsharded["seconds"]["step"][0],
        "runs": [],
    }
    for i, (decode, combine) in enumerate(settings.variants):
        runs = [rank["runs"][i] for rank in ranks]
        slowest = {
            name: statistics.median(map(max, zip(*(r["seconds"][name] for r in runs), strict=True)))
            for name in runs[0]["seconds"]
        }
        attention = torch.cat([run["attention"] for run in runs], -1)  # own heads, in order
        layer = runs[0]["layer"]
        facts["runs"].append(
            {
                "decode": decode,
                "combine": combine,
                "error": {
                    "attention": error(attention, "attention"),
                    "layer": error(layer, "layer"),
                },
                "alike": all(run["layer"].equal(layer) for run in runs),
                "seconds": slowest,
                "traffic": runs[0]["traffic"],
                "expected": [list(call) for call in expected(settings, decode, combine)],
            }
        )
    facts["seconds"]["all"] = time.perf_counter() - begin
    return facts


def bars(facts: dict[str, Any]) -> dict[str, float]:
    """What the errors of attention and of the layer may be."""
    errors = facts["error"]
    return {
        "attention": 2 * errors["unsharded"]["attention"],
        "layer": 2 * errors["plain_tp"]["layer"],
    }


def failures(facts: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    settings, memory, found = facts["settings"], facts["memory"], []
    for name, bar in bars(facts).items():
        if not facts["error"]["equal_weights"][name] > bar:
            found.append(f"{name}: merging with equal weights would pass, so nothing is shown")
    share, block = settings["tokens"] / settings["ranks"], settings["block"]
    slack = block if block % settings["interleave"] == 0 else block + settings["interleave"]
    if sum(memory["tokens"]) != settings["tokens"]:
        found.append(f"the ranks hold {sum(memory['tokens'])} tokens")
    for rank, (tokens, used) in enumerate(zip(memory["tokens"], memory["used_bytes"], strict=True)):
        if abs(tokens - share) > slack or used > (share + slack) * memory["token_bytes"]:
            found.append(f"rank {rank} holds {tokens} tokens in {used} bytes")
    for run in facts["runs"]:
        name = f"{run['decode']}, {run['combine']}"
        for part, bar in bars(facts).items():
            error = run["error"][part]
            if not error <= bar:
                found.append(f"{name}: {part} has error {error:.2e}, the bar is {bar:.2e}")
        if not run["alike"]:
            found.append(f"{name}: the ranks' outputs differ")
        if run["traffic"] != [call[:3] for call in run["expected"]]:
            found.append(f"{name}: sent {run['traffic']}")
    return found


def show(facts: dict[str, Any]) -> None:
    """Print the facts."""
    s, memory, errors, machine = (facts[k] for k in ("settings", "memory", "error", "machine"))
    tokens, mega = memory["tokens"], 1e6
    print(
        f"\n{s['tokens']:,} cached tokens and {s['new']} new, {s['heads']} heads, latent "
        f"{LATENT} + {ROPE}, {s['dtype']}; tp = dcp = {s['ranks']}, interleave "
        f"{s['interleave']}, block {s['block']}, seed {s['seed']}\n"
        f"{s['ranks']} ranks of one thread share {machine['cores']} cores ({machine['machine']}, "
        f"torch {machine['torch']}), load before: {machine['load']:.1f}\n\n"
        f"memory of a rank: {min(tokens):,} to {max(tokens):,} tokens, 1/{s['ranks']} of all is "
        f"{s['tokens'] / s['ranks']:,.0f}\n"
        f"  cached latents {max(memory['used_bytes']) / mega:,.1f} MB, storage "
        f"{max(memory['cache_bytes']) / mega:,.1f} MB; unsharded "
        f"{memory['unsharded_bytes'] / mega:,.1f} MB\n"
        f"  peak of a rank's process {max(memory['peak_bytes']) / mega:,.0f} MB, of the unsharded "
        f"one {memory['unsharded_peak_bytes'] / mega:,.0f} MB\n"
    )
    print(f"{'error against float64':24}{'attention':>12}{'layer':>12}")
    for name, values in (
        ("one rank", errors["unsharded"]),
        (f"tp {s['ranks']}, dcp 1", errors["plain_tp"]),
        ("bar", bars(facts)),
        *((f"{run['decode']}, {run['combine']}", run["error"]) for run in facts["runs"]),
        ("merged by equal weights", errors["equal_weights"]),
    ):
        cells = (f"{values[part]:12.2e}" if part in values else " " * 12 for part in PARTS)
        print(f"{name:24}{''.join(cells)}")
    operations = 2 * s["new"] * s["heads"] * (2 * LATENT + ROPE)  # per key, absorbed form
    print(
        f"\na rank's attention: {operations * max(tokens) / 1e9:.2f} GFLOP, "
        f"{operations / memory['token_bytes']:.0f} operations per byte that is read"
    )
    print(f"{'time':24}{'step ms':>12}{'attend ms':>12}{'read ms':>12}{'step/read':>12}")
    for run in facts["runs"]:
        step, attend, one_pass = (1e3 * run["seconds"][k] for k in ("step", "attend", "read"))
        print(
            f"{run['decode'] + ', ' + run['combine']:24}{step:12.1f}{attend:12.1f}"
            f"{one_pass:12.1f}{step / one_pass:12.1f}"
        )
    print("\nsent by a rank in a step, bytes: counted, and by formula")
    for run in facts["runs"]:
        print(f"{run['decode']}, {run['combine']}: {len(run['traffic'])} collectives")
        for (axis, operation, sent), (*_, wanted, formula) in zip(
            run["traffic"], run["expected"], strict=True
        ):
            print(f"  {axis:4}{operation:15}{sent:>10,} {wanted:>10,} = {formula}")
    seconds = facts["seconds"]
    print(
        f"\nfilling {seconds['fill']:.1f} s, the one rank's step {facts['unsharded_step']:.2f} s, "
        f"reference {seconds['exact']:.1f} s, all {seconds['all']:.1f} s"
    )


def parse(argv: list[str] | None = None) -> tuple[Settings, Path | None]:
    """Settings from the command line (or ``argv``), and where JSON goes."""
    default, what = Settings(), argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=what
    )
    texts = {
        "tokens": "cached tokens",
        "new": "new tokens of the step",
        "ranks": "ranks to start, tp and dcp both; a divisor of heads",
        "interleave": "tokens that go to one rank before the next one's turn",
        "block": "tokens of a cache block on one rank",
        "heads": "query heads",
        "steps": "times that a step is repeated, after one to warm up",
        "seed": "of weights, context and new tokens",
        "fill": "tokens of a step of filling",
    }
    for name, text in texts.items():
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name), help=text)
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype, help="of layer and cache")
    for name, choices, text in (
        ("decode", default.decode, "ways of decoding"),
        ("combine", COMBINES, "ways of combining"),
    ):
        parser.add_argument(
            f"--{name}", nargs="+", choices=choices, default=getattr(default, name), help=text
        )
    parser.add_argument("--json", type=Path, help="file to write the facts to")
    given = vars(parser.parse_args(argv))
    path = given.pop("json")
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        parser.error(f"--json {path}: a file in a folder that exists")  # before minutes of work
    given |= {name: tuple(given[name]) for name in ("decode", "combine")}
    try:
        return Settings(**given, progress=True), path
    except ConfigError as error:
        parser.error(str(error))


def main() -> None:
    """Run the command."""
    settings, path = parse()
    torch.set_num_threads(1)  # as on the ranks: idle threads that spin would slow each other
    with RankPool(settings.ranks) as pool:
        facts = measure(settings, pool)
    show(facts)
    if path is not None:
        path.write_text(json.dumps(facts, indent=2) + "\n")
    wrong = failures(facts)
    sys.exit("\n".join(f"FAILED: {line}" for line in wrong) if wrong else None)


if __name__ == "__main__":
    main()

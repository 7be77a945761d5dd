"""One trace of requests on four replicas: fixed degrees beside dynamic context parallelism.

    python benchmarks/dynamic_cp.py                      # all runs, nine minutes on two cores
    python benchmarks/dynamic_cp.py --seconds 0          # all requests at once: most throughput
    python benchmarks/dynamic_cp.py --runs dynamic --out /tmp/dynamic

60 requests of 8 to 6,000 prompt tokens arrive over time. The ranks are processes of this machine
(gloo) with a tiny decoder, so that times say how the runs compare with each other here, and nothing
about accelerators. Every request's tokens are compared with a plain decoder that runs it alone.

Written to the folder ``--out``: per run the trace (JSON lines) and its picture, and results.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import custom_stack
from custom_stack import Decoder, rotary, spread

from cplayers.attention import gather_rows, take_rows
from cplayers.mesh import CPMesh, Topology
from cplayers.ops import apply_rope
from cplayers.serving import Request, ServedModel, Server, ServingConfig, write_trace
from cplayers.testing import RankPool

REPLICAS = 4
SHORT = 512
"""Prompt tokens up to which a request counts as short."""
CHUNK = 512
"""Prompt tokens that the reference computes at a time."""

BASE = ServingConfig(
    num_blocks=176,
    chunk_tokens=128,
    steps={1: 8, 2: 3, 4: 1},
    share=0.1,
    same_processors=True,
)
"""2,816 tokens of KV on each rank: the longest requests fit two or four replicas only."""
RUNS = {
    "cp=1": replace(BASE, sizes=(1,)),
    "cp=4": replace(BASE, sizes=(4,)),
    "dynamic": BASE,
    "dynamic, crossovers": replace(BASE, crossovers={2: 300, 4: 2400}),
}
FIXED = ("cp=1", "cp=4")
DTYPES = ("float32", "float64")


def requests(seconds: float, seed: int = 0) -> list[Request]:
    """Mostly short ones, some that grow past a crossover, a few long ones."""
    rng = random.Random(seed)
    lengths = [int(8 * 2 ** rng.uniform(0, 6)) for _ in range(34)]  # 8 to 512
    lengths += [rng.randint(230, 298) for _ in range(12)]
    lengths += [rng.randint(513, 2300) for _ in range(8)]
    lengths += [2900, 3700, 4400, 5000, 5600, 6000]
    rng.shuffle(lengths)
    made = []
    for i, length in enumerate(lengths):
        prompt = tuple(rng.randrange(custom_stack.VOCAB) for _ in range(length))
        new = rng.randint(80, 120) if 230 <= length < 300 else rng.randint(8, 64)
        made.append(Request(f"r{i}", prompt, new, rng.uniform(0, seconds)))
    return made


def fits_one(request: Request) -> bool:
    """Whether one replica can hold it to its end."""
    return request.most_cached <= BASE.num_blocks * BASE.block_size


class Alone:
    """The plain decoder with keys and values kept, for one request: the reference."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.decoder, self.dtype = Decoder(seed=0).to(dtype), dtype

    @torch.no_grad()
    def run(self, request: Request) -> list[int]:
        self.kept: list[list[Tensor]] = [[] for _ in self.decoder.blocks]
        tokens, new, start = list(request.prompt), list[int](), 0
        while not request.is_over(new):
            while start < len(tokens):
                part = tokens[start : start + CHUNK]
                hidden = self._forward(torch.tensor(part), start)
                start += len(part)
            new.append(int(self.decoder.head(hidden[-1]).argmax()))
            tokens.append(new[-1])
        return new

    def _forward(self, tokens: Tensor, start: int) -> Tensor:
        x = self.decoder.embedding(tokens)
        for block, kept in zip(self.decoder.blocks, self.kept, strict=True):
            x = x + self._attend(block.attention, block.attention_norm(x), start, kept)
            x = x + block.mlp(block.mlp_norm(x))
        return self.decoder.norm(x)

    def _attend(self, layer, x: Tensor, start: int, kept: list[Tensor]) -> Tensor:
        positions = torch.arange(start, start + len(x))
        cos, sin = (t.to(self.dtype) for t in rotary(positions))
        q, k, v = (
            p(x).unflatten(-1, (-1, custom_stack.HEAD_DIM))
            for p in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        kept[:] = [torch.cat(pair) for pair in zip(kept, (k, v), strict=True)] if kept else [k, v]
        seen = torch.arange(len(kept[0])) <= positions[:, None]
        heads = (t.transpose(0, 1) for t in (q, *kept))
        out = F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
        return layer.o_proj(out.transpose(0, 1).flatten(1))


def served(dtype: torch.dtype) -> ServedModel:
    """The decoder of one replica."""
    decoder = spread(Decoder(seed=0), CPMesh(Topology())).to(dtype)

    def step(tokens, plan, cache, mesh) -> Tensor:
        cos, sin = (t.to(dtype) for t in rotary(plan.positions))
        hidden = decoder(take_rows(tokens, plan), (cos, sin), cache, plan)
        return decoder.head(gather_rows(hidden, plan, mesh, plan.last))

    return ServedModel(decoder, step)


@dataclass
class Outcome:
    """How a request ended, as one rank saw it."""

    name: str
    prompt: int
    arrival: float
    new: list[int]
    times: list[float]
    refused: bool
    groups: list[int]


def serve(config: ServingConfig, given: list[Request], dtype: torch.dtype):
    """One run on this rank."""
    server = Server(served(dtype), config, num_replicas=REPLICAS)
    began = time.monotonic()
    done = server.run(given)
    seconds = time.monotonic() - began
    outcomes = [
        Outcome(
            p.request.name,
            len(p.request.prompt),
            p.request.arrival,
            p.new,
            p.times,
            bool(p.refused),
            [len(group) for group in p.history],
        )
        for p in done
    ]
    return outcomes, server.trace, seconds, server.kv_bytes


def summary(outcomes: list[Outcome], names: set[str]) -> dict[str, float]:
    """Latency and throughput of the requests ``names``."""
    chosen = [o for o in outcomes if o.name in names and not o.refused]
    first = [o.times[0] - o.arrival for o in chosen]
    whole = [o.times[-1] - o.arrival for o in chosen]
    per_token = [(o.times[-1] - o.times[0]) / (len(o.new) - 1) for o in chosen if len(o.new) > 1]
    span = max(o.times[-1] for o in chosen) - min(o.arrival for o in chosen)
    return {
        "requests": len(chosen),
        "first_token_mean_s": statistics.mean(first),
        "first_token_p95_s": statistics.quantiles(first, n=20)[-1],
        "per_token_mean_ms": 1e3 * statistics.mean(per_token),
        "latency_mean_s": statistics.mean(whole),
        "new_tokens_per_s": sum(len(o.new) for o in chosen) / span,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--seconds", type=float, default=40.0, help="over which requests arrive")
    parser.add_argument("--rounds", type=int, default=3, help="of all runs; figures are medians")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/dynamic_cp"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    given = requests(options.seconds)
    dtype: torch.dtype = getattr(torch, options.dtype)
    alone = Alone(dtype)
    expected = {request.name: alone.run(request) for request in given}
    runs: dict[str, list] = {name: [] for name in options.runs}
    with RankPool(REPLICAS, timeout=1800) as pool:
        for _ in range(options.rounds):
            for name in options.runs:
                results = pool.run(serve, RUNS[name], given, dtype)
                outcomes, trace, seconds, kv_bytes = results[0]
                assert all(r[1] == trace for r in results), "the ranks decided alike"
                for outcome in outcomes:
                    assert outcome.refused or outcome.new == expected[outcome.name], outcome.name
                runs[name].append((outcomes, trace, seconds, kv_bytes))
                print(f"{name}: {seconds:.1f} s", file=sys.stderr)
    report(runs, options.out)


def report(runs: dict[str, list], out: Path) -> None:
    """Print the runs side by side, and write everything."""
    from cplayers.viz.trace import trace_png

    given = requests(1.0)
    classes = {
        "short": {r.name for r in given if len(r.prompt) <= SHORT},
        "long": {r.name for r in given if len(r.prompt) > SHORT and fits_one(r)},
        "too long for one": {r.name for r in given if not fits_one(r)},
    }
    facts: dict[str, dict] = {}
    for name, found in runs.items():
        known = {o.name for o in found[0][0] if not o.refused}
        facts[name] = {"config": asdict(RUNS[name]), "refused": len(found[0][0]) - len(known)}
        facts[name]["seconds"] = [seconds for _, _, seconds, _ in found]
        trace = found[0][1]
        events = [line["event"] for line in trace]
        facts[name]["migrations"] = events.count("migrate")
        facts[name]["most_blocks"] = max(
            max(line["used"]) for line in trace if line["event"] == "usage"
        )
        facts[name]["kv_bytes"] = found[0][3]
        for kind, members in classes.items():
            if members & known:
                each = [summary(outcomes, members) for outcomes, *_ in found]
                facts[name][kind] = {k: statistics.median(e[k] for e in each) for k in each[0]}
        stem = name.replace("=", "").replace(", ", "-").replace(" ", "-")
        write_trace(out / f"{stem}.jsonl", trace)
        trace_png(trace, out / f"{stem}.png")
    lines = beside(facts, classes)
    (out / "results.json").write_text(json.dumps({**facts, "beside": lines}, indent=1))
    print(f"{'run':20} {'class':16}   n  TTFT s  p95 s  TPOT ms  latency s  tokens/s")
    for name, fact in facts.items():
        for kind in classes:
            if kind in fact:
                s = fact[kind]
                print(
                    f"{name:20} {kind:16} {s['requests']:3.0f}  {s['first_token_mean_s']:6.2f} "
                    f"{s['first_token_p95_s']:6.2f}  {s['per_token_mean_ms']:7.1f}  "
                    f"{s['latency_mean_s']:9.2f}  {s['new_tokens_per_s']:8.1f}"
                )
        print(
            f"{name:20} refused for memory {fact['refused']}, migrations {fact['migrations']}, "
            f"most blocks on a rank {fact['most_blocks']} of {fact['config']['num_blocks']}, "
            f"{statistics.median(fact['seconds']):.1f} s"
        )
    for line in lines:
        verdict = "within" if line["within"] else "NOT within"
        print(
            f"dynamic over {line['best']}, the best fixed choice, {line['class']}, "
            f"{line['measure']}: {line['ratio']:.3f}, {verdict} 5 %"
        )


def beside(facts: dict[str, dict], classes: Iterable[str]) -> list[dict]:
    """Dynamic over the fixed choice that is best at each measure of each class."""
    lines = []
    for kind in classes:
        for measure in ("latency_mean_s", "new_tokens_per_s"):
            fixed = {
                name: facts[name][kind][measure] for name in FIXED if kind in facts.get(name, ())
            }
            if not fixed or kind not in facts.get("dynamic", ()):
                continue
            more_is_better = measure == "new_tokens_per_s"
            best = (max if more_is_better else min)(fixed, key=fixed.__getitem__)
            ratio = facts["dynamic"][kind][measure] / fixed[best]
            within = ratio >= 0.95 if more_is_better else ratio <= 1.05
            lines.append(
                {"class": kind, "measure": measure, "best": best, "ratio": ratio, "within": within}
            )
    return lines


if __name__ == "__main__":
    main()

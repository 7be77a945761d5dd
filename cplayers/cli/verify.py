"""``cplayers verify``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cplayers.cli.arguments import Option, count, one_of, up_to, word
from cplayers.cli.command import BLOCKS, DEGREES, HELP, JSON, MOST_RANKS, Command, need, show_json
from cplayers.errors import ConfigError

if TYPE_CHECKING:
    from cplayers.cli.trial import Step, Trial

WRONG = 1
TOLERANCE = 1e-5
"""Largest difference, as a part of the largest value. Everything is float64, but the logsumexp of
partial results, which travels in float32."""
MOST_HEADS, MOST_TOKENS = 4096, 4096
WINDOW = 8

TEXT = """
Starts a process for every rank of the layout on this machine (gloo), gives a tiny attention layer
with the heads of your model random weights, and runs prompts, decode steps, drafts of several
tokens and a chunk of a prompt over cached tokens. The result is compared with one process.
No machine with GPUs is needed, and no weights. Exit code 1 if they differ.

Examples:
  cplayers verify model=llama-3-70b tp=8 dcp=2 q_proj=tpa
  cplayers verify heads=16 kv_heads=2 tp=4 pcp=2 dcp=4 interleave=3 block=4
  cplayers verify model=deepseek-v3 tp=4 dcp=4 combine=ag_rs
"""


def run(values: Mapping[str, Any]) -> int:
    """Verify.

    Args:
        values: Of the arguments.
    """
    if not values["json"]:
        need("rich", "the table of cplayers verify")
    trial = _trial(values)
    world = trial.topology.world_size
    if world > MOST_RANKS:
        raise ConfigError(
            f"{world} ranks",
            f"at most {MOST_RANKS} processes are started on this machine",
            "verify a smaller tp with the same dcp / pcp, or dp=1: replicas do not talk",
        )
    from cplayers.cli import trial as trials
    from cplayers.mesh import Topology
    from cplayers.testing import RankPool, RankPoolError

    exact = trials.run(replace(trial, topology=Topology()))
    try:
        with RankPool(world) as pool:
            ranks = pool.run(trials.run, trial, n=world)
    except RankPoolError as error:
        print(f"cplayers verify: the ranks failed. {error}", file=sys.stderr)
        return WRONG
    errors = [largest_error([rank[i] for rank in ranks], exact[i]) for i in range(len(exact))]
    right = all(error <= TOLERANCE for error in errors)
    sent = [[rank[i].sent for rank in ranks] for i in range(len(exact))]
    if values["json"]:
        steps = [
            {"step": name, "requests": dict(requests), "largest_error": e, "bytes_sent": s}
            for (name, requests), e, s in zip(trial.steps, errors, sent, strict=True)
        ]
        show_json({"right": right, "tolerance": TOLERANCE, "ranks": world, "steps": steps})
    else:
        _show(trial, errors, sent)
        print("It is right." if right else f"WRONG: differences above {TOLERANCE:g}.")
    return 0 if right else WRONG


def largest_error(ranks: Sequence[Step], exact: Step) -> float:
    """Largest difference on any rank, as a part of the largest value; infinite on NaN.

    Args:
        ranks: What each rank computed in a step.
        exact: What one process computed.
    """
    import torch

    worst = torch.stack([(rank.out - exact.out).abs().max() for rank in ranks]).max()
    worst = worst / exact.out.abs().max()
    return float("inf") if worst.isnan() else float(worst)


def _trial(values: Mapping[str, Any]) -> Trial:
    """The trial, once the judge of layouts has accepted it."""
    from cplayers.cli.trial import Trial
    from cplayers.mesh import Topology, validate
    from cplayers.planning import ModelShape

    heads, kv_heads = values["heads"], values["kv_heads"]
    windows: list[int | None] = [None]
    if values["model"]:
        if heads or kv_heads:
            raise ConfigError(
                "model together with heads or kv_heads",
                "the model says how many heads there are",
                "leave out one of them",
            )
        shape = ModelShape.load(values["model"])
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        if shape.windowed_layers:
            windows.append(WINDOW)
    elif not heads:
        raise ConfigError(
            "no model and no heads",
            "a layout is right or wrong for a number of heads",
            "pass model=llama-3-70b, or heads=64 kv_heads=8 (kv_heads=latent for MLA)",
        )
    else:
        kv_heads = None if kv_heads == "latent" else kv_heads or heads
    topology = Topology(*(values[name] for name in ("tp", "dcp", "pcp", "dp")))
    validate(
        topology,
        num_heads=heads,
        num_kv_heads=kv_heads,
        block_size=values["block"],
        interleave_size=values["interleave"],
        combine=values["combine"],
        q_proj=values["q_proj"],
    )
    return Trial(
        topology,
        heads,
        kv_heads,
        tuple(windows),
        values["q_proj"],
        values["combine"],
        values["prefill"],
        values["block"],
        values["interleave"],
        values["tokens"],
        values["seed"],
    )


def _show(trial: Trial, errors: Sequence[float], sent: Sequence[Sequence[int]]) -> None:
    from cplayers.cli.output import show

    kv = "latent" if trial.num_kv_heads is None else f"{trial.num_kv_heads} KV"
    t = trial.topology
    rows = [
        [name, ", ".join(f"{seq}+{new}" for seq, new in requests), f"{error:.1e}", f"{max(s):,}"]
        for (name, requests), error, s in zip(trial.steps, errors, sent, strict=True)
    ]
    show(
        f"{trial.num_heads} heads ({kv}) with tp={t.tp}, dcp={t.dcp}, pcp={t.pcp}, dp={t.dp} on "
        f"{t.world_size} ranks, beside one process",
        ["step", "new tokens", "largest relative error", "most bytes sent by a rank"],
        rows,
        bold=[i for i, error in enumerate(errors) if error > TOLERANCE],
        left=("step", "new tokens"),
    )


def kv_heads(name: str, text: str) -> int | str:
    """A number of KV heads, or ``latent``.

    Args:
        name: Of the argument.
        text: What was given.
    """
    return text if text == "latent" else up_to(MOST_HEADS)(name, text)


COMMAND = Command(
    summary="Run a layout on tiny random weights on this machine and compare with one process.",
    text=TEXT,
    options={
        "model": Option(word, None, "preset or config.json that says how many heads there are"),
        "heads": Option(up_to(MOST_HEADS), None, "query heads, in place of model"),
        "kv_heads": Option(kv_heads, None, "KV heads, or latent for MLA [as many as heads]"),
        **DEGREES,
        "q_proj": Option(one_of("gather", "tpa"), "gather", "how queries reach a DCP group"),
        "combine": Option(one_of("a2a", "ag_rs", "ar"), "a2a", "how results are combined"),
        "prefill": Option(
            one_of("auto", "gather_q", "gather_kv", "ring"), "auto", "strategy of prompts"
        ),
        **BLOCKS,
        "tokens": Option(up_to(MOST_TOKENS), 37, "of the longest prompt"),
        "seed": Option(count, 1, "of weights and tokens"),
    },
    flags={**JSON, **HELP},
    run=run,
)

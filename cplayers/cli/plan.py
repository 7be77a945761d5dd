"""``cplayers plan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cplayers.cli.arguments import REQUIRED, Flag, Option, count, duration, fraction, word
from cplayers.cli.command import BLOCKS, HELP, JSON, PNG, Command, need, picture, show_json
from cplayers.errors import ConfigError

if TYPE_CHECKING:
    from cplayers.planning import Advice, Candidate, Choices, Hardware, Load, ModelShape

NOTHING_FITS = 1
SHOWN = 12

TEXT = """
Judges every (tp, dcp, pcp, dp) that uses all cards: bytes of weights and KV cache by formula, the
workspace of a step, longest context, most requests, time to the first token (TTFT) and per output
token (TPOT) as predictions. Recommends the layout that finishes the load first.

A load is `concurrency` requests of `context` tokens each that arrive together; `output` of these
tokens are generated. Predictions assume that kernels reach a part of the data sheet's figures,
which can be set; `cplayers calibrate` measures on real ranks.

Examples:
  cplayers plan model=deepseek-v3 hardware=h200 gpus=8 context=1M concurrency=4
  cplayers plan model=path/to/config.json hardware=b200 gpus=16 context=128K concurrency=32 ttft=2s
  cplayers plan model=llama-3-70b hardware=my_card.json gpus=8 context=32K --json

hardware= takes a JSON file with flops, memory, memory_bandwidth and link_bandwidth, in bytes and
seconds, and optionally node_size and network_bandwidth.
"""


def run(values: Mapping[str, Any]) -> int:
    """Plan.

    Args:
        values: Of the arguments.
    """
    from cplayers.planning import Hardware, Load, ModelShape, advise

    if not values["json"]:
        need("rich", "the table of cplayers plan")
    if values["png"]:
        need("matplotlib", "the picture of cplayers plan")
        picture(values["png"])
    shape = ModelShape.load(values["model"])
    hardware = Hardware.load(values["hardware"])
    load = Load(values["context"], values["concurrency"], values["output"], values["chunk"])
    choices = _choices(values)
    found, advice = advise(
        shape,
        hardware,
        values["gpus"],
        load,
        choices,
        ttft_s=values["ttft"],
        tpot_s=values["tpot"],
    )
    title = (
        f"{shape.name} on {values['gpus']} x {hardware.name}: {load.concurrency} x "
        f"{load.context:,} tokens"
    )
    if values["json"]:
        show_json(_data(shape, hardware, load, choices, values, found, advice))
    else:
        _show(title, hardware, choices, found, advice, all_rows=values["all"])
    if values["png"]:
        from cplayers.viz.charts import plan_png

        plan_png(found, advice.best, title, Path(values["png"]))
        if not values["json"]:
            print(f"\nPicture: {values['png']}")
    return 0 if advice.best else NOTHING_FITS


def _choices(values: Mapping[str, Any]) -> Choices:
    from cplayers.cache import CacheConfig
    from cplayers.planning import Assumed, Choices
    from cplayers.planning.memory import DTYPES

    if values["kv"] not in DTYPES:
        raise ConfigError(f"kv={values['kv']}", f"kv is one of {', '.join(DTYPES)}", "pass kv=bf16")
    assumed = Assumed(
        compute=values["compute"],
        memory=values["memory"],
        links=values["links"],
        latency_s=values["latency"],
        network_latency_s=values["network_latency"],
    )
    return Choices(
        cache=CacheConfig(values["block"], values["interleave"]),
        dtype=DTYPES[values["kv"]],
        precision=values["weights"],
        combine=values["combine"],
        utilization=values["utilization"],
        assumed=assumed,
    )


def _data(
    shape: ModelShape,
    hardware: Hardware,
    load: Load,
    choices: Choices,
    values: Mapping[str, Any],
    found: Sequence[Candidate],
    advice: Advice,
) -> dict[str, Any]:
    return {
        "model": {"name": shape.name, "source": shape.source},
        "hardware": {
            "name": hardware.name,
            "source": dict(hardware.source or {}),
            "checked": dict(hardware.checked or {}),
            "unconfirmed": hardware.unconfirmed,
        },
        "gpus": values["gpus"],
        "load": {
            "context": load.context,
            "concurrency": load.concurrency,
            "output": load.generated,
            "chunk": load.chunk,
        },
        "weights": choices.precision or shape.precision,
        "assumed": choices.assumed._asdict(),
        "usable_bytes": int(choices.utilization * hardware.memory),
        "recommended": advice.best.to_dict() if advice.best else None,
        "reasons": list(advice.reasons),
        "notes": list(advice.notes),
        "layouts": [candidate.to_dict() for candidate in found],
    }


def _show(
    title: str,
    hardware: Hardware,
    choices: Choices,
    found: Sequence[Candidate],
    advice: Advice,
    *,
    all_rows: bool,
) -> None:
    from cplayers.cli.output import show
    from cplayers.planning.advice import describe, gb, seconds

    shown = list(found if all_rows else found[:SHOWN])
    rows = [
        [
            describe(c),
            "yes" if c.fits else "no",
            gb(c.budget.weights),
            gb(c.budget.kv),
            gb(c.budget.workspace),
            f"{c.budget.max_context:,}",
            f"{c.budget.max_concurrency:,}",
            seconds(c.first_token.total),
            seconds(c.token.total),
            seconds(c.total),
        ]
        for c in shown
    ]
    columns = [
        *("layout", "fits", "weights", "KV cache", "workspace*", "longest context*"),
        *("most requests*", "TTFT*", "TPOT*", "whole load*"),
    ]
    show(
        f"{title}. A card has {gb(choices.utilization * hardware.memory)} to use.",
        columns,
        rows,
        bold=[i for i, c in enumerate(shown) if c is advice.best],
        dim=[i for i, c in enumerate(shown) if not c.fits],
        left=("layout", "fits"),
    )
    if len(found) > len(shown):
        print(f"and {len(found) - len(shown)} more layouts: --all shows them")
    assumed = choices.assumed
    print(
        f"* Predicted, not measured. Assumed: {assumed.compute:.0%} of peak compute, "
        f"{assumed.memory:.0%} of memory bandwidth\n  and {assumed.links:.0%} of link bandwidth are"
        f" reached, a collective takes {seconds(assumed.latency_s)}, nothing overlaps."
    )
    print(f"\nRun {describe(advice.best)}." if advice.best else "")
    for reason in advice.reasons:
        print(f"- {reason}")
    if advice.notes:
        print("\nNotes:")
        for note in advice.notes:
            print(f"- {note}")


COMMAND = Command(
    summary="Which layouts fit a model and a load on given cards, and which to run.",
    text=TEXT,
    options={
        "model": Option(word, REQUIRED, "preset, or a Hugging Face config.json or its folder"),
        "hardware": Option(word, REQUIRED, "preset (h200, h100, b200, a100, ascend-910c) or file"),
        "gpus": Option(count, REQUIRED, "number of cards"),
        "context": Option(count, REQUIRED, "tokens of a request, prompt and output together"),
        "concurrency": Option(count, 1, "requests at a time"),
        "output": Option(count, None, "generated tokens of a request [1,024, or context / 4]"),
        "chunk": Option(count, 8192, "prompt tokens computed in one step"),
        "ttft": Option(duration, None, "longest TTFT that will do, e.g. 2s"),
        "tpot": Option(duration, None, "longest TPOT that will do, e.g. 30ms"),
        "weights": Option(word, None, "bf16, fp8, mxfp4 or fp32 [as published]"),
        "kv": Option(word, "bf16", "type of the KV cache: bf16, fp16 or fp32"),
        "combine": Option(word, "a2a", "how partial results are combined: a2a, ag_rs or ar"),
        **BLOCKS,
        "utilization": Option(fraction, 0.9, "part of a card's memory that may be used"),
        "compute": Option(fraction, 0.5, "part of the peak compute rate that is reached"),
        "memory": Option(fraction, 0.8, "part of the memory bandwidth that is reached"),
        "links": Option(fraction, 0.7, "part of the links' bandwidth that is reached"),
        "latency": Option(duration, 10e-6, "of a collective inside a node, e.g. 10us"),
        "network_latency": Option(duration, 25e-6, "of a collective between nodes"),
    },
    flags={"all": Flag("show every layout"), **JSON, **PNG, **HELP},
    run=run,
)

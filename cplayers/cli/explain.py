"""``cplayers explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cplayers.cli.arguments import Flag, Option, up_to
from cplayers.cli.command import BLOCKS, DEGREES, HELP, JSON, PNG, Command, need, picture, show_json
from cplayers.errors import ConfigError

if TYPE_CHECKING:
    from cplayers.cache import InterleavedLayout, ZigzagLayout
    from cplayers.mesh import Topology
    from cplayers.planning.placement import Run, Share

SHOWN = 24
MOST_GROUPS = 16
MOST_RANKS = 1 << 14
MOST_TOKENS = 1 << 22  # each is looked up

TEXT = """
Shows, for one request:
- where each of its tokens lives: rank of the DCP group, index of the block in the request's block
  table, slot in the block. Tokens that follow one another are one row;
- which tokens of its prompt each PCP rank computes, and how many query-key pairs that is;
- which ranks form the groups of every axis.

Examples:
  cplayers explain tokens=22 pcp=4 dcp=4 interleave=2 block=4
  cplayers explain tokens=22 pcp=4 dcp=4 interleave=2 block=4 --png placement.png
  cplayers explain tokens=1M tp=8 dcp=8
"""


def run(values: Mapping[str, Any]) -> int:
    """Explain.

    Args:
        values: Of the arguments.
    """
    from cplayers.cache import InterleavedLayout, ZigzagLayout
    from cplayers.mesh import Topology
    from cplayers.planning.placement import runs, shares

    if not values["json"]:
        need("rich", "the tables of cplayers explain")
    if values["png"]:
        need("matplotlib", "the picture of cplayers explain")
        picture(values["png"])
    topology = Topology(*(values[name] for name in ("tp", "dcp", "pcp", "dp")))
    _ = topology.dcp_tp  # refuses a dcp that tp and pcp do not allow
    if topology.world_size > MOST_RANKS:
        raise ConfigError(
            f"{topology.world_size:,} ranks",
            f"groups of at most {MOST_RANKS:,} ranks are listed",
            "explain dp=1 or smaller degrees: the pattern repeats",
        )
    tokens = values["tokens"]
    cache = InterleavedLayout(topology.dcp, values["interleave"], values["block"])
    prompt = ZigzagLayout(topology.pcp, tokens)
    if values["png"]:  # first: it refuses what cannot be drawn
        from cplayers.viz.charts import placement_png

        split = prompt if topology.pcp > 1 else None
        placement_png(cache, tokens, split, Path(values["png"]))
    if values["json"]:
        show_json(
            {
                "tokens": tokens,
                "groups": {axis: topology.groups(axis) for axis in _axes()},
                "cache": [asdict(run) for run in runs(cache, tokens)],
                "prompt": [asdict(share) for share in shares(prompt)],
            }
        )
    else:
        _show_cache(cache, tokens, runs(cache, tokens), topology, all_rows=values["all"])
        _show_prompt(prompt, shares(prompt))
        _show_groups(topology)
    if values["png"] and not values["json"]:
        print(f"Picture: {values['png']}")
    return 0


def _axes() -> tuple[str, ...]:
    from cplayers.mesh import AXES

    return AXES


def _show_cache(
    cache: InterleavedLayout, tokens: int, found: list[Run], topology: Topology, *, all_rows: bool
) -> None:
    from cplayers.cli.output import show

    shown = found
    if not all_rows and len(found) > SHOWN:
        shown = [*found[: SHOWN - 4], *found[-4:]]
    group = topology.groups("dcp")[0]
    rows = [
        [span(run.first, run.last), run.rank, group[run.rank], run.block, _slots(run)]
        for run in shown
    ]
    columns = ["tokens", "rank in its DCP group", "of the first group", "block", "slots"]
    show(f"KV cache: {tokens:,} tokens on {cache.cp_size} ranks", columns, rows)
    if len(found) > len(shown):
        print(f"{len(found) - len(shown):,} rows in the middle are left out: --all shows them")
    counts = [cache.count_before(tokens, rank) for rank in range(cache.cp_size)]
    blocks = cache.blocks(tokens)
    print(
        f"Tokens by rank: {', '.join(f'{n:,}' for n in counts)}. Each rank takes {blocks:,} blocks "
        f"of {cache.block_size}, {blocks * cache.block_size * cache.cp_size - tokens:,} slots stay "
        "free.\n"
    )


def _show_prompt(prompt: ZigzagLayout, found: list[Share]) -> None:
    from cplayers.cli.output import show

    total = sum(share.work for share in found)
    rows = [
        [
            share.rank,
            *(span(*chunk) if chunk else "-" for chunk in (share.early, share.late)),
            f"{share.tokens:,}",
            f"{share.work:,}",
            f"{share.work / total:.1%}",
        ]
        for share in found
    ]
    columns = ["PCP rank", "early chunk", "late chunk", "tokens", "causal pairs", "share"]
    show(f"Prompt: {prompt.length:,} tokens on {prompt.cp_size} ranks, zigzag", columns, rows)
    print()


def _show_groups(topology: Topology) -> None:
    from cplayers.cli.output import show

    rows = []
    for axis in _axes():
        groups = topology.groups(axis)
        names = " ".join(str(group) for group in groups[:MOST_GROUPS])
        more = f" and {len(groups) - MOST_GROUPS} more" if len(groups) > MOST_GROUPS else ""
        rows.append([axis, topology.size(axis), names + more])
    title = f"Groups of {topology.world_size} ranks, (dp, pcp, tp) with tp fastest"
    show(title, ["axis", "size", "groups"], rows, left=("axis", "groups"))


def span(first: int, last: int) -> str:
    """A range of numbers in words.

    Args:
        first: The first.
        last: The last.
    """
    return f"{first:,}" if first == last else f"{first:,} - {last:,}"


def _slots(run: Run) -> str:
    return span(run.slot, run.slot + run.last - run.first)


COMMAND = Command(
    summary="Where each token of a request lives, who computes what, who the groups are.",
    text=TEXT,
    options={
        "tokens": Option(up_to(MOST_TOKENS), 22, "tokens of the request"),
        **DEGREES,
        **BLOCKS,
    },
    flags={"all": Flag("show every row"), **JSON, **PNG, **HELP},
    run=run,
)

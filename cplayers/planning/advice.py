"""The recommendation: the layout that finishes the load first, and the reasons in words.

Three questions decide, and the reasons answer them: does one sequence outgrow a card (DCP), does
time to the first token at moderate concurrency cost most (PCP), are sequences short and many (data
parallel)?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cplayers.planning.plan import MOST_CARDS, Candidate, Choices, Load, any_fits, candidates
from cplayers.planning.shape import ModelShape
from cplayers.planning.speeds import Hardware


class Advice(NamedTuple):
    """What to run.

    Attributes:
        best: The layout, or ``None`` where none fits.
        reasons: Why, a sentence each.
        notes: What to know about the figures.
    """

    best: Candidate | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...]


def advise(
    shape: ModelShape,
    hardware: Hardware,
    gpus: int,
    load: Load,
    choices: Choices | None = None,
    *,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
) -> tuple[list[Candidate], Advice]:
    """All layouts, and which to run.

    Args:
        shape: The model.
        hardware: The cards.
        gpus: How many.
        load: What is asked of them.
        choices: How the model runs.
        ttft_s: Predicted time to the first token that a layout may have at most, or ``None``.
        tpot_s: Predicted time per output token that it may have at most, or ``None``.

    Returns:
        The candidates, as `cplayers.planning.candidates` sorts them, and the advice.

    Raises:
        ConfigError: As `cplayers.planning.candidates` does.
    """
    choices = choices or Choices()
    found = candidates(shape, hardware, gpus, load, choices)
    notes = _notes(shape, hardware, load, choices, found)
    fitting = [c for c in found if c.fits]
    if not fitting:
        reasons = _nothing_fits(shape, hardware, gpus, load, choices, found)
        return found, Advice(None, tuple(reasons), notes)
    in_time = [
        c
        for c in fitting
        if (ttft_s is None or c.first_token.total <= ttft_s)
        and (tpot_s is None or c.token.total <= tpot_s)
    ]
    if not in_time:
        quickest = min(c.first_token.total for c in fitting), min(c.token.total for c in fitting)
        reasons = [
            f"No layout that fits keeps to the targets: the best predictions are a TTFT of "
            f"{seconds(quickest[0])} and a TPOT of {seconds(quickest[1])}."
        ]
        return found, Advice(None, tuple(reasons), notes)
    best = in_time[0]
    reasons = [_why_dcp(best, fitting, found), _why_pcp(best, fitting, found), _why_dp(best, load)]
    return found, Advice(best, tuple(reason for reason in reasons if reason), notes)


def _why_dcp(best: Candidate, fitting: Sequence[Candidate], found: Sequence[Candidate]) -> str:
    tp, dcp, pcp, dp = best.degrees
    same = _find(found, lambda c: c.degrees == (tp, 1, pcp, dp))
    alone = same.budget.sequence if same else best.budget.sequence
    if dcp == 1:
        return (
            f"One sequence takes {gb(alone)} of KV on a card, of which {gb(best.budget.free)} are "
            f"free beside the weights: it does not outgrow the card, and dcp=1 sends nothing."
        )
    room = same.budget.free if same else best.budget.free
    if alone > room:
        return (
            f"One sequence outgrows a card: with dcp=1 it takes {gb(alone)} of KV on each, and "
            f"{gb(max(room, 0))} are free beside the weights. dcp={dcp} makes it "
            f"{gb(best.budget.sequence)}."
        )
    if not any(c.topology.dcp == 1 for c in fitting):
        return (
            f"With dcp=1 a card has room for {room // alone} of the {best.budget.sequences} "
            f"sequences ({gb(alone)} of KV each); dcp={dcp} makes a sequence "
            f"{gb(best.budget.sequence)}."
        )
    assert same is not None
    return (
        f"dcp={dcp} makes a card read {gb(best.budget.sequence)} of KV for a sequence in place of "
        f"{gb(alone)}: predicted TPOT {seconds(best.token.total)} in place of "
        f"{seconds(same.token.total)}."
    )


def _why_pcp(best: Candidate, fitting: Sequence[Candidate], found: Sequence[Candidate]) -> str:
    first = best.first_token.total
    if best.topology.pcp > 1:
        other = _find(fitting, lambda c: c.topology.pcp == 1)
        if other is None:
            return f"No layout with pcp=1 fits; pcp={best.topology.pcp} spreads the cache as well."
        return (
            f"Prompts cost most: pcp={best.topology.pcp} brings the predicted TTFT to "
            f"{seconds(first)}; the best layout without PCP, {describe(other)}, has "
            f"{seconds(other.first_token.total)}."
        )
    other = _find(fitting, lambda c: c.topology.pcp > 1)
    if other is not None:
        return (
            f"PCP does not pay for the whole load: {describe(other)} has a predicted TTFT of "
            f"{seconds(other.first_token.total)}, here it is {seconds(first)}, but finishes after "
            f"{seconds(other.total)}, here after {seconds(best.total)}."
        )
    if any(c.topology.pcp > 1 for c in found):
        return "PCP would divide the TTFT, but it keeps a copy of the weights: no such layout fits."
    return ""


def _why_dp(best: Candidate, load: Load) -> str:
    dp = best.topology.dp
    if dp == 1:
        return ""
    cards = best.topology.world_size // dp
    size = f"{cards} card{'s' if cards > 1 else ''}"
    return (
        f"Requests share out: {dp} replicas of {size} take up to {best.budget.sequences} of the "
        f"{load.concurrency:,} each, and do not talk to one another."
    )


def _nothing_fits(
    shape: ModelShape,
    hardware: Hardware,
    gpus: int,
    load: Load,
    choices: Choices,
    found: Sequence[Candidate],
) -> list[str]:
    """What is missing, and what would do."""
    least = found[0]
    reasons = [
        f"Nothing fits: {describe(least)} needs least, {gb(least.budget.used)} a card of which "
        f"{gb(least.budget.capacity)} may be used ({gb(least.budget.weights)} of weights, "
        f"{gb(least.budget.kv)} of KV, about {gb(least.budget.workspace)} of workspace)."
    ]
    context = max(c.budget.max_context for c in found)
    concurrency = max(c.budget.max_concurrency for c in found)
    smaller = []
    if context:
        smaller.append(f"context={context:,} at this concurrency")
    if concurrency:
        smaller.append(f"concurrency={concurrency} at this context")
    if smaller:
        reasons.append(f"These cards hold {', or '.join(smaller)}.")
    more = 2 * gpus
    while more <= MOST_CARDS:
        if any_fits(shape, hardware, more, load, choices):
            reasons.append(f"gpus={more} would do.")
            break
        more *= 2
    return reasons


def _notes(
    shape: ModelShape,
    hardware: Hardware,
    load: Load,
    choices: Choices,
    found: Sequence[Candidate],
) -> tuple[str, ...]:
    notes = []
    if hardware.unconfirmed:
        notes.append(f"Not confirmed for {hardware.name}: {hardware.unconfirmed}.")
    if shape.max_positions and load.context > shape.max_positions:
        notes.append(
            f"{shape.name} is made for {shape.max_positions:,} positions, and {load.context:,} are "
            "asked for."
        )
    precision = choices.precision or shape.precision
    if precision not in ("bf16", "fp32"):
        notes.append(
            f"Weights are counted in {precision}; cplayers.hf runs dequantized models, which "
            "weights=bf16 counts."
        )
    if shape.windowed_layers and shape.windowed_layers < shape.num_layers:
        notes.append(
            f"{shape.windowed_layers} of {shape.num_layers} layers see {shape.window} tokens; the "
            "cache keeps whole sequences in all layers."
        )
    if shape.windowed_layers == shape.num_layers:
        notes.append(
            f"All layers see {shape.window:,} tokens. Whole sequences are counted, though the "
            "cache can give back blocks that are out of the window."
        )
    if any(c.replicate_q for c in found):
        name = "decode='replicate_q'" if shape.latent else "q_proj='tpa'"
        notes.append(f"tpa stands for {name}: queries are replicated in a DCP group.")
    return tuple(notes)


def _find(candidates: Sequence[Candidate], wanted: Callable[[Candidate], bool]) -> Candidate | None:
    return next((c for c in candidates if wanted(c)), None)


def describe(candidate: Candidate) -> str:
    """A layout in words.

    Args:
        candidate: The layout.
    """
    tp, dcp, pcp, dp = candidate.degrees
    words = f"tp={tp}, dcp={dcp}, pcp={pcp}"
    words += f", dp={dp}" if dp > 1 else ""
    return words + (", tpa" if candidate.replicate_q else "")


def gb(count: float) -> str:
    """Bytes in GB of 1e9 bytes, or smaller units.

    Args:
        count: Bytes.
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def seconds(value: float) -> str:
    """A time in s, ms or us, as arguments are written.

    Args:
        value: Seconds.
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value:,.0f} {unit}"
    return f"{value / 1e-6:.3g} us"

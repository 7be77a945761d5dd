"""The one judge of a configuration, asked by every layer, config and command.

Rules, with ``k = dcp_tp = dcp / pcp`` and ``tpa = tp / k``::

    always              dcp is 1 or pcp * k with k dividing tp; num_heads % tp == 0
    grouped-query       num_heads % num_kv_heads == 0
      heads over tp     one of tp, num_kv_heads divides the other; where k > 1 also
                        k * num_kv_heads <= tp and (tp // num_kv_heads) % k == 0
      heads over tpa    (replicate_q) one of tpa, num_kv_heads divides the other
    latent (MLA)        nothing more: every rank can hold the one latent head

The rule for ``k > 1`` says that all ranks of a DCP group read the same KV heads. Counter-example:
tp=6, num_kv_heads=2, dcp=2 has three ranks per KV head, so the group ``[2, 3]`` would span both.
"""

from __future__ import annotations

from dataclasses import replace

from cplayers.errors import ConfigError
from cplayers.mesh.topology import Topology

COMBINES = ("ag_rs", "a2a", "ar")
Q_PROJECTIONS = ("gather", "tpa")


def validate(
    topology: Topology,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    block_size: int,
    interleave_size: int,
    replicate_q: bool = False,
    window: int | None = None,
    combine: str | None = None,
    q_proj: str | None = None,
    head_dim: int | None = None,
) -> None:
    """Refuse a configuration that cannot work. Plain arithmetic, so alike on every rank.

    Args:
        topology: Degrees of parallelism.
        num_heads: Query heads of the model.
        num_kv_heads: KV heads of the model; ``None`` for latent attention (MLA).
        block_size: Tokens per cache block and rank. Need not be a multiple of interleave_size.
        interleave_size: Consecutive tokens on one rank before the next rank has its turn.
        replicate_q: Heads are split over tpa instead of tp, as with ``q_proj="tpa"``.
        window: Sliding window in tokens, or ``None`` for full attention.
        combine: How partials are combined, one of ``COMBINES``.
        q_proj: How queries reach a DCP group, one of ``Q_PROJECTIONS``.
        head_dim: Width of a head.

    Raises:
        ConfigError: Naming the value, the rule that it breaks, and a remedy.
    """
    for name, number in (
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
        ("block_size", block_size),
        ("interleave_size", interleave_size),
        ("window", window),
        ("head_dim", head_dim),
    ):
        _check_count(name, number, optional=name in ("num_kv_heads", "window", "head_dim"))
    _check_choice("combine", combine, COMBINES)
    _check_choice("q_proj", q_proj, Q_PROJECTIONS)
    if replicate_q and q_proj == "gather":
        raise ConfigError(
            "replicate_q=True, q_proj='gather'",
            "queries that are replicated are not gathered",
            "pass q_proj='tpa', or replicate_q=False",
        )
    over_tpa = replicate_q or q_proj == "tpa"
    broken = _broken_rule(topology, num_heads, num_kv_heads, over_tpa)
    if broken is not None:
        raise ConfigError(*broken, _remedy(topology, num_heads, num_kv_heads, over_tpa))


def legal_dcp(
    topology: Topology, *, num_heads: int, num_kv_heads: int | None, replicate_q: bool = False
) -> list[int]:
    """The values of dcp that this model allows with the tp and pcp of ``topology``, ascending."""
    return [
        dcp
        for dcp in topology.possible_dcp()
        if _broken_rule(replace(topology, dcp=dcp), num_heads, num_kv_heads, replicate_q) is None
    ]


def _check_count(name: str, number: int | None, *, optional: bool) -> None:
    if number is None and optional:
        return
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        remedy = f"pass {name}=None to leave it out" if optional else f"pass a {name} of 1 or more"
        raise ConfigError(f"{name}={number!r}", f"{name} is an int of at least 1", remedy)


def _check_choice(name: str, choice: str | None, choices: tuple[str, ...]) -> None:
    if choice is not None and choice not in choices:
        raise ConfigError(
            f"{name}={choice!r}", f"{name} is one of {choices}", f"pass {name}={choices[0]!r}"
        )


def _broken_rule(
    topology: Topology, num_heads: int, num_kv_heads: int | None, over_tpa: bool
) -> tuple[str, str] | None:
    """The offending value and the rule it breaks, or ``None`` where all rules hold."""
    tp, dcp, pcp = topology.tp, topology.dcp, topology.pcp
    if dcp not in topology.possible_dcp():
        return f"dcp={dcp} with tp={tp}, pcp={pcp}", "dcp is 1, or pcp * k with k dividing tp"
    if num_heads % tp:
        return f"num_heads={num_heads}, tp={tp}", "num_heads is a multiple of tp"
    if num_kv_heads is None:
        return None
    if num_heads % num_kv_heads:
        return (
            f"num_heads={num_heads}, num_kv_heads={num_kv_heads}",
            "num_heads is a multiple of num_kv_heads",
        )
    name, width = ("tpa", topology.tpa) if over_tpa else ("tp", tp)
    k = topology.dcp_tp
    value = f"num_kv_heads={num_kv_heads}, tp={tp}, dcp={dcp}, pcp={pcp}"
    if width % num_kv_heads and num_kv_heads % width:
        return (
            f"{value} ({name}={width})",
            f"one of {name} and num_kv_heads divides the other, so that a rank's query heads "
            "read whole KV heads",
        )
    if over_tpa or k == 1:
        return None
    if k * num_kv_heads > tp:
        return (
            f"{value} (dcp/pcp={k})",
            f"(dcp / pcp) * num_kv_heads is at most tp, but {k} * {num_kv_heads} > {tp}",
        )
    if tp // num_kv_heads % k:
        return (
            f"{value} (dcp/pcp={k})",
            f"dcp / pcp divides tp // num_kv_heads = {tp // num_kv_heads}, or else a DCP group "
            "spans ranks of different KV heads",
        )
    return None


def _remedy(topology: Topology, num_heads: int, num_kv_heads: int | None, over_tpa: bool) -> str:
    """Values that would be legal: of dcp for this tp and pcp, or else of tp."""
    legal = legal_dcp(
        topology, num_heads=num_heads, num_kv_heads=num_kv_heads, replicate_q=over_tpa
    )
    if legal:
        remedy = f"with tp={topology.tp}, pcp={topology.pcp} use dcp from {legal}"
        if not over_tpa and topology.dcp in legal_dcp(
            topology, num_heads=num_heads, num_kv_heads=num_kv_heads, replicate_q=True
        ):
            remedy += ", or q_proj='tpa', which splits heads over tpa instead of tp"
        return remedy
    if num_kv_heads is not None and num_heads % num_kv_heads:
        divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        return f"with num_heads={num_heads} use num_kv_heads from {divisors}"
    tps = [
        tp
        for tp in range(1, num_heads + 1)
        if _broken_rule(Topology(tp=tp), num_heads, num_kv_heads, over_tpa) is None
    ]
    return f"with num_heads={num_heads}, num_kv_heads={num_kv_heads} use tp from {tps}"

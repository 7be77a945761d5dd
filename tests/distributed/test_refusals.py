"""Configurations that cannot work are refused on live ranks: alike, and before anything exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cplayers import ConfigError, CPMesh, DCPGQAAttention, DCPMLAAttention, Topology

GOLD = json.loads((Path(__file__).parents[1] / "gold" / "topology.json").read_text())
VERDICTS = [v for v in GOLD["verdicts"] if v["tp"] * v["pcp"] <= 9]


def build(verdict: dict[str, Any]) -> tuple[str | None, int]:
    """The refusal, and how many bytes of Parameters were made before it."""
    made = 0
    original = torch.nn.Linear.__init__

    def counting(self: torch.nn.Linear, *args: Any, **kwargs: Any) -> None:
        nonlocal made
        original(self, *args, **kwargs)
        made += self.weight.nbytes

    torch.nn.Linear.__init__ = counting
    try:
        mesh = CPMesh(Topology(tp=verdict["tp"], dcp=verdict["dcp"], pcp=verdict["pcp"]))
        heads, kv_heads, replicate = (
            verdict[name] for name in ("num_heads", "num_kv_heads", "replicate_q")
        )
        if kv_heads is None:
            decode = "replicate_q" if replicate else "gather_q"
            DCPMLAAttention(16, heads, None, 8, 6, 4, 5, layer_idx=0, decode=decode, mesh=mesh)
        else:
            q_proj = "tpa" if replicate else "gather"
            DCPGQAAttention(16, heads, kv_heads, 8, layer_idx=0, q_proj=q_proj, mesh=mesh)
    except ConfigError as error:
        assert error.value and error.rule and error.remedy
        return str(error), made
    finally:
        torch.nn.Linear.__init__ = original
    return None, made


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda v: v["why"] or "legal")
def test_gold_verdicts_on_live_ranks(ranks, verdict: dict[str, Any]) -> None:
    results = ranks(9).run(build, verdict, n=verdict["tp"] * verdict["pcp"])
    messages = {message for message, _ in results}
    assert len(messages) == 1, "ranks judge differently"
    message, made = results[0]
    assert (message is None) == verdict["ok"]
    assert (made > 0) == verdict["ok"], "a refused layer has made Parameters"
    if message is not None:
        assert f"dcp={verdict['dcp']}" in message or f"num_heads={verdict['num_heads']}" in message


def test_the_gold_file_has_refusals_of_every_kind_here() -> None:
    assert sum(not v["ok"] for v in VERDICTS) >= 8
    assert sum(v["ok"] for v in VERDICTS) >= 5
    latent = [v["ok"] for v in VERDICTS if v["num_kv_heads"] is None]
    assert True in latent and False in latent

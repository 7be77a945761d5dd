"""The examples as a user starts them: as processes, on one rank and on several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = "The keeper's dog is called Biscuit. The barge is called Patience."
QUESTION = "question='What is the dog called?'"
LAYERS, HEADS, KV_HEADS, HEAD_DIM, FP32 = 30, 9, 3, 64, 4  # of SmolLM2 135M


def start(
    name: str, *args: str, ranks: int = 1, cwd: Path = EXAMPLES
) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(EXAMPLES / name), *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def generate(smollm2: Path, folder: Path, ranks: int) -> tuple[str, dict[str, Any]]:
    """Run generate.py on a short document; returns what it printed and its JSON."""
    (folder / "short.txt").write_text(SHORT)
    result = folder / "result.json"
    work = folder / "work"
    work.mkdir()
    done = start(
        "generate.py",
        f"model.cache_dir={smollm2}",
        f"prompt_file={folder / 'short.txt'}",
        f"json={result}",
        QUESTION,
        "generation.max_new_tokens=8",
        ranks=ranks,
        cwd=work,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "a run without mistakes warns of nothing"
    assert list(work.iterdir()) == [], "nothing is written to the working directory"
    facts = json.loads(result.read_text())
    assert isinstance(facts, dict)
    return done.stdout, facts


@pytest.mark.parametrize("ranks", [1, 2])
def test_generate(ranks: int, smollm2: Path, tmp_path: Path) -> None:
    printed, facts = generate(smollm2, tmp_path, ranks)
    assert facts["mesh"] == {"tp": 1, "dcp": ranks, "pcp": ranks, "dp": 1}
    assert facts["tokens_equal"] is True
    assert facts["here"]["tokens"] == facts["plain"]["tokens"]
    assert 1 < len(facts["here"]["tokens"]) <= 8
    assert printed.count("What is the dog called?") == 1, "only rank 0 prints"
    assert "Biscuit" in printed

    token = LAYERS * 2 * KV_HEADS * HEAD_DIM * FP32
    tokens, rest = divmod(facts["plain"]["kv_bytes"], token)
    assert rest == 0
    blocks = -(-tokens // (16 * ranks))
    assert facts["here"]["kv_bytes"] == blocks * 16 * token
    # One all-to-all a layer: each head's output and its lse, to the one other rank.
    peers = ranks - 1
    assert facts["here"]["step_collectives"] == peers * LAYERS
    assert facts["here"]["step_bytes_sent"] == peers * LAYERS * HEADS * (HEAD_DIM * FP32 + 4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_swap_layers(ranks: int) -> None:
    done = start("swap_layers.py", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Topology(") == 1
    assert f"Topology(tp=1, dcp={ranks}, pcp={ranks}, dp=1)" in done.stdout


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "decode"), [(1, "auto"), (2, "auto"), (2, "gather_kv"), (4, "replicate_q")]
)
def test_deepseek_mla(ranks: int, decode: str) -> None:
    done = start("deepseek_mla.py", decode, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "a run without mistakes warns of nothing"
    tokens, kept, sent, *report = done.stdout.splitlines()
    assert len(json.loads(tokens)) == 21
    # 128 tokens of 3 layers, 32 + 8 values each, in fp32. Blocks of 4 divide each rank's share.
    whole = 128 * 3 * 40 * 4
    here = f"{whole // ranks} bytes per rank, {whole} with plain TP"
    assert kept == f"KV cache of 128 tokens: {here}"

    peers, heads = ranks - 1, 8 // ranks
    queries, latents, values = heads * 40 * 4, heads * (32 * 4 + 4), heads * (12 * 4 + 4)
    calls, attention = {  # 129 tokens, of which the first of two ranks has 65
        "auto": (2, peers * (queries + latents)),  # so few heads visit any longer context
        "replicate_q": (1, peers * values),
        "gather_kv": (1, peers * 65 * 40 * 4),
    }[decode]
    # One sum over TP for each output projection, MLP, shared expert and set of routed experts.
    sums = 3 + 1 + 2 * 2
    total = 3 * attention + sums * 2 * peers * 64 * 4 // ranks + peers * 128 // ranks * 4
    count = 3 * calls + sums + 1 if ranks > 1 else 0
    assert sent == f"One token: {count} collectives, {total} bytes sent per rank"
    assert report[0] == f"ranks      Topology(tp={ranks}, dcp={ranks}, pcp=1, dp=1)"
    assert f"decode={decode}" in report[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_custom_stack(ranks: int) -> None:
    done = start("custom_stack.py", ranks=ranks)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    requests = [line for line in lines if line[-1] == "yes"]
    assert [line[0] for line in requests] == ["a", "b", "c", "d", "e"]
    assert f"dcp={ranks}" in done.stdout
    # The example shows something only if prompts joined others, waited, and gave blocks back.
    mixed = int(done.stdout.splitlines()[0].split(", ")[-1].split()[0])
    assert mixed >= 2
    assert sum(int(line[4]) for line in requests) > 0
    assert sum(int(line[5]) for line in requests) > 0


@pytest.mark.slow
def test_disaggregated() -> None:
    done = start("disaggregated.py", ranks=6)
    assert done.returncode == 0, done.stderr
    *batches, result = done.stdout.splitlines()
    assert len(batches) == 3
    assert result == "12 requests, 12 tokens each, as transformers generates them"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_dynamic_cp(ranks: int, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "trace.png"
    done = start("dynamic_cp.py", str(trace), str(picture), ranks=ranks)
    assert done.returncode == 0, done.stderr
    _, *requests, last = done.stdout.splitlines()
    assert len(requests) == 9 and all(line.endswith("yes") for line in requests)
    moves = sum(json.loads(line)["event"] == "migrate" for line in trace.read_text().splitlines())
    assert last.startswith(f"{moves} moves while decoding;")
    assert (moves > 0) == (ranks > 1)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_generate_help() -> None:
    done = start("generate.py", "--help")
    assert done.returncode == 0, done.stderr
    for words in ("torchrun --standalone", "tp3_pcp2_dcp2", "max_new_tokens: 32", "question:"):
        assert words in done.stdout


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("generation.max_token=3", "Key 'max_token' not in 'GenerationConf'"),
        ("mesh=tp3_pcp2_dcp2", "torchrun --standalone --nproc-per-node 6"),
    ],
)
def test_generate_refuses_mistakes(override: str, words: str, smollm2: Path) -> None:
    done = start("generate.py", f"model.cache_dir={smollm2}", override)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""

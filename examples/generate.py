"""Answer a question about a document with SmolLM2, its context spread over ranks.

    torchrun --standalone --nproc-per-node 2 examples/generate.py
    python examples/generate.py --help

Prints the text as it is made, then compares with the plain model on one process: the tokens, the
memory of the KV cache, what was sent, and the times.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
import transformers
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from smollm2 import convert, default_cache_dir, load_model, load_tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM, TextStreamer
from transformers.generation.streamers import BaseStreamer

from cplayers.conf import CacheConf, GQAConf, PrefillConf, TopologyConf, register_configs
from cplayers.errors import ConfigError, CPLayersError
from cplayers.hf import CPState, parallelize
from cplayers.mesh import CPMesh, Topology

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # by torchrun
FIRST_TO_SPEAK = timedelta(seconds=10)


@dataclass
class ModelConf:
    cache_dir: str | None = None  # of the converted weights; by default in the user's cache folder


@dataclass
class GenerationConf:
    max_new_tokens: int = 32
    do_sample: bool = False
    temperature: float = 0.7
    seed: int = 0


@dataclass
class GenerateConf:
    mesh: TopologyConf = field(default_factory=TopologyConf)
    cache: CacheConf = field(default_factory=CacheConf)
    attention: GQAConf = field(default_factory=GQAConf)
    prefill: PrefillConf = field(default_factory=PrefillConf)
    model: ModelConf = field(default_factory=ModelConf)
    generation: GenerationConf = field(default_factory=GenerationConf)
    chunk_size: int | None = None  # most tokens of the prompt in a step; by default all of them
    prompt_file: str = str(Path(__file__).with_name("document.txt"))
    question: str = "When did the lighthouse first use an electric lamp?"
    check: bool = True  # also run the plain model, on rank 0, and compare
    json: str | None = None  # a file to write the result to


@dataclass
class Result:
    """What one generation took. Bytes and collectives are those of attention, on one rank."""

    tokens: list[int]
    kv_bytes: int
    prompt_bytes_sent: int
    step_bytes_sent: int
    step_collectives: int
    first_token_s: float
    token_s: float


class Recorder(BaseStreamer):
    """Notes time and traffic at every token, and hands the token on to be printed."""

    def __init__(self, cp: CPState | None, text: TextStreamer | None) -> None:
        self.cp, self.text = cp, text
        self.marks: list[tuple[float, int, int]] = []  # at the prompt, then at each token
        self.kv_bytes = 0

    def put(self, value: Tensor) -> None:
        count = sent = 0
        if self.cp is not None:
            count, sent = self.cp.mesh.traffic.count(), self.cp.mesh.traffic.bytes()
            self.kv_bytes = self.cp.cache.used_bytes
        self.marks.append((time.perf_counter(), count, sent))
        if self.text is not None:
            self.text.put(value)

    def end(self) -> None:
        if self.text is not None:
            self.text.end()

    def result(self, tokens: list[int], kv_bytes: int) -> Result:
        start, first, last = self.marks[0], self.marks[1], self.marks[-1]
        before = self.marks[-2] if len(self.marks) > 2 else last
        return Result(
            tokens=tokens,
            kv_bytes=kv_bytes,
            prompt_bytes_sent=first[2] - start[2],
            step_bytes_sent=last[2] - before[2],
            step_collectives=last[1] - before[1],
            first_token_s=first[0] - start[0],
            token_s=(last[0] - first[0]) / max(1, len(self.marks) - 2),
        )


@contextlib.contextmanager
def prefill_bar(
    model: LlamaForCausalLM, tokens: int, chunk_size: int | None, console: Console
) -> Iterator[None]:
    """Show how far the prompt is, layer by layer and chunk by chunk."""
    layers = model.get_decoder().layers
    chunks = 1 if chunk_size is None else -(-tokens // chunk_size)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeElapsedColumn(), console=console)
    work = f"{chunks} chunks, layers:" if chunks > 1 else "layers:"
    task = progress.add_task(f"Prompt of {tokens} tokens, {work}", total=len(layers) * chunks)
    handles: list[Any] = []

    def layer_done(*_: object) -> None:
        progress.advance(task)
        if progress.finished:
            progress.stop()
            for handle in handles:
                handle.remove()

    handles += [layer.register_forward_hook(layer_done) for layer in layers]
    with progress:
        yield


def generate(
    model: LlamaForCausalLM, inputs: Any, cfg: GenerationConf, recorder: Recorder
) -> Result:
    """Generate greedily, or by sampling with the configured seed."""
    torch.manual_seed(cfg.seed)
    sampling = {"temperature": cfg.temperature, "top_k": 0} if cfg.do_sample else {}
    output = model.generate(
        **inputs,
        max_new_tokens=cfg.max_new_tokens,
        do_sample=cfg.do_sample,
        streamer=recorder,
        **sampling,
    )
    prompt = inputs["input_ids"].shape[1]
    config = model.config
    kept = output.shape[1] - 1  # the last token was never fed back
    plain_bytes = (
        kept * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    )
    return recorder.result(output[0, prompt:].tolist(), recorder.kv_bytes or plain_bytes)


def table_of(here: Result, plain: Result | None, topology: Topology, combine: str) -> Table:
    degrees = " ".join(f"{axis}={topology.size(axis)}" for axis in ("tp", "pcp", "dcp"))
    table = Table(title="Attention over a spread context", title_justify="left")
    table.add_column("per rank")
    rows = {
        "tokens": "tokens",
        "kv_bytes": "KV cache, MB",
        "prompt_bytes_sent": "sent for the prompt, MB",
        "step_bytes_sent": "sent for a token, KB",
        "step_collectives": "collectives for a token",
        "first_token_s": "time to first token, s",
        "token_s": "time for a token, ms",
    }
    columns = [here] if plain is None else [plain, here]
    for result in columns:
        table.add_column(
            "plain, one process" if result is plain else f"{degrees}\n{combine}", justify="right"
        )
    for name, label in rows.items():
        table.add_row(label, *(_cell(name, getattr(result, name)) for result in columns))
    return table


def _cell(name: str, value: Any) -> str:
    if name == "tokens":
        return str(len(value))
    if name == "step_collectives":
        return str(value)
    scale = {"step_bytes_sent": 1e3, "first_token_s": 1.0, "token_s": 1e-3}.get(name, 1e6)
    return f"{value / scale:.2f}"


_plain_results: dict[str, Result] = {}


def plain_result(folder: Path, inputs: Any, cfg: GenerationConf, console: Console) -> Result:
    """The plain model's answer on this process; computed once for the jobs of a sweep."""
    key = f"{inputs['input_ids'].tolist()} {cfg}"
    if key not in _plain_results:
        with console.status("Checking against the plain model on one process"):
            recorder = Recorder(None, None)
            _plain_results[key] = generate(load_model(folder), inputs, cfg, recorder)
    return _plain_results[key]


def topology_of(cfg: Any) -> Topology:
    """The layout, which must fit the processes that were started."""
    topology: Topology = instantiate(cfg.mesh)
    if topology.world_size != RANKS:
        needed = topology.world_size
        start = f"torchrun --standalone --nproc-per-node {needed}" if needed > 1 else "python"
        raise ConfigError(
            f"{topology} on {RANKS} process{'es' if RANKS > 1 else ''}",
            f"this mesh has dp * pcp * tp = {needed} ranks",
            f"start it as `{start} examples/generate.py mesh=...`, or leave mesh out",
        )
    return topology


def run(cfg: Any) -> None:
    console = Console(quiet=RANK != 0, highlight=False)
    folder = Path(cfg.model.cache_dir) if cfg.model.cache_dir else default_cache_dir()
    topology = topology_of(cfg)
    document = Path(cfg.prompt_file).read_text()
    mesh = CPMesh(topology)
    if RANK == 0 and not folder.exists():
        with console.status(f"Converting the weights, once, to {folder}"):
            convert(folder)
    wait_for_all()

    tokenizer = load_tokenizer(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{document}\n\n{cfg.question}"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    model = parallelize(
        load_model(folder),
        mesh,
        cache=instantiate(cfg.cache),
        q_proj=cfg.attention.q_proj,
        combine=cfg.attention.combine,
        prefill=cfg.prefill.strategy,
        workspace_tokens=cfg.prefill.workspace_tokens,
        backend=cfg.attention.backend,
        chunk_size=cfg.chunk_size,
    )
    console.print(f"[bold]{cfg.question}[/bold]")
    text = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    recorder = Recorder(model.cp, text if RANK == 0 else None)
    with prefill_bar(model, inputs["input_ids"].shape[1], cfg.chunk_size, console):
        here = generate(model, inputs, cfg.generation, recorder)
    del model
    if RANK == 0:
        finish(cfg, here, topology, folder, inputs, console)
    wait_for_all()


def finish(
    cfg: Any, here: Result, topology: Topology, folder: Path, inputs: Any, console: Console
) -> None:
    """Compare with the plain model and show, and write, the result."""
    plain = plain_result(folder, inputs, cfg.generation, console) if cfg.check else None
    console.print(table_of(here, plain, topology, cfg.attention.combine))
    equal = None if plain is None else plain.tokens == here.tokens
    if cfg.json:
        facts = {
            "mesh": asdict(topology),
            "tokens_equal": equal,
            "here": asdict(here),
            "plain": None if plain is None else asdict(plain),
        }
        Path(cfg.json).write_text(json.dumps(facts, indent=1) + "\n")
    if equal:
        console.print(f"All {len(here.tokens)} tokens are those of the plain model.")
    elif plain is not None:
        raise CPLayersError(f"tokens {here.tokens} differ from the plain model's {plain.tokens}")


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def end_with(error: BaseException) -> None:
    """Say what went wrong, once: rank 0 speaks first, and the others only if it does not."""
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    if RANK != 0 and store is not None:
        with contextlib.suppress(RuntimeError):
            store.wait(["example/said"], FIRST_TO_SPEAK)
            sys.exit(1)
    who = f"rank {RANK}: " if RANKS > 1 else ""
    print(f"{who}{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if store is not None:
        store.set("example/said", "yes")
    sys.exit(1)


@hydra.main(version_base="1.3", config_path=".", config_name="generate")
def main(cfg: Any) -> None:
    if RANKS > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    try:
        run(cfg)
    except InstantiationException as error:
        end_with(error.__cause__ or error)
    except (CPLayersError, OSError) as error:
        end_with(error)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    register_configs()
    ConfigStore.instance().store(name="generate_schema", node=GenerateConf)
    if RANK != 0:
        # Also what Hydra prints, e.g. --help, is wanted once. Open until the process ends.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

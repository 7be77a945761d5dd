"""What the library costs where it spreads nothing: generate on one rank against stock transformers.

Both models generate from the same 1,900-token prompt at the same time, in two threads that take
turns token by token, so that noise of the machine meets both alike.

    python benchmarks/bench_degree_one.py [new tokens] [threads]
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from smollm2 import convert, default_cache_dir, load_model, load_tokenizer  # noqa: E402

from cplayers.hf import parallelize  # noqa: E402
from cplayers.mesh import CPMesh, Topology  # noqa: E402


class Turns(BaseStreamer):
    """A streamer that hands the turn to the other model after every token."""

    def __init__(self, mine: threading.Semaphore, other: threading.Semaphore) -> None:
        self.mine, self.other = mine, other
        self.seconds: list[float] = []
        self.start = 0.0

    def begin(self) -> None:
        self.mine.acquire()
        self.start = time.perf_counter()

    def put(self, value: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        self.other.release()
        self.begin()

    def end(self) -> None:
        self.other.release()


def run(models: list[Any], ids: torch.Tensor, new: int) -> tuple[list[Turns], list[torch.Tensor]]:
    turns = [threading.Semaphore(0), threading.Semaphore(0)]
    streamers = [Turns(turns[0], turns[1]), Turns(turns[1], turns[0])]
    tokens: list[Any] = [None, None]

    def work(i: int) -> None:
        streamers[i].begin()
        tokens[i] = models[i].generate(
            ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, streamer=streamers[i]
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join()
    return streamers, tokens


def main() -> None:
    new, threads = (int(x) for x in (*sys.argv[1:], 128, 1)[:2])
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    convert(default_cache_dir())
    document = (ROOT / "examples" / "document.txt").read_text()
    ids = load_tokenizer(default_cache_dir())(document, return_tensors="pt")["input_ids"]
    stock = load_model(default_cache_dir())
    ours = parallelize(load_model(default_cache_dir()), CPMesh(Topology()))
    run([stock, ours], ids[:, :64], 4)  # warm up
    streamers, tokens = run([stock, ours], ids, new)
    assert torch.equal(tokens[0], tokens[1])
    first = [s.seconds[1] for s in streamers]
    each = [statistics.median(s.seconds[2:]) * 1e3 for s in streamers]
    print(f"{ids.shape[1]} prompt tokens, {new} new, {threads} thread(s); tokens equal")
    print(f"{'':24}{'transformers':>14}{'cplayers':>12}{'ratio':>8}")
    for name, (a, b) in {"time to first token, s": first, "time per token, ms": each}.items():
        print(f"{name:24}{a:14.3f}{b:12.3f}{b / a:8.3f}")


if __name__ == "__main__":
    main()

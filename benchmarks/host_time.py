"""What the library costs where it spreads nothing: on one rank, beside stock transformers (sdpa).

    attention layer    one token, the module alone, over a short and a longer context
    tiny model         time per token of ``generate``: next to nothing but host time, plans included
    model              the same at the size of SmolLM2 135M

Two models generate in two threads that take turns token by token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench import Bench, WrongAnswerError
from benchmarks.contexts import filled, one_token, planes
from benchmarks.measure import Timing
from benchmarks.results import Bar, Case, find
from benchmarks.settings import HostTime, Model
from benchmarks.sites import Contestant, Here
from cplayers import CPMesh, DCPGQAAttention, InterleavedLayout, Topology

TITLE = "Degree 1 beside stock transformers"
OURS, STOCK = "cplayers", "transformers, sdpa"
BLOCK = 16


def llama(model: Model) -> Any:
    """A Llama with random weights, the same for the same settings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=model.hidden_size,
        intermediate_size=8 * model.hidden_size // 3,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads.num,
        num_key_value_heads=model.heads.num_kv,
        head_dim=model.heads.dim,
        vocab_size=model.vocabulary,
        max_position_embeddings=1 << 16,
        attn_implementation="sdpa",
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def layers(keys: int, model: Model) -> dict[str, Contestant]:
    """The attention layer alone. What it appends to transformers' cache is taken out untimed."""
    from transformers import DynamicCache

    from cplayers.hf.model import CACHE_NAME

    plain = llama(model).model.layers[0].self_attn
    stock = DynamicCache()
    cp = DCPGQAAttention.from_hf(plain, CPMesh(Topology()))
    cache = filled(cp.cache_spec, InterleavedLayout(1, BLOCK, BLOCK), keys)
    plan = one_token(cache)
    stock.update(*(plane[None, :, : keys - 1].clone() for plane in planes(cache)), 0)
    held = stock.layers[0].keys, stock.layers[0].values
    x, dim = torch.randn(1, 1, model.hidden_size), model.heads.dim
    angles = torch.randn(1, 1, dim // 2).repeat(1, 1, 2)
    rope = angles.cos(), angles.sin()
    ended = 0.0

    def one_step() -> Tensor:
        nonlocal ended
        out: Tensor = plain(x, rope, None, **{CACHE_NAME: stock})[0]
        ended = time.perf_counter()
        stock.layers[0].keys, stock.layers[0].values = held
        return out

    return {
        STOCK: Contestant(one_step, lambda out: out, until=lambda: ended),
        OURS: Contestant(lambda: cp(x, rope, cache, plan), lambda out: out),
    }


class Turns:
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


def generate(models: Sequence[Any], ids: Tensor, new: int) -> tuple[list[Turns], list[Tensor]]:
    """Both generate ``new`` tokens; the times between tokens, and the tokens."""
    turns = [threading.Semaphore(0), threading.Semaphore(0)]
    streamers = [Turns(turns[0], turns[1]), Turns(turns[1], turns[0])]
    tokens: list[Any] = [None, None]
    errors: list[BaseException] = []

    def work(i: int) -> None:
        streamers[i].begin()
        try:
            tokens[i] = models[i].generate(
                ids,
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                streamer=streamers[i],
            )
        except BaseException as error:  # raised below, in the thread that waits
            errors.append(error)
            turns[0].release()
            turns[1].release()

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return streamers, tokens


def models(model: Model, tell: Callable[[str], None]) -> Iterator[Case]:
    from cplayers.hf import parallelize

    stock, ours = llama(model), parallelize(llama(model), CPMesh(Topology()))
    for keys in model.keys:
        size = f"model of {model.layers} layers, {keys:,} keys"
        tell(size)
        ids = torch.randint(model.vocabulary, (1, keys))
        generate([stock, ours], ids[:, :8], 3)  # warms up
        streamers, tokens = generate([stock, ours], ids, model.new_tokens)
        if not torch.equal(*tokens):
            raise WrongAnswerError(f"{size}: transformers and cplayers generate other tokens")
        # The first put is that of the prompt, the second of the token that follows it.
        timings = {
            name: Timing(streamer.seconds[2:])
            for name, streamer in zip((STOCK, OURS), streamers, strict=True)
        }
        at = {"layers": model.layers, "wide": model.hidden_size, "keys": keys}
        yield Case(at, timings, STOCK)


def run(bench: Bench, settings: HostTime) -> Iterator[Case]:
    import transformers

    transformers.logging.set_verbosity_error()
    for keys in settings.keys:
        site = Here(1, layers, keys, settings.tiny)
        at = {"layers": 1, "wide": settings.tiny.hidden_size, "keys": keys}
        yield bench.case(at, [site], STOCK, bar=keys == settings.bar_keys)
    for model in (settings.tiny, settings.model):
        yield from models(model, bench.tell)


def bars(cases: Sequence[Case], settings: HostTime) -> list[Bar]:
    def added(layers: int) -> float | None:
        wide = settings.tiny.hidden_size
        case = find(cases, layers=layers, wide=wide, keys=settings.bar_keys)
        if case is None:
            return None
        more = case.timings[OURS].median - case.timings[STOCK].median
        return more / layers * 1e6

    return [
        Bar("added time of a decode layer, the attention alone", added(1), 100, "us"),
        Bar("the same in a model, its share of a step", added(settings.tiny.layers), 100, "us"),
    ]

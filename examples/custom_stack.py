"""A decoder of your own on cplayers: continuous batching over one paged KV cache, no transformers.

    python examples/custom_stack.py
    torchrun --standalone --nproc-per-node 2 examples/custom_stack.py      (or 4)

Requests arrive over time. Each step computes, in one batch, the prompts of requests that have just
joined and one token of each that is running. Where the cache has no room, the request that joined
last gives its blocks back and waits. At the end every request is compared with a plain model that
runs it alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from cplayers.attention import DCPGQAAttention, gather_rows, take_rows
from cplayers.cache import InterleavedLayout, PagedKVCache, StepPlan
from cplayers.errors import CacheFullError
from cplayers.mesh import CPMesh, Topology
from cplayers.ops import apply_rope

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 48, 3, 4, 2, 16
BLOCK_SIZE, INTERLEAVE_SIZE, CACHE_TOKENS = 4, 2, 96


def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of each position, [T, HEAD_DIM]."""
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (positions[:, None] * frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


class PlainAttention(nn.Module):
    """Causal attention of one whole sequence, [T, WIDTH]: the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = rotary(torch.arange(len(x)))
        q, k, v = (
            projection(x).unflatten(-1, (-1, HEAD_DIM))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        heads = (t.transpose(0, 1) for t in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(0, 1).flatten(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.attention: nn.Module = PlainAttention()
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, *step: object) -> Tensor:
        x = x + self.attention(self.attention_norm(x), *step)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Embedding, blocks, norm and head. Whatever the blocks attend with, the rest is the same."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)  # the same weights wherever it is built
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, *step: object) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, *step)
        return self.norm(x)


def spread(decoder: Decoder, mesh: CPMesh) -> Decoder:
    """Replace each attention by the context-parallel layer, its weights cut to this rank."""
    for i, block in enumerate(decoder.blocks):
        plain = block.attention
        block.attention = DCPGQAAttention.from_full(
            q_proj=plain.q_proj,
            k_proj=plain.k_proj,
            v_proj=plain.v_proj,
            o_proj=plain.o_proj,
            head_dim=HEAD_DIM,
            layer_idx=i,
            mesh=mesh,
        )
    return decoder


def make_cache(decoder: Decoder, mesh: CPMesh) -> PagedKVCache:
    """A cache of CACHE_TOKENS tokens, spread over the DCP ranks."""
    layout = InterleavedLayout(mesh.size("dcp"), INTERLEAVE_SIZE, BLOCK_SIZE)
    return PagedKVCache(
        decoder.blocks[0].attention.cache_spec,
        layout,
        num_layers=LAYERS,
        num_blocks=CACHE_TOKENS // (BLOCK_SIZE * mesh.size("dcp")),
        cp_rank=mesh.rank("dcp"),
        pcp_rank=mesh.rank("pcp"),
        pcp_size=mesh.size("pcp"),
    )


@dataclass
class Request:
    name: str
    tokens: list[int]  # the prompt, then what was generated
    max_new: int
    arrives: int  # step
    cached: int = 0
    made: int = 0
    waited: int = 0  # steps
    evicted: int = 0  # times that its blocks were given back


def next_tokens(
    decoder: Decoder, cache: PagedKVCache, plan: StepPlan, running: list[Request], mesh: CPMesh
) -> list[int]:
    """One step of all running requests: the greedy next token of each."""
    packed = torch.tensor([token for r in running for token in r.tokens[r.cached :]])
    rows = take_rows(packed, plan)  # this rank's share of the new tokens
    hidden = decoder(rows, rotary(plan.positions), cache, plan)
    last = gather_rows(hidden, plan, mesh, plan.last)  # of each request, on every rank
    cache.commit(plan)  # from here on the step counts
    return decoder.head(last).argmax(-1).tolist()


def plan_step(cache: PagedKVCache, running: list[Request], waiting: list[Request]) -> StepPlan:
    """Plan a step of all running requests; those that do not fit go back to waiting."""
    while True:
        try:
            return cache.plan([(r.name, len(r.tokens) - r.cached) for r in running])
        except CacheFullError:  # raised before anything was written, alike on all ranks
            if len(running) == 1:
                raise
            last = running.pop()
            cache.free(last.name)
            last.evicted += last.cached > 0
            last.cached = 0  # its prompt, and what it has generated, will be computed again
            waiting.insert(0, last)


@torch.no_grad()
def serve(decoder: Decoder, cache: PagedKVCache, requests: list[Request], mesh: CPMesh) -> int:
    """Run all requests to their end; returns how many steps mixed prompts and decoding."""
    waiting, running, step, mixed = list(requests), list[Request](), 0, 0
    while waiting or running:
        for request in [r for r in waiting if r.arrives <= step]:
            waiting.remove(request)
            cache.add(request.name)
            running.append(request)
        if running:
            with mesh.guard():  # a rank that fails tells the others
                plan = plan_step(cache, running, waiting)
                mixed += plan.prefill is not None and plan.num_decode > 0
                tokens = next_tokens(decoder, cache, plan, running, mesh)
            for request, token in zip(running, tokens, strict=True):
                request.cached = len(request.tokens)
                request.tokens.append(token)
                request.made += 1
                if request.made == request.max_new:
                    cache.free(request.name)
            running = [r for r in running if r.made < r.max_new]
        for request in waiting:
            request.waited += request.arrives <= step
        step += 1
    return mixed


@torch.no_grad()
def alone(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    """The same tokens from the plain decoder, which computes the whole sequence every time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(decoder.head(decoder(torch.tensor(tokens))[-1]).argmax()))
    return tokens


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets it
    if ranks > 1:
        dist.init_process_group("gloo")
    tp = 2 if ranks % 4 == 0 else 1
    mesh = CPMesh(Topology(tp=tp, pcp=ranks // tp, dcp=ranks // tp))

    decoder = spread(Decoder(seed=0), mesh)
    cache = make_cache(decoder, mesh)
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(name, torch.randint(VOCAB, (length,), generator=generator).tolist(), new, arrives)
        for name, length, new, arrives in (
            ("a", 23, 24, 0),
            ("b", 5, 30, 0),
            ("c", 40, 8, 2),
            ("d", 1, 16, 3),
            ("e", 17, 10, 5),
        )
    ]
    mixed = serve(decoder, cache, requests, mesh)

    plain = Decoder(seed=0)
    if mesh.rank_global == 0:
        print(f"{mesh.topology}, {mixed} steps with prompts and decoding in one batch")
        print("request  prompt  new  arrived  waited  evicted  equal to alone")
    for r in requests:
        prompt = r.tokens[: -r.made]
        assert r.tokens == alone(plain, prompt, r.made), f"request {r.name} differs"
        if mesh.rank_global == 0:
            print(
                f"{r.name:7}  {len(prompt):6}  {r.made:3}  {r.arrives:7}  {r.waited:6}  "
                f"{r.evicted:7}  yes"
            )
    assert cache.pool.num_used == 0
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

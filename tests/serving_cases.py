"""A tiny decoder for tests of serving, whole and on ranks, and what it generates alone."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cplayers.attention import DCPGQAAttention, gather_rows, take_rows
from cplayers.mesh import CPMesh, Topology
from cplayers.ops import apply_rope
from cplayers.serving import Request, ServedModel, Server, ServingConfig

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 61, 32, 2, 4, 2, 8


def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (positions[:, None] * frequencies).repeat(1, 2).double()
    return angles.cos(), angles.sin()


class PlainAttention(nn.Module):
    """Causal attention that keeps the keys and values of its one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, start: int) -> Tensor:
        cos, sin = rotary(torch.arange(start, start + len(x)))
        q, k, v = (
            p(x).unflatten(-1, (-1, HEAD_DIM)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, new = apply_rope(q, cos, sin), [apply_rope(k, cos, sin), v]
        self.kept = (
            [torch.cat([a, b]) for a, b in zip(self.kept, new, strict=True)] if start else new
        )
        seen = torch.arange(len(self.kept[0])) <= torch.arange(start, start + len(x))[:, None]
        q, k, v = (t.transpose(0, 1) for t in (q, *self.kept))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return self.o_proj(out.transpose(0, 1).flatten(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention: nn.Module = PlainAttention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, *step: object) -> Tensor:
        x = x + self.attention(self.attention_norm(x), *step)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)  # the same weights wherever it is built
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)
        self.double()

    def forward(self, tokens: Tensor, *step: object) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, *step)
        return self.norm(x)


@torch.no_grad()
def alone(request: Request) -> list[int]:
    """What the plain decoder generates for one request."""
    decoder, tokens, start, new = Decoder(), list(request.prompt), 0, []
    while not request.is_over(new):
        hidden = decoder(torch.tensor(tokens[start:]), start)
        start = len(tokens)
        new.append(int(decoder.head(hidden[-1]).argmax()))
        tokens.append(new[-1])
    return new


def step(decoder: Decoder, tokens, plan, cache, mesh) -> Tensor:
    rows = take_rows(tokens, plan)
    hidden = decoder(rows, rotary(plan.positions), cache, plan)
    return decoder.head(gather_rows(hidden, plan, mesh, plan.last))


def served(mesh: CPMesh | None = None) -> ServedModel:
    """The decoder with context-parallel layers, for one replica."""
    decoder = Decoder()
    for i, block in enumerate(decoder.blocks):
        plain = block.attention
        block.attention = DCPGQAAttention.from_full(
            q_proj=plain.q_proj,
            k_proj=plain.k_proj,
            v_proj=plain.v_proj,
            o_proj=plain.o_proj,
            head_dim=HEAD_DIM,
            layer_idx=i,
            mesh=mesh or CPMesh(Topology()),
        )
    return ServedModel(decoder, lambda *given: step(decoder, *given))


CONFIG = ServingConfig(
    num_blocks=24,
    block_size=4,
    interleave_size=4,
    sizes=(1, 2, 4),
    crossovers={2: 40, 4: 90},
    chunk_tokens=16,
    steps=4,
    headroom=8,
    patience=8,
)


def requests(seed: int, count: int = 20, seconds: float = 0.4, longest: int = 150) -> list[Request]:
    """Requests of many lengths, of which some outgrow their group."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        length = rng.choice([rng.randint(1, 20), rng.randint(20, 60), rng.randint(1, longest)])
        prompt = tuple(rng.randrange(VOCAB) for _ in range(length))
        new = rng.choice([1, rng.randint(2, 20), rng.randint(20, 70)])
        made.append(Request(f"r{i}", prompt, new, rng.uniform(0, seconds)))
    return made


def serve(config: ServingConfig, given: list[Request], replicas: int):
    """On each rank: tokens of each request, decisions, and most blocks used."""
    model = served()
    layers = [block.attention for block in model.module.blocks]
    meshes = [layer.mesh for layer in layers]
    server = Server(model, config, num_replicas=replicas)
    done = server.run(given)
    assert all(a.mesh is b for a, b in zip(layers, meshes, strict=True)), "as it was built"
    assert all(runner.cache.pool.num_used == 0 for runner in server.runners.values())
    return [(p.new, p.refused, p.history, len(p.times)) for p in done], server.trace

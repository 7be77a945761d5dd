"""Prompts on one group of ranks, decoding on another, of another layout: disaggregated serving.

    torchrun --standalone --nproc-per-node 6 examples/disaggregated.py

Ranks 0 to 3 compute prompts, each its share of the tokens (pcp=4). Ranks 4 and 5 decode: they split
the weights and share the tokens of the cache (tp=2, dcp=2). Finished prompts are handed over, from
four ranks that hold a quarter of the tokens each to two that hold half of them each, in blocks of
another size. While one batch is decoded the next one's prompts are computed.

The model is tiny and random; what comes out is compared with transformers' own `generate`.
"""

import json

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from cplayers import InterleavedLayout, Topology
from cplayers.hf import parallelize, serving_step
from cplayers.mesh import gather_bytes, meshes_over
from cplayers.serving import Passage, ServedModel, hand_over

PREFILL, DECODE, EVERYBODY = (0, 1, 2, 3), (4, 5), (0, 1, 2, 3, 4, 5)
NEW_TOKENS, BATCHES = 12, 3

dist.init_process_group("gloo")
prefill, decode, bridge = meshes_over(
    [
        (PREFILL, Topology(pcp=4, dcp=4)),
        (DECODE, Topology(tp=2, dcp=2)),
        (EVERYBODY, Topology(pcp=6)),  # the axis over which blocks are handed over
    ]
)
mesh = prefill or decode  # each rank is in one of the two

torch.manual_seed(0)  # the same random weights on every rank, as from_pretrained would give
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    initializer_range=0.2,  # random weights of this size pay attention to few tokens
)
model = LlamaForCausalLM(config).eval()
batches = [
    [torch.randint(3, 128, (length,)).tolist() for length in torch.randint(9, 70, (4,))]
    for _ in range(BATCHES)
]
expected = [
    [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in batch
    ]
    for batch in batches
]

# With q_proj="tpa" a rank that decodes stores all KV heads of its tokens, as those that prefill do.
model = parallelize(model, mesh, q_proj="tpa" if decode else "gather")
served = ServedModel(model, serving_step(model))
blocks = InterleavedLayout(4, 16, 16) if prefill else InterleavedLayout(2, 4, 8)
cache = served.new_cache(blocks, 64, mesh)


def step(requests: dict[str, list[int]]) -> dict[str, int]:
    """Compute some tokens of some requests; the next token of each."""
    for name in requests:
        if name not in cache.seqs:
            cache.add(name)
    plan = cache.plan([(name, len(tokens)) for name, tokens in requests.items()])
    packed = torch.tensor([token for tokens in requests.values() for token in tokens])
    logits = served.logits(packed, plan, cache, mesh)
    cache.commit(plan)
    return dict(zip(requests, logits.argmax(-1).tolist(), strict=True))


results: dict[str, list[int]] = {}
ready: dict[str, int] = {}  # the first token of each request that waits to be decoded
for number in range(BATCHES + 1):
    # One group computes the prompts of a batch while the other decodes the one before.
    firsts: dict[str, int] = {}
    if prefill and number < BATCHES:
        firsts = step({f"{number}.{i}": prompt for i, prompt in enumerate(batches[number])})
    if decode and ready:
        made = {name: [token] for name, token in ready.items()}
        for _ in range(NEW_TOKENS - 1):
            for name, token in step({name: [new[-1]] for name, new in made.items()}).items():
                made[name].append(token)
        for name in made:
            cache.free(name)
        results |= made
    # They meet: first tokens, then the blocks.
    ready = json.loads(gather_bytes(bridge, json.dumps(firsts).encode(), "pcp")[0])
    passages = [
        Passage(name, source=cache if prefill else None, target=cache if decode else None)
        for name in ready
    ]
    with bridge.traffic.capture() as sent:
        moved = hand_over(bridge, "pcp", passages)
    if prefill:
        for name in ready:
            cache.free(name)
    if bridge.rank_global == 0 and ready:
        tokens = sum(map(len, batches[number]))
        print(f"batch {number}: {tokens} tokens, {sum(moved)} bytes from 4 ranks to 2")
        assert sum(moved) == tokens * cache.token_bytes

if decode:
    for number, batch in enumerate(expected):
        for i, new in enumerate(batch):
            assert results[f"{number}.{i}"] == new, (number, i)
    if decode.rank("tp") == 0:
        print(f"{len(results)} requests, {NEW_TOKENS} tokens each, as transformers generates them")
assert cache.pool.num_used == 0
dist.destroy_process_group()

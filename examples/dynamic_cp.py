"""Dynamic context parallelism: requests on one replica, two or four, as their length asks for.

    torchrun --standalone --nproc-per-node 4 examples/dynamic_cp.py
    torchrun --standalone --nproc-per-node 4 examples/dynamic_cp.py /tmp/trace.jsonl /tmp/trace.png

Four ranks hold the same weights: four replicas. Short requests run on one of them and talk to
nobody. From a crossover on a request's context is shared by two replicas, or by four; one that
grows past it moves while it decodes. All groups of a rank share its KV budget. The two file names
are for the trace of all decisions and a picture of it.

The model is tiny and random; what comes out is compared with transformers' own `generate`.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from cplayers import CPMesh, Topology
from cplayers.hf import parallelize, serving_step
from cplayers.serving import Request, ServedModel, Server, ServingConfig, write_trace

replicas = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets it
if replicas > 1:
    dist.init_process_group("gloo")

torch.manual_seed(0)  # the same random weights on every rank, as from_pretrained would give
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.2,  # random weights of this size pay attention to few tokens
        max_position_embeddings=512,
    )
).eval()
requests = [
    Request(f"r{i}", tuple(torch.randint(3, 128, (length,)).tolist()), new)
    for i, (length, new) in enumerate(
        [(9, 20), (150, 12), (40, 60), (12, 8), (70, 40), (33, 30), (5, 30), (61, 50), (200, 9)]
    )
]
plain = [
    model.generate(
        torch.tensor([request.prompt]),
        attention_mask=torch.ones(1, len(request.prompt)),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(request.prompt) :].tolist()
    for request in requests
]

model = parallelize(model, CPMesh(Topology(dp=replicas)))  # one rank is a replica
sizes = tuple(size for size in (1, 2, 4) if size <= replicas)
config = ServingConfig(
    num_blocks=60,  # of 4 tokens: the KV budget of a rank
    block_size=4,
    interleave_size=4,
    sizes=sizes,
    crossovers={size: {2: 50, 4: 100}[size] for size in sizes[1:]},  # contexts, in tokens
    chunk_tokens=32,
    headroom=16,
)
server = Server(ServedModel(model, serving_step(model)), config, num_replicas=replicas)
done = server.run(requests)

if server.rank == 0:
    print("request  prompt  new  replicas, in order  equal to transformers")
    for progress, new in zip(done, plain, strict=True):
        request, path = progress.request, " -> ".join(str(len(g)) for g in progress.history)
        same = "yes" if progress.new == new else "no"
        print(f"{request.name:7}  {len(request.prompt):6}  {len(new):3}  {path:18}  {same}")
    moves = sum(line["event"] == "migrate" for line in server.trace)
    print(f"{moves} moves while decoding; {server.kv_bytes} bytes of KV on each rank")
    if len(sys.argv) > 1:
        write_trace(sys.argv[1], server.trace)
    if len(sys.argv) > 2:
        from cplayers.viz.trace import trace_png

        trace_png(server.trace, Path(sys.argv[2]))
assert [progress.new for progress in done] == plain
if replicas > 1:
    dist.destroy_process_group()

"""Swap context-parallel attention into a transformers model and call `generate` as before.

python examples/swap_layers.py
torchrun --standalone --nproc-per-node 2 examples/swap_layers.py
"""

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from cplayers.hf import parallelize
from cplayers.mesh import CPMesh, Topology

ranks = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets it
if ranks > 1:
    dist.init_process_group("gloo")
mesh = CPMesh(Topology(pcp=ranks, dcp=ranks))  # all ranks share the prompt and the KV cache

torch.manual_seed(0)  # the same random weights on every rank, as from_pretrained would give
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(3, 128, (1, 50))
plain = model.generate(prompt, max_new_tokens=20, do_sample=False)

model = parallelize(model, mesh)
tokens = model.generate(prompt, max_new_tokens=20, do_sample=False)

assert torch.equal(tokens, plain)
if mesh.rank_global == 0:
    print(tokens[0, 50:].tolist())
    print(model.cp.report())
if ranks > 1:
    dist.destroy_process_group()

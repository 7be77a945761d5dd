"""Spread the latent KV cache of a DeepSeek-V3 over ranks and call `generate` as before.

    python examples/deepseek_mla.py
    torchrun --standalone --nproc-per-node 2 examples/deepseek_mla.py       (or 4)
    torchrun --standalone --nproc-per-node 2 examples/deepseek_mla.py replicate_q

The last word chooses what travels to decode, see docs/mla.md.

Multi-head latent attention caches one row per token for all heads. Tensor parallelism splits heads,
so it keeps a copy of every row on every rank. Here the ranks that split the heads also share the
rows: decode context parallelism. The model is tiny and random; it has one dense layer and two with
a mixture of experts, as the big one has 3 and 58.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from cplayers.cache import CacheConfig
from cplayers.hf import parallelize
from cplayers.mesh import CPMesh, Topology

decode = sys.argv[1] if len(sys.argv) > 1 else "auto"
ranks = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets it
if ranks > 1:
    dist.init_process_group("gloo")
mesh = CPMesh(Topology(tp=ranks, dcp=ranks))  # all ranks share heads, and tokens of the KV cache

torch.manual_seed(0)  # the same random weights on every rank, as from_pretrained would give
config = DeepseekV3Config(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=8,
    num_key_value_heads=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    initializer_range=0.2,  # random weights of this size pay attention to few tokens
    eos_token_id=None,
)
model = DeepseekV3ForCausalLM(config).eval()
prompt = torch.randint(3, 128, (1, 108))
plain = model.generate(prompt, max_new_tokens=21, do_sample=False)

model = parallelize(model, mesh, cache=CacheConfig(block_size=4, interleave_size=4), decode=decode)
result = model.generate(prompt, max_new_tokens=21, do_sample=False, return_dict_in_generate=True)
tokens = result.sequences
assert torch.equal(tokens, plain)

cached = tokens.shape[1] - 1  # the last token was never fed back
here = model.cp.cache.used_bytes
row = config.kv_lora_rank + config.qk_rope_head_dim
everywhere = cached * config.num_hidden_layers * row * 4  # fp32
name = "cache" if "cache" in result else "past_key_values"  # renamed in transformers 5.24
with mesh.traffic.capture() as sent:
    model(tokens[:, -1:], **{name: result[name]})  # feed it: one more step

if mesh.rank_global == 0:
    print(tokens[0, 108:].tolist())
    print(f"KV cache of {cached} tokens: {here} bytes per rank, {everywhere} with plain TP")
    print(f"One token: {sent.count()} collectives, {sent.bytes()} bytes sent per rank")
    print(model.cp.report())
if ranks > 1:
    dist.destroy_process_group()

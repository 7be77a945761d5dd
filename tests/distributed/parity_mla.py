"""Tiny random models with latent attention, and mixtures among them, for `parity`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import parity
import torch
from parity import STEPS, Expected, Layout
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PROMPTS = (1, 3, 7, 40, 205)
EXPERTS, CHOSEN = 8, 2
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,  # differs from mscale: cos, sin and the softmax scale are all scaled
}
ROUTING_NOISE = 1e-4  # relative; fp32 has about 1e-6
MIXTURE = {
    "moe_intermediate_size": 24,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": MIXTURE
    | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    "deepseek_v3": MIXTURE
    | {"q_lora_rank": 20, "rope_parameters": YARN, "first_k_dense_replace": 1},
    "glm4_moe_lite": MIXTURE | {"q_lora_rank": 20},
    "axk1": MIXTURE | {"q_lora_rank": 20, "rope_parameters": YARN},
    "youtu": {"q_lora_rank": 20},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "half-split": {"rope_interleave": False},
    "q_proj": {"q_lora_rank": None, "attention_bias": True},
    "q_lora": {
        "q_lora_rank": 20,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": YARN,
    },
    "dense": {"first_k_dense_replace": 2},
    "odd experts": {"moe_intermediate_size": 22},
}


@dataclass(frozen=True)
class TinyMLA:
    """A tiny random model of two layers, of which the second is a mixture where there are any.

    Attributes:
        family: Its ``model_type``.
        heads: Query heads.
        seed: Chosen so that no token is near the border between two choices of experts.
        variant: Of `VARIANTS`.
    """

    family: str
    heads: int
    seed: int = 0
    variant: str = ""

    def build(self) -> PreTrainedModel:
        """The same weights in every process."""
        settings = {
            "vocab_size": 96,  # divided by every TP degree up to 8 but 5 and 7
            "hidden_size": 48,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 6,
            "v_head_dim": 10,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        config = AutoConfig.for_model(
            self.family, **settings | SETTINGS[self.family] | VARIANTS[self.variant]
        )
        torch.manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    p.normal_(1.0 if "norm" in name else 0.0, 0.3)
                elif name.endswith(("q_proj.weight", "q_b_proj.weight")):
                    p.normal_(0.0, 0.5)  # peaked attention, so that a wrong merge is seen
                else:
                    p.normal_(0.0, 0.25)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.1)
        return model


@dataclass(frozen=True)
class LayoutMLA(Layout):
    """A layout with a way to decode."""

    decode: str = "gather_q"

    def parallelize(self, model: PreTrainedModel, **options: Any) -> Any:
        return super().parallelize(model, **{"decode": self.decode} | options)


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 96, (length,), generator=generator) for length in PROMPTS]


@lru_cache(maxsize=4)
def expect(tiny: TinyMLA) -> Expected:
    """By transformers' own model in one process, every prompt alone, in float64."""
    model: Any = tiny.build().double()
    tokens, logits = [], []
    with torch.no_grad():
        for prompt in prompts():
            ids = model.generate(prompt[None], max_new_tokens=STEPS, do_sample=False)
            tokens.append(ids[0])
            with routed(model) as seen:
                logits.append(model(ids).logits[0])
            for gate, x in seen:
                require_clear_choices(gate, x, tiny)
    return Expected(tokens, logits)


@contextmanager
def routed(model: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """The routers that are called inside, with what they are called with."""
    seen: list[tuple[nn.Module, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda gate, args: seen.append((gate, args[0])))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def require_clear_choices(gate: nn.Module, x: Tensor, tiny: TinyMLA) -> None:
    """Assert that noise far above that of fp32 changes no token's choice of experts."""

    def chosen(states: Tensor) -> Tensor:
        return gate(states)[2].sort(-1).values

    generator, right = torch.Generator().manual_seed(0), chosen(x)
    for _ in range(8):
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        moved = chosen(x + ROUTING_NOISE * x.pow(2).mean(-1, keepdim=True).sqrt() * noise)
        assert torch.equal(moved, right), f"{tiny}: a choice of experts is a near tie: other seed"


compare, degrees, left_padded, relative_error = (
    parity.compare,
    parity.degrees,
    parity.left_padded,
    parity.relative_error,
)

"""Tiny random models with sliding windows, capped logits, sinks or mixtures, for `parity`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from parity import STEPS, Expected, Layout
from parity_mla import require_clear_choices
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PROMPTS = (1, 5, 17, 40)
WINDOW = 8
TYPES = ["sliding_attention", "full_attention"]
MIXTURE = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 3,
        "attn_logit_softcapping": 0.5,  # transformers does not apply it
        "final_logit_softcapping": 6.0,
        "layer_types": TYPES,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gpt_oss": MIXTURE
    | {
        "sliding_window": WINDOW,
        "num_local_experts": 6,
        "layer_types": TYPES,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen3_moe": MIXTURE
    | {"num_experts": 6, "moe_intermediate_size": 24, "mlp_only_layers": [0], "head_dim": 8},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "window": {"use_sliding_window": True, "sliding_window": WINDOW},
    "all windows": {"layer_types": TYPES[:1] * 2},
}


@dataclass(frozen=True)
class TinyWindow:
    """A tiny random model of two layers.

    Attributes:
        family: Its ``model_type``.
        heads: Query heads.
        kv_heads: KV heads.
        seed: Chosen so that no token is near the border between two choices of experts.
        variant: Of `VARIANTS`.
    """

    family: str
    heads: int = 8
    kv_heads: int = 1
    seed: int = 0
    variant: str = ""

    def build(self, **changes: Any) -> PreTrainedModel:
        """The same weights in every process."""
        settings = {
            "vocab_size": 96,
            "hidden_size": 48,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        settings |= SETTINGS[self.family] | VARIANTS[self.variant] | changes
        options = {}
        if "experts_implementation" in settings:
            options["experts_implementation"] = settings.pop("experts_implementation")
        config = AutoConfig.for_model(self.family, **settings)
        torch.manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(config, **options).eval()
        gemma = self.family.startswith("gemma")  # whose norms multiply by 1 + weight
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "norm" in name:
                    p.normal_(0.0 if gemma else 1.0, 0.3)
                elif name.endswith(("bias", "sinks")):
                    p.normal_(0.0, 1.0 if name.endswith("sinks") else 0.3)
                elif name.endswith("q_proj.weight"):
                    p.normal_(0.0, 0.5)  # peaked attention, so that a wrong merge is seen
                else:
                    p.normal_(0.0, 0.25)
        return model


@dataclass(frozen=True)
class LayoutWindow(Layout):
    """A layout with a chunk size and a strategy for prompts."""

    chunk_size: int | None = None
    prefill: str = "auto"

    def parallelize(self, model: PreTrainedModel, **options: Any) -> Any:
        own = {"chunk_size": self.chunk_size, "prefill": self.prefill}
        return super().parallelize(model, **own | options)


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 96, (length,), generator=generator) for length in PROMPTS]


@lru_cache(maxsize=4)
def expect(tiny: TinyWindow) -> Expected:
    """By transformers' own model in one process, every prompt alone, without a cache, in fp64."""
    model: Any = tiny.build().double()
    seen: list[tuple[nn.Module, Tensor]] = []
    tokens, logits = [], []
    with torch.no_grad():
        for prompt in prompts():
            ids = prompt[None]
            for _ in range(STEPS):
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            tokens.append(ids[0])
            routers = [m for n, m in model.named_modules() if n.endswith(("mlp.gate", "router"))]
            hooks = [
                router.register_forward_pre_hook(lambda gate, args: seen.append((gate, args[0])))
                for router in routers
            ]
            logits.append(model(ids, use_cache=False).logits[0])
            for hook in hooks:
                hook.remove()
        for gate, x in seen:
            require_clear_choices(gate, x, tiny)  # type: ignore[arg-type]
    assert bool(seen) == ("moe" in tiny.family or tiny.family == "gpt_oss")
    return Expected(tokens, logits)

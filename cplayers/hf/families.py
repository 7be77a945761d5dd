"""The transformers architectures whose attention can be swapped, and how to read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from cplayers.attention.linear import is_plain
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh


@dataclass(frozen=True)
class Family:
    """One architecture, by the prefix of its class names.

    Attributes:
        name: ``Llama`` for LlamaForCausalLM with LlamaAttention and LlamaMLP.
        latent: Whether the attention is multi-head latent (MLA) and not grouped-query (GQA).
    """

    name: str
    latent: bool = False

    @property
    def model(self) -> str:
        """The causal LM class."""
        return f"{self.name}ForCausalLM"

    @property
    def attention(self) -> str:
        """The attention module to swap."""
        return f"{self.name}Attention"

    @property
    def mlp(self) -> str:
        """The dense MLP to shard over TP: gate_proj, up_proj, down_proj. Shared experts are one."""
        return f"{self.name}MLP"

    @property
    def experts(self) -> str:
        """The routed experts of a mixture, see `cplayers.hf.experts`."""
        return f"{self.name}Experts"

    def projections(self, attention: nn.Module) -> tuple[str, ...]:
        """The parts of ``attention`` whose Parameters are kept, which must be plain nn.Linear."""
        if not self.latent:
            return ("q_proj", "k_proj", "v_proj", "o_proj")
        q = (
            ("q_proj",)
            if getattr(attention, "q_lora_rank", None) is None
            else ("q_a_proj", "q_b_proj")
        )
        return (*q, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


FAMILIES = (
    *(Family(name) for name in ("Llama", "Mistral", "Qwen2", "Qwen3")),
    *(
        Family(name, latent=True)
        for name in ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Youtu", "AXK1")
    ),
)
"""Kimi-K2 checkpoints are of class DeepseekV3."""


def family_of(model: PreTrainedModel) -> Family:
    """The family of ``model``.

    Raises:
        ConfigError: If the architecture is unknown, or uses a mask that is not supported.
    """
    known = {family.model: family for family in FAMILIES}
    names = [cls.__name__ for cls in type(model).__mro__]
    family = next((known[name] for name in names if name in known), None)
    if family is None:
        raise ConfigError(
            f"model={type(model).__name__}",
            f"its attention must be known; known architectures: {', '.join(known)}",
            "use one of these, or build the layers into your own stack (examples/custom_stack.py)",
        )
    _refuse_sliding_window(model.config)
    return family


def _refuse_sliding_window(config: Any) -> None:
    layer_types = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in layer_types if layer_types else window is not None
    if slides:
        raise ConfigError(
            f"sliding_window={window}",
            "sliding windows are not supported yet, and ignoring them would change the results",
            "use a checkpoint without a window, or set config.sliding_window=None before building "
            "the model if full attention is what you want",
        )


def refuse_length_dependent_rope(config: Any, mesh: CPMesh) -> None:
    """Refuse rotary embeddings that look at the longest position of a call, which PCP splits.

    Raises:
        ConfigError: If ``config`` has one and the mesh splits prompts.
    """
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope") and mesh.size("pcp") > 1:
        raise ConfigError(
            f"rope_type={kind!r} with pcp={mesh.size('pcp')}",
            "its frequencies depend on the length of the prompt, of which a rank sees its share",
            "use pcp=1 and spread the cache over tp (dcp), or a fixed rope_type such as 'yarn'",
        )


def attention_modules(model: nn.Module, family: Family) -> list[tuple[str, nn.Module]]:
    """The attention modules of ``model`` by name, in layer order.

    Raises:
        ConfigError: If a layer has another one, or projections that are not plain ``nn.Linear``.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__ == family.attention
    ]
    layers = cast("Any", model).config.num_hidden_layers
    if len(found) != layers:
        raise ConfigError(
            f"{len(found)} modules of class {family.attention} in {type(model).__name__}",
            f"each of the {layers} layers has one that can be swapped",
            "undo changes of the attention class, or build the layers into your own stack "
            "(examples/custom_stack.py)",
        )
    for name, module in found:
        for part in family.projections(module):
            linear = getattr(module, part, None)
            if not is_plain(linear):
                raise ConfigError(
                    f"{name}.{part} of type {type(linear).__name__}",
                    "only the Parameters of plain nn.Linear projections are kept",
                    "merge adapters into the weights, or dequantize the model, before parallelize",
                )
    return sorted(found, key=lambda item: int(getattr(item[1], "layer_idx")))  # noqa: B009

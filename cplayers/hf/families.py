"""The transformers architectures whose attention can be swapped, and how to read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

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
        windows: Whose sliding window counts: of none, of the whole ``model``, or of each ``layer``
            by ``config.layer_types``. Models of the last kind take a mapping of masks by type.
        softcap: Whether ``attn_logit_softcapping`` counts. Gemma 3 has it and does not use it.
        caps_logits: Whether ``final_logit_softcapping`` counts.
    """

    name: str
    latent: bool = False
    windows: Literal["none", "model", "layer"] = "none"
    softcap: bool = False
    caps_logits: bool = False

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

    def masking(self, attention: Any) -> dict[str, Any]:
        """Arguments of the layer that say which keys ``attention`` sees and how it caps logits.

        A window of w means what `transformers.masking_utils.sliding_window_overlay` says: a query
        at p sees p - w + 1 .. p.

        Raises:
            ConfigError: On attention that is not causal, or of an unknown type.
        """
        if self.latent:
            return {}
        window, config = None, attention.config
        kinds = getattr(config, "layer_types", None) if self.windows == "layer" else None
        if self.windows == "model":
            window = config.sliding_window
        elif kinds and kinds[attention.layer_idx] == SLIDING:
            window = config.sliding_window
            if window is None:
                raise ConfigError(
                    f"layer_types[{attention.layer_idx}]={SLIDING!r} with sliding_window=None",
                    "a sliding layer has a window",
                    "set config.sliding_window, or layer_types to full attention",
                )
        softcap = attention.attn_logit_softcapping if self.softcap else None
        return {"window": window, "softcap": softcap}


SLIDING = "sliding_attention"
LAYER_TYPES = ("full_attention", SLIDING)
FAMILIES = (
    Family("Llama"),
    Family("Mistral", windows="model"),
    Family("Qwen2", windows="layer"),
    Family("Qwen3", windows="layer"),
    Family("Qwen3Moe", windows="model"),
    Family("Gemma2", windows="layer", softcap=True, caps_logits=True),
    Family("Gemma3", windows="layer", caps_logits=True),
    Family("GptOss", windows="layer"),
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
    _refuse_unknown_masks(model.config)
    return family


def _refuse_unknown_masks(config: Any) -> None:
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise ConfigError(
                f"layer_types with {kind!r}",
                f"a layer sees all keys before a token or a window of them: {LAYER_TYPES}",
                "use a model of these types of layers",
            )
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    if bidirectional or not getattr(config, "is_causal", True):
        raise ConfigError(
            f"use_bidirectional_attention={bidirectional}, "
            f"is_causal={getattr(config, 'is_causal', True)}",
            "a token sees the keys up to its own, as the KV cache of a generation needs it",
            "use a causal model",
        )


def refuse_length_dependent_rope(config: Any, mesh: CPMesh) -> None:
    """Refuse rotary embeddings that look at the longest position of a call, which PCP splits.

    Raises:
        ConfigError: If ``config`` has one and the mesh splits prompts.
    """
    given = getattr(config, "rope_parameters", None) or {}
    by_type = [part for part in given.values() if isinstance(part, dict)]  # Gemma 3 has two
    for part in by_type or [given]:
        kind = part.get("rope_type", "default")
        if kind in ("dynamic", "longrope") and mesh.size("pcp") > 1:
            raise ConfigError(
                f"rope_type={kind!r} with pcp={mesh.size('pcp')}",
                "its frequencies depend on the length of the prompt, of which a rank sees its "
                "share",
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

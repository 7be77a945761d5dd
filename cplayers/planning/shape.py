"""The shape of a model: what its attention stores, and which matrices it has.

Read from the fields of a Hugging Face ``config.json``, or from a preset in
`cplayers/planning/models/`, which holds such fields of published models with the address of each.

Legend: h hidden size, N query heads, K KV heads, H head dim, L latent rank, R rotary, P other
dimensions of a head, V its values.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from cplayers.errors import ConfigError
from cplayers.planning.defaults import PATTERNS, TIED, window_counts
from cplayers.planning.fields import Fields, read_object

MODELS = resources.files("cplayers.planning") / "models"
MOST_HEADS, MOST_LAYERS = 1 << 16, 1 << 16
INTERLEAVED = (
    *("interleave_moe_layer_step", "moe_layers", "moe_layers_enum", "moe_layer_interval"),
    *("expert_layer_period", "attn_layer_period", "attn_layer_indices", "attn_type_list"),
    *("full_attention_interval", "full_attn_idxs", "linear_attn_config", "attention_chunk_size"),
    *("hybrid_override_pattern", "hybrid_layer_ids", "layers_block_type", "block_types"),
    *("block_configs", "cross_attention_layers", "num_kv_shared_layers", "ssm_cfg"),
    *("mamba_d_state", "mamba_d_ssm", "ssm_state_size", "moe_num_experts"),
)
"""Fields of models whose layers differ in a way that is not counted here: mixtures in some layers
only, state-space or linear attention, keys shared by layers, attention to another sequence."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA).

    Attributes:
        q_rank: Rank of the query's own latent, ``None`` where queries are projected directly.
        kv_rank: L.
        nope_dim: P.
        rope_dim: R.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int


@dataclass(frozen=True)
class Experts:
    """The routed experts of a mixture.

    Attributes:
        count: Experts in a layer.
        active: Experts that a token uses.
        width: Intermediate size of one.
        shared_width: Intermediate size of the shared expert, 0 without one.
        layers: Layers with experts; the others have a dense MLP.
    """

    count: int
    active: int
    width: int
    shared_width: int
    layers: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder that decide memory and time.

    Attributes:
        name: Preset or file.
        hidden_size: h.
        num_layers: Layers, all with attention.
        num_heads: N.
        num_kv_heads: K; ``None`` with latent attention.
        head_dim: H of queries and keys; P + R with latent attention.
        value_dim: V; H with grouped-query attention.
        intermediate_size: Of a dense MLP.
        vocab_size: Rows of the embedding.
        tied: Whether the embedding is the lm_head too.
        latent: Latent attention, or ``None``.
        experts: Routed experts, or ``None``.
        window: Sliding window of some layers, or ``None``.
        windowed_layers: How many layers have it.
        max_positions: Positions that the model is made for, or ``None``.
        precision: Of the weights as published, see `cplayers.planning.weights`.
        architecture: Class of the model.
        source: Where the figures are from.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None
    head_dim: int
    value_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    window: int | None = None
    windowed_layers: int = 0
    max_positions: int | None = None
    precision: str = "bf16"
    architecture: str = ""
    source: str = ""

    @property
    def dense_layers(self) -> int:
        """Layers with a dense MLP."""
        return self.num_layers - (self.experts.layers if self.experts else 0)

    @classmethod
    def load(cls, model: str) -> ModelShape:
        """The shape of a preset, or of a ``config.json``.

        Args:
            model: Name of a preset (`model_presets`), or path of a ``config.json`` or its folder.

        Raises:
            ConfigError: If it is neither, cannot be read, or is a kind of model that is not known.
        """
        if model.lower() in model_presets():
            preset = MODELS / f"{model.lower()}.json"
            return cls.from_config(json.loads(preset.read_text(encoding="utf-8")), name=model)
        path = Path(model)
        missing = ConfigError(
            f"model={model}",
            "a model is a preset, or a config.json or the folder that holds it",
            f"use one of {', '.join(model_presets())}, or a path that exists",
        )
        path = path / "config.json" if os.path.isdir(path) else path
        return cls.from_config(read_object(path, missing), name=model)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "config.json") -> ModelShape:
        """The shape that the fields of a ``config.json`` describe.

        Args:
            config: The fields, as Hugging Face names them.
            name: What to call the model.

        Raises:
            ConfigError: If a field is missing or of the wrong type, or if layers are of a kind
                that is not counted.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"model={name}", "it holds no fields", "pass a config.json")
        fields = Fields(name, config)
        text = fields.inner("text_config").config  # of models that also see pictures
        fields = Fields(name, {**fields.config, **text})
        for key in INTERLEAVED:
            if key in fields:
                raise fields.error(key, "layers of more than one kind are counted wrongly")
        heads = fields.count("num_attention_heads", most=MOST_HEADS)
        hidden = fields.count("hidden_size")
        layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
        latent = _latent(fields)
        if latent is not None:
            head_dim, value_dim = latent.nope_dim + latent.rope_dim, fields.count("v_head_dim")
        else:
            head_dim = value_dim = fields.count("head_dim", hidden // heads)
        window, windowed = _windows(fields, layers)
        return cls(
            name=name,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=None if latent else fields.count("num_key_value_heads", heads),
            head_dim=head_dim,
            value_dim=value_dim,
            intermediate_size=fields.count("intermediate_size"),
            vocab_size=fields.count("vocab_size"),
            tied=fields.switch("tie_word_embeddings", default=fields.text("model_type") in TIED),
            latent=latent,
            experts=_experts(fields, layers),
            window=window,
            windowed_layers=windowed,
            max_positions=fields.first("max_position_embeddings") or None,
            precision=_precision(fields),
            architecture=next(iter(fields.items("architectures", str)), ""),
            source=fields.text("_source", name),
        )


def _precision(fields: Fields) -> str:
    if "quantization_config" not in fields:
        return "bf16"
    return fields.inner("quantization_config").text("quant_method", "unnamed")  # which is refused


def _latent(fields: Fields) -> Latent | None:
    if "kv_lora_rank" not in fields:
        return None
    return Latent(
        fields.first("q_lora_rank") or None,
        fields.count("kv_lora_rank"),
        fields.count("qk_nope_head_dim"),
        fields.count("qk_rope_head_dim"),
    )


def _experts(fields: Fields, layers: int) -> Experts | None:
    count = fields.first("n_routed_experts", "num_local_experts", "num_experts")
    if not count:
        return None
    active = fields.first("num_experts_per_tok", "experts_per_token")
    if not active or active > count:
        raise fields.error(
            "num_experts_per_tok", f"a token uses at least 1 and at most all {count} experts"
        )
    width = fields.count("moe_intermediate_size", fields.count("intermediate_size"))
    dense = fields.natural("first_k_dense_replace")
    only_dense = set(fields.items("mlp_only_layers", int))
    if "decoder_sparse_step" in fields:
        step = fields.count("decoder_sparse_step")
        sparse = [i for i in range(layers) if i not in only_dense and (i + 1) % step == 0]
    else:
        step = fields.count("moe_layer_freq", 1)
        sparse = [i for i in range(dense, layers) if i not in only_dense and i % step == 0]
    if not sparse:
        return None
    shared = fields.first("shared_expert_intermediate_size", "shared_intermediate_size")
    if shared is None:
        shared = fields.natural("n_shared_experts") * width
    return Experts(count, active, width, shared, len(sparse))


def _windows(fields: Fields, layers: int) -> tuple[int | None, int]:
    """The sliding window, and in how many layers it counts."""
    kinds = fields.items("layer_types", str)
    window = fields.first("sliding_window") or None
    if not kinds:
        kind = fields.text("model_type")
        on = fields.switch("use_sliding_window", default=window_counts(kind))
        if window is None or not on:
            return None, 0
        full = fields.first("sliding_window_pattern") or PATTERNS.get(kind)
        windowed = layers - layers // full if full else layers
        if "max_window_layers" in fields:  # of Qwen: the first so many see all tokens
            windowed = max(0, layers - fields.natural("max_window_layers"))
        return (window, windowed) if windowed else (None, 0)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ConfigError(
            f"model={fields.name} with layers of type {unknown[0]!r}",
            "every layer has softmax attention over all tokens or a window of them",
            "pass a model of such layers",
        )
    if len(kinds) != layers:
        raise fields.error("layer_types", f"layer_types has one entry for each of {layers} layers")
    windowed = kinds.count("sliding_attention")
    return (window, windowed) if windowed and window else (None, 0)


def model_presets() -> list[str]:
    """Names of the published models whose shapes are shipped."""
    names = (entry.name for entry in MODELS.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))

"""The shape of a model: what its attention stores, and which matrices it has.

Read from the fields of a Hugging Face ``config.json``, or from a preset in
`cplayers/planning/models/`, which holds such fields of published models with the address of each.

Legend: h hidden size, N query heads, K KV heads, H head dim, L latent rank, R rotary, P other
dimensions of a head, V its values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from cplayers.errors import ConfigError

MODELS = resources.files("cplayers.planning") / "models"


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
        preset = MODELS / f"{model.lower()}.json"
        if model.lower() in model_presets():
            text = preset.read_text(encoding="utf-8")
        else:
            path = Path(model)
            path = path / "config.json" if path.is_dir() else path
            if not path.is_file():
                raise ConfigError(
                    f"model={model}",
                    "a model is a preset, or a config.json or the folder that holds it",
                    f"use one of {', '.join(model_presets())}, or a path that exists",
                )
            text = path.read_text(encoding="utf-8")
        try:
            config = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"model={model}", f"it is not JSON ({error})", "pass a Hugging Face config.json"
            ) from None
        return cls.from_config(config, name=model)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "config.json") -> ModelShape:
        """The shape that the fields of a ``config.json`` describe.

        Args:
            config: The fields, as Hugging Face names them.
            name: What to call the model.

        Raises:
            ConfigError: If a field is missing, or attention is of a kind that is not known.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"model={name}", "it holds no fields", "pass a config.json")
        text = config.get("text_config")  # of models that also see pictures
        if isinstance(text, Mapping):
            config = {**config, **text}
        fields = _Fields(name, config)
        heads = fields.count("num_attention_heads")
        hidden = fields.count("hidden_size")
        layers = fields.count("num_hidden_layers")
        latent = _latent(fields)
        if latent is not None:
            head_dim, value_dim = latent.nope_dim + latent.rope_dim, fields.count("v_head_dim")
        else:
            head_dim = value_dim = fields.count("head_dim", hidden // heads)
        window, windowed = _windows(fields, layers)
        quantized = config.get("quantization_config") or {}
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
            tied=bool(config.get("tie_word_embeddings", False)),
            latent=latent,
            experts=_experts(fields, layers),
            window=window,
            windowed_layers=windowed,
            max_positions=config.get("max_position_embeddings"),
            precision=str(quantized.get("quant_method", "bf16")),
            architecture=next(iter(config.get("architectures") or ()), ""),
            source=config.get("_source", name),
        )


class _Fields:
    """Fields of a config, read with an error that names the file."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name, self.config = name, config

    def count(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"model={self.name} with {key}={value!r}",
                f"{key} is an int of at least 1",
                "pass the config.json of a decoder with softmax attention",
            )
        return value

    def first(self, *keys: str) -> int | None:
        """The first of ``keys`` that is given."""
        for key in keys:
            if self.config.get(key) is not None:
                return self.count(key)
        return None


def _latent(fields: _Fields) -> Latent | None:
    if fields.config.get("kv_lora_rank") is None:
        return None
    return Latent(
        fields.first("q_lora_rank"),
        fields.count("kv_lora_rank"),
        fields.count("qk_nope_head_dim"),
        fields.count("qk_rope_head_dim"),
    )


def _experts(fields: _Fields, layers: int) -> Experts | None:
    count = fields.first("n_routed_experts", "num_local_experts", "num_experts")
    active = fields.first("num_experts_per_tok", "experts_per_token")
    if count is None or active is None:
        return None
    width = fields.count("moe_intermediate_size", fields.config.get("intermediate_size"))
    dense = fields.config.get("first_k_dense_replace") or 0
    step = fields.first("moe_layer_freq", "decoder_sparse_step") or 1
    only_dense = set(fields.config.get("mlp_only_layers") or ())
    if "decoder_sparse_step" in fields.config:
        sparse = [i for i in range(layers) if i not in only_dense and (i + 1) % step == 0]
    else:
        sparse = [i for i in range(dense, layers) if i % step == 0]
    if not sparse:
        return None
    shared = (fields.first("n_shared_experts") or 0) * width
    return Experts(count, active, width, shared, len(sparse))


def _windows(fields: _Fields, layers: int) -> tuple[int | None, int]:
    """The sliding window, and in how many layers it counts."""
    kinds = fields.config.get("layer_types")
    window = fields.first("sliding_window")
    if kinds is None:
        off = window is None or fields.config.get("use_sliding_window") is False
        return (None, 0) if off else (window, layers)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ConfigError(
            f"model={fields.name} with layers of type {unknown[0]!r}",
            "every layer has softmax attention over all tokens or a window of them",
            "pass a model of such layers",
        )
    windowed = list(kinds).count("sliding_attention")
    return (window, windowed) if windowed and window else (None, 0)


def model_presets() -> list[str]:
    """Names of the published models whose shapes are shipped."""
    names = (entry.name for entry in MODELS.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))

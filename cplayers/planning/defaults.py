"""What a ``config.json`` may leave out, because the class of its model has it as a default.

Transformers does not write a field that equals the default of all configs, among them tied
embeddings, and older files do not say which layers have a sliding window. By ``model_type``:

    tied        the embedding is the lm_head too, unless ``tie_word_embeddings`` says otherwise
    patterns    each so many layers, one sees all tokens
    off         the window counts only where ``use_sliding_window`` is true
"""

from __future__ import annotations

TIED = frozenset(
    [
        *("cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3", "gemma3_text"),
        *("minicpm3", "smollm3", "starcoder2", "youtu"),
    ]
)
PATTERNS = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}
_OFF = ("qwen2", "qwen3", "smollm3")


def window_counts(model_type: str) -> bool:
    """Whether a sliding window counts where ``use_sliding_window`` is not given.

    Args:
        model_type: As in the ``config.json``.
    """
    return not model_type.startswith(_OFF)

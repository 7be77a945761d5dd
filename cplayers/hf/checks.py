"""What a parallelized model refuses, before anything changes and on all ranks alike."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from cplayers.errors import ConfigError
from cplayers.hf.batch import Batch
from cplayers.hf.cache import CPCache
from cplayers.mesh import CPMesh


def check_call(
    model: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, cache: object
) -> Tensor:
    """Check the arguments of ``forward``; returns the tokens or embeddings.

    Raises:
        ConfigError: On no input or both kinds, a foreign cache or one of another model, or dropout
            in training mode.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ConfigError(
            "input_ids and inputs_embeds", "exactly one of them is given", "pass one of them"
        )
    tokens = input_ids if input_ids is not None else inputs_embeds
    assert tokens is not None
    if tokens.shape[1] == 0 or tokens.shape[0] == 0:
        raise ConfigError(
            f"an input of shape {tuple(tokens.shape)}",
            "a prompt has at least one token",
            "pass at least one token, e.g. the model's bos_token_id",
        )
    if cache is not None and not isinstance(cache, CPCache):
        raise ConfigError(
            f"a cache of type {type(cache).__name__}",
            "the KV cache is spread over ranks and kept by the model",
            "leave cache out, or pass the one that an earlier call returned",
        )
    if cache is not None and cache.paged is not model.cp.cache:
        raise ConfigError(
            "a cache of another model, or of this one before its weights were moved",
            "a cache is continued where it was filled",
            "leave cache out, or pass the one that an earlier call of this model returned",
        )
    dropout = getattr(model.config, "attention_dropout", 0.0)
    if model.training and dropout:
        raise ConfigError(
            f"attention_dropout={dropout} in training mode",
            "the layers are for inference and have no dropout",
            "call model.eval() first",
        )
    return tokens


def check_batch(model: Any, batch: Batch, cached: list[int]) -> None:
    """Check one step of rows with ``cached`` tokens each.

    Raises:
        ConfigError: On a batch of another size than the cache's, a prompt without tokens, one that
            is longer than the model's positions, or padding inside of a sliding window.
    """
    if len(cached) != batch.rows:
        raise ConfigError(
            f"a batch of {batch.rows} rows",
            f"the cache holds {len(cached)} sequences",
            "continue with the rows that the cache was started with",
        )
    if model.cp.has_windows and batch.has_gaps:
        raise ConfigError(
            "an attention_mask with padding between tokens",
            "a sliding window counts padding, and the cache holds tokens only, so that it would "
            "reach further back",
            "continue rows of different lengths one by one, each with a cache of its own",
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    for row, (past, new) in enumerate(zip(cached, batch.counts, strict=True)):
        if past + new == 0:
            raise ConfigError(
                f"row {row} of the batch",
                "a prompt has at least one token that is not padding",
                "drop the row, or check attention_mask",
            )
        # as transformers does, a running generation is let go on past the limit
        if limit is not None and past + new > limit and (past == 0 or new > 1):
            raise ConfigError(
                f"{past + new} tokens in row {row}",
                f"the model has max_position_embeddings={limit}",
                f"shorten the prompt to {limit} tokens, or use a model with more positions",
            )


def check_generate(model: Any, options: dict[str, Any]) -> None:
    """Check the options of ``generate``.

    Raises:
        ConfigError: On beam search, multi-token prediction, early exit, a foreign cache
            implementation, a time limit over several ranks, ``use_cache=False`` with a cache, or
            padding on the right.
    """
    beams = generate_option(model, options, "num_beams", 1)
    if beams != 1:
        raise ConfigError(
            f"num_beams={beams}",
            "beam search would have to reorder the sharded cache and is not supported",
            "use num_beams=1, greedy or with do_sample=True",
        )
    if generate_option(model, options, "use_mtp", False):
        raise ConfigError(
            "use_mtp=True",
            "multi-token prediction needs hidden states and a cache of its own, which are not kept",
            "leave use_mtp out",
        )
    if generate_option(model, options, "assistant_early_exit", None) is not None:
        raise ConfigError(
            "assistant_early_exit",
            "a draft of the first layers would fill only their part of the cache",
            "leave it out, or draft with assistant_model or prompt_lookup_num_tokens",
        )
    implementation = generate_option(model, options, "cache_implementation", "dynamic")
    if implementation != "dynamic":
        raise ConfigError(
            f"cache_implementation={implementation!r}",
            "the KV cache is spread over ranks and kept by the model",
            "leave cache_implementation out; parallelize(cache=CacheConfig(...)) sets up the cache",
        )
    seconds = generate_option(model, options, "max_time", None)
    if seconds is not None and model.cp.mesh.topology.world_size > 1:
        raise ConfigError(
            f"max_time={seconds}",
            "the clocks of several ranks differ, so some would stop and others wait for them",
            "limit max_new_tokens instead",
        )
    cache = options.get("cache", options.get("past_key_values"))
    if cache is not None and generate_option(model, options, "use_cache", True) is False:
        raise ConfigError(
            "use_cache=False with a cache",
            "a cache that is given is used and extended",
            "leave out one of the two",
        )
    mask = options.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and not mask[:, -1:].all():
        raise ConfigError(
            "an attention_mask whose last column has padding",
            "generation goes on from the last column, which must be a token in every row",
            'pad on the left: tokenizer.padding_side = "left"',
        )


def generate_option(model: Any, options: dict[str, Any], name: str, default: Any) -> Any:
    """An option of ``generate``: as passed, else of the config passed, else of the model's own."""
    for value in (
        options.get(name),
        getattr(options.get("generation_config"), name, None),
        getattr(model.generation_config, name, None),
    ):
        if value is not None:
            return value
    return default


def check_same_inputs(mesh: CPMesh, **inputs: Any) -> None:
    """Compare inputs over TP and PCP, so that a mistake ends in an error and not in a hang.

    Args:
        mesh: The ranks.
        **inputs: Tensors, plain values and generation configs; anything else is not compared.

    Raises:
        ConfigError: On all ranks, if one of them was called with other inputs.
    """
    digest = 0
    for name, value in sorted(inputs.items()):
        digest = zlib.crc32(name.encode() + _content(value), digest)
    # all ranks see all checksums before any of them judges, so that they judge alike
    checksums = mesh.all_gather(mesh.all_gather(torch.tensor(digest), "tp"), "pcp")
    if len(set(checksums.flatten().tolist())) > 1:
        raise ConfigError(
            f"inputs that differ between ranks (checksums by pcp and tp: {checksums.tolist()})",
            "every rank is called with the same inputs and options",
            "tokenize the same prompt on every rank, or broadcast it from one",
        )


def _content(value: Any) -> bytes:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return flat.numpy().tobytes() + str(tuple(value.shape)).encode()
    if isinstance(value, GenerationConfig):
        value = sorted((k, v) for k, v in value.to_dict().items() if _is_plain(v))
    return repr(value).encode() if _is_plain(value) else b""


def _is_plain(value: Any) -> bool:
    """Whether ``repr`` is the same on all ranks: an object's may hold its address."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def share_random_state(mesh: CPMesh, device: torch.device) -> None:
    """Give all ranks of a replica the random state of its first one, so that they sample alike."""
    cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
    for axis in ("tp", "pcp"):
        state = mesh.all_gather(state.to(mesh.device_type), axis)[0].cpu()
    if cuda:
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)

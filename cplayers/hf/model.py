"""The methods that a parallelized model gets in front of transformers' own: forward and generate.

Every rank calls them with the same inputs and gets the same results.

    batch [B, S] with padding --> packed tokens [P] --> this rank's rows [T]
    the model's own embedding, rotary, layers and norm on [1, T]
    hidden of the wanted columns, gathered over PCP --> lm_head --> logits [B, S', vocab]
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from cplayers.attention import gather_rows, take_rows
from cplayers.cache import StepPlan
from cplayers.errors import ConfigError
from cplayers.hf.batch import Batch
from cplayers.hf.cache import CPCache
from cplayers.hf.checks import (
    check_batch,
    check_call,
    check_generate,
    check_same_inputs,
    generate_option,
    share_random_state,
)
from cplayers.hf.state import CPState

CACHE_NAME = (
    "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
)
"""transformers 5.24 renamed the argument and output field ``past_key_values``."""

NO_MASK = torch.zeros(1, 1, 1, 1)
"""A 4-D mask, which transformers hands through without building one of its own."""


class ContextParallelModel:
    """Mixin in front of a causal LM class; `parallelize` makes a model an instance of both."""

    cp: CPState

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: CPCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: CPCache | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """As the model's own forward, for inference; logits are alike on all ranks.

        Raises:
            ConfigError: On what cannot work (`cplayers.hf.checks`), before anything changes.
            CacheFullError: If a cache of fixed size cannot hold the step; nothing changes.
        """
        model = cast("Any", self)
        given = cache if cache is not None else past_key_values
        with self.cp.mesh.guard():
            _refuse_outputs(model, kwargs)
            self.cp.follow_weights()
            tokens = check_call(model, input_ids, inputs_embeds, given)
            step = given if given is not None else CPCache(self.cp.cache)
            batch = Batch(tokens, attention_mask, step.columns, step.seen)
            started = bool(step.seqs)
            cached = [self.cp.cache.length(seq) for seq in step.seqs]
            check_batch(model, batch, cached if started else [0] * batch.rows)
            if not started:
                check_same_inputs(self.cp.mesh, tokens=tokens, mask=attention_mask)
            try:
                if not started:
                    step.start(batch.rows)
                    self.cp.reserve([(seq, step.expected) for seq in step.seqs])
                logits = self._cp_step(batch, step, position_ids, logits_to_keep, kwargs)
            except BaseException:
                if not started:
                    step.free()
                raise
        if use_cache is None:
            use_cache = getattr(model.config, "use_cache", True)
        if not use_cache and given is None:
            step.free()
        loss = None
        if labels is not None:
            vocabulary = logits.shape[-1]
            loss = model.loss_function(logits=logits, labels=labels, vocab_size=vocabulary)
        kept = step if use_cache or given is not None else None
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        if kept is not None:
            output[CACHE_NAME] = kept
        return output.to_tuple() if return_dict is False else output

    def _cp_step(
        self,
        batch: Batch,
        step: CPCache,
        position_ids: Tensor | None,
        logits_to_keep: int | Tensor,
        kwargs: dict[str, Any],
    ) -> Tensor:
        model, paged = cast("Any", self), self.cp.cache
        requests = list(zip(step.seqs, batch.counts, strict=True))
        positions = batch.rope_positions(position_ids)
        self.cp.reserve(requests)
        plan = paged.plan(requests)
        embedded = batch.tokens.dim() == 3
        rows = {
            "inputs_embeds" if embedded else "input_ids": _rows(batch.pack(batch.tokens), plan),
            "position_ids": _rows(positions, plan),
        }
        hidden = model.get_decoder()(
            **rows,
            attention_mask=NO_MASK,
            use_cache=False,
            cp_cache=paged,
            cp_plan=plan,
            **kwargs,
        ).last_hidden_state[0]
        wanted, real = batch.select(logits_to_keep)
        hidden = gather_rows(hidden, plan, self.cp.mesh, wanted)
        if real is None:
            hidden = hidden.view(batch.rows, -1, hidden.shape[-1])
        else:  # padding gets hidden state 0, and with it logits 0
            padded = hidden.new_zeros(*real.shape, hidden.shape[-1])
            padded[real.to(hidden.device)] = hidden
            hidden = padded
        logits: Tensor = model.lm_head(hidden)
        paged.commit(plan)
        step.accept(batch)
        return logits

    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        """As the model's own generate; every rank returns the same tokens, sampled ones included.

        Raises:
            ConfigError: On what cannot work (`cplayers.hf.checks`), before anything changes.
            CacheFullError: If a cache of fixed size cannot hold the sequences.
        """
        # All of it guarded: a streamer or a logits processor may raise between two forwards.
        with self.cp.mesh.guard():
            return self._cp_generate(inputs, kwargs)

    def _cp_generate(self, inputs: Tensor | None, kwargs: dict[str, Any]) -> Any:
        model = cast("Any", self)
        self.cp.follow_weights()
        check_generate(model, kwargs)
        given = kwargs.get("cache", kwargs.get("past_key_values"))
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        tokens = prompt if prompt is not None else kwargs.get("inputs_embeds")
        if tokens is not None:
            embedded = prompt is None
            check_call(model, None if embedded else tokens, tokens if embedded else None, given)
        defaults = model.generation_config
        check_same_inputs(self.cp.mesh, **{**kwargs, "inputs": inputs, "defaults": defaults})
        share_random_state(self.cp.mesh, model.device)
        own = given is None and generate_option(model, kwargs, "use_cache", True)
        if own:
            kwargs[CACHE_NAME] = given = CPCache(self.cp.cache)
            if tokens is not None:
                given.expected = tokens.shape[1] + self._cp_new_tokens(tokens.shape[1], kwargs)
        result = None
        try:
            result = super().generate(inputs, **kwargs)  # type: ignore[misc]
        finally:
            if own and given is not None and getattr(result, CACHE_NAME, None) is not given:
                given.free()
        return result

    def _cp_new_tokens(self, prompt: int, options: dict[str, Any]) -> int:
        """New tokens that generate may make, to size a growing cache once; a guess may be short."""
        new = generate_option(self, options, "max_new_tokens", None)
        if new is not None:
            return int(new)
        return max(0, int(generate_option(self, options, "max_length", 0)) - prompt)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the weights were cut to this rank."""
        raise ConfigError(
            "save_pretrained",
            "the weights of a parallelized model are one rank's shards",
            "save the model before parallelize",
        )


def _rows(packed: Tensor, plan: StepPlan) -> Tensor:
    return take_rows(packed, plan)[None]


def _refuse_outputs(model: Any, kwargs: dict[str, Any]) -> None:
    for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
        asked = kwargs.pop(name, None)
        if asked or (asked is None and getattr(model.config, name, False)):
            raise ConfigError(
                f"{name}=True",
                "intermediate results are spread over ranks and not collected",
                f"leave {name} out, or use the plain model",
            )

"""The methods that a parallelized model gets in front of transformers' own: forward and generate.

Every rank calls them with the same inputs and gets the same results.

    batch [B, S] with padding --> packed tokens [P] --> this rank's rows [T]
    the model's own embedding, rotary, layers and norm on [1, T]
    hidden of the wanted columns, gathered over PCP --> lm_head --> logits [B, S', vocab]

With ``chunk_size`` the rows are computed in several steps, each planned and committed by itself.
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
from cplayers.hf.families import LAYER_TYPES
from cplayers.hf.state import CPState

CACHE_NAME = (
    "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
)
"""transformers 5.24 renamed the argument and output field ``past_key_values``."""

NO_MASK = torch.zeros(1, 1, 1, 1)
"""A 4-D mask, which transformers hands through without building one of its own."""
MASKS_BY_TYPE = dict.fromkeys(LAYER_TYPES)
"""The same for models whose layers differ: a mapping is taken to be complete."""


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
            step = given if given is not None else self.cp.new_cache()
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
        paged, chunks = self.cp.cache, batch.chunks(self.cp.chunk_size)
        before = [paged.length(seq) for seq in step.seqs]
        requests = list(zip(step.seqs, batch.counts, strict=True))
        packed, positions = batch.pack(batch.tokens), batch.rope_positions(position_ids)
        self.cp.reserve(requests)
        if len(chunks) > 1:
            paged.plan(requests)  # refuses what does not fit before anything is computed
        wanted, real = batch.select(logits_to_keep)
        hidden: Tensor | None = None
        try:
            for chunk in chunks:
                plan = paged.plan(list(zip(step.seqs, chunk.counts, strict=True)))
                rows = self._cp_rows(chunk.of(packed), chunk.of(positions), plan, kwargs)
                mine, at = chunk.place(wanted)
                if hidden is None:
                    hidden = rows.new_empty(len(wanted), rows.shape[-1])
                if len(at):
                    hidden[mine] = gather_rows(rows, plan, self.cp.mesh, at)
                if chunk is not chunks[-1]:
                    paged.commit(plan)
            assert hidden is not None
            logits = self._cp_logits(hidden, real, batch.rows)
            paged.commit(plan)
        except BaseException:  # the chunks that were committed do not count either
            for seq, length in zip(step.seqs, before, strict=True):
                paged.truncate(seq, length)
            raise
        step.accept(batch)
        return logits

    def _cp_rows(
        self, packed: Tensor, positions: Tensor, plan: StepPlan, kwargs: dict[str, Any]
    ) -> Tensor:
        """Hidden states of this rank's rows `[T, hidden]`, from packed tokens or embeddings."""
        masks = MASKS_BY_TYPE if self.cp.family.windows == "layer" else NO_MASK
        rows = {
            "input_ids" if packed.dim() == 1 else "inputs_embeds": take_rows(packed, plan)[None],
            "position_ids": take_rows(positions, plan)[None],
        }
        output = cast("Any", self).get_decoder()(
            **rows,
            attention_mask=masks,
            use_cache=False,
            cp_cache=self.cp.cache,
            cp_plan=plan,
            **kwargs,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _cp_logits(self, hidden: Tensor, real: Tensor | None, rows: int) -> Tensor:
        """Logits `[B, S', vocab]` of the wanted columns, from their packed hidden states."""
        model = cast("Any", self)
        if real is None:
            hidden = hidden.view(rows, -1, hidden.shape[-1])
        else:  # padding gets hidden state 0, and with it logits 0
            padded = hidden.new_zeros(*real.shape, hidden.shape[-1])
            padded[real.to(hidden.device)] = hidden
            hidden = padded
        logits: Tensor = model.lm_head(hidden)
        cap = model.config.final_logit_softcapping if self.cp.family.caps_logits else None
        return logits if cap is None else torch.tanh(logits / cap) * cap

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
            expected = 0
            if tokens is not None:
                expected = tokens.shape[1] + self._cp_new_tokens(tokens.shape[1], kwargs)
            kwargs[CACHE_NAME] = given = self.cp.new_cache(expected)
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


def _refuse_outputs(model: Any, kwargs: dict[str, Any]) -> None:
    for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
        asked = kwargs.pop(name, None)
        if asked or (asked is None and getattr(model.config, name, False)):
            raise ConfigError(
                f"{name}=True",
                "intermediate results are spread over ranks and not collected",
                f"leave {name} out, or use the plain model",
            )

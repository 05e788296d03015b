"""`lowbit.hf.generate` as a function, and as transformers' `custom_generate`."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from lowbit.interop.hf.decoding.held import borrowed_decoder
from lowbit.interop.hf.decoding.loop import decode
from lowbit.interop.hf.decoding.options import PreparedCall, read
from lowbit.interop.hf.decoding.refused import refused
from lowbit.interop.hf.decoding.step import padded_length
from lowbit.interop.hf.invariant import NAME as INVARIANT

LOST = {
    "assistant_model": "it generates with one model",
    "synced_gpus": "it generates in one process",
    "negative_prompt_ids": "it takes input_ids and attention_mask",
    "negative_prompt_attention_mask": "it takes input_ids and attention_mask",
    "stop_strings": "it stops at max_new_tokens, max_length and eos_token_id",
    **dict.fromkeys(
        ("cache", "past_key_values"), 'it has a cache of its own, in 8 bits with kv_cache="int8"'
    ),
}
"""Arguments of transformers' `generate` that it does not pass to a `custom_generate`, and why they are refused."""


def generate(
    model: Any,
    input_ids: Tensor | None = None,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    streamer: Any = None,
    generator: torch.Generator | None = None,
    kv_cache: str | None = None,
    **options: Any,
) -> Tensor:
    """Generate tokens with a decoder-only model of transformers: on a GPU one CUDA graph a token, choice included.

        tokens = lowbit.hf.generate(model, **tokenizer(texts, return_tensors="pt", padding=True), max_new_tokens=100)
        tokens = model.generate(**inputs, max_new_tokens=100, custom_generate=lowbit.hf.generate)     # the same

    Options have transformers' names and defaults, from `model.generation_config`, `generation_config` and keyword
    arguments: `max_new_tokens`, `max_length`, `eos_token_id`, `pad_token_id`, `do_sample`, `temperature`, `top_k`,
    `top_p`, `min_p`, `typical_p`, `epsilon_cutoff`, `repetition_penalty`, `renormalize_logits`,
    `remove_invalid_values`, `num_return_sequences`, `prefill_chunk_size`. Every other option that would change the
    result raises an error.

    The first call for a batch size, and for sequences that are longer than before, traces and captures the graph. The
    model keeps it, with a cache of 2 · layers · batch · slots · key/value heads · width numbers; slots are a power of
    two from 256 to 1,024, or a multiple of 1,024. It is captured again when the model's modules, settings or tensors
    are others; values may change in place. The Python of a hook runs while the graph is captured. On other devices the
    model is called for each token. Threads that call it for one model take turns.

    Args:
        model: a model of transformers for causal language modeling, on one device, in eval mode.
        input_ids: int64 [batch, length], padded on the left where `attention_mask` is 0.
        generation_config: a GenerationConfig; None: that of the model.
        logits_processor: processors of transformers for the options above, and no others.
        stopping_criteria: MaxLengthCriteria and EosTokenCriteria, and no others.
        streamer: gets the prompt and then the tokens of each step, two steps late on a GPU.
        generator: draws the seed of a call that samples; None: torch's default generator of the CPU.
        kv_cache: "int8", "float8", or "int8_int4" for keys in int8 and values in int4, as `KVCache` has them; None: in
            the model's dtype. By transformers' hook: ``functools.partial(lowbit.hf.generate, kv_cache="int8")``.
        options: further options of transformers' `generate`.

    Returns:
        int64 [batch, length + new tokens], up to the end of the longest sequence. The others are padded.

    Raises:
        TypeError: the model has no `generate`, the generator is not one of torch.
        ValueError: prompts, an option or a model that it does not take. The message names it, and the way out.
        RuntimeError: the model's logits were NaN.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generate takes a torch.Generator, got {type(generator).__name__}")
    caller = _preparing_frame(sys._getframe(1), model, generation_config)
    if caller is not None:
        given = caller.f_locals
        _refuse_lost({**given, **given.get("kwargs", {})})
        streamer = given.get("streamer") if streamer is None else streamer
        assert input_ids is not None
        prepared = (input_ids, generation_config, logits_processor, stopping_criteria)
        return _decoded(model, PreparedCall(*prepared, options), streamer, generator, kv_cache)
    if not hasattr(model, "generate"):
        raise TypeError(
            f"generate takes a model of transformers with a generate method, got {type(model).__name__}"
        )
    if options.get("custom_generate") is not None:
        raise refused("custom_generate", "it is one itself")
    strings = options.get("stop_strings") or getattr(generation_config, "stop_strings", None)
    _refuse_lost({**options, "stop_strings": strings})
    if input_ids is not None and options.get("inputs_embeds") is None:
        _check_prompts(input_ids)
    found: Tensor = model.generate(
        *(() if input_ids is None else (input_ids,)),
        generation_config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        custom_generate=_with(streamer, generator, kv_cache),
        **options,
    )
    return found


def _check_prompts(input_ids: Any) -> None:
    """Raise ValueError unless these are tokens [batch, length] of one prompt or more, none of them empty."""
    is_tensor = isinstance(input_ids, Tensor)
    is_whole = is_tensor and not input_ids.is_floating_point() and input_ids.dtype is not torch.bool
    if is_whole and input_ids.ndim == 2 and input_ids.numel():
        return
    got = f"{input_ids.dtype} {tuple(input_ids.shape)}" if is_tensor else type(input_ids).__name__
    raise ValueError(
        f"input_ids are {got}; accepted: a tensor of integers [batch, length], a row a prompt, with one token or more: "
        "tokenizer([text], return_tensors='pt').input_ids, or input_ids[None] for a prompt without the batch"
    )


def _with(
    streamer: Any, generator: torch.Generator | None, kv_cache: str | None
) -> Callable[..., Tensor]:
    """The function that transformers calls for `generate`."""

    def custom(
        model: Any,
        input_ids: Tensor,
        *,
        generation_config: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        **model_kwargs: Any,
    ) -> Tensor:
        if streamer is not None:
            streamer.put(input_ids.cpu())
        prepared = (input_ids, generation_config, logits_processor, stopping_criteria)
        return _decoded(model, PreparedCall(*prepared, model_kwargs), streamer, generator, kv_cache)

    return custom


def _preparing_frame(frame: FrameType, model: Any, config: Any) -> FrameType | None:
    """The frame of transformers' `generate` that made this GenerationConfig for this call; None outside a hook.

    It does not pass the streamer on to a `custom_generate`, so its locals are the only place that has it. Each call of
    it makes a config of its own, by which no frame of another call is mistaken for it.
    """
    if not hasattr(config, "_eos_token_tensor"):  # transformers' generate sets it
        return None
    code = inspect.unwrap(GenerationMixin.generate).__code__
    for caller, _ in traceback.walk_stack(frame):
        own = caller.f_locals if caller.f_code is code else {}
        if own and own["self"] is model and own["generation_config"] is config:
            return caller
    return None


def _refuse_lost(given: dict[str, Any]) -> None:
    for name, why in LOST.items():
        if given.get(name) is not None and given[name] is not False:
            raise refused(name, why)


def _decoded(
    model: Any,
    call: PreparedCall,
    streamer: Any,
    generator: torch.Generator | None,
    kv_cache: str | None,
) -> Tensor:
    """The tokens of a call that transformers has prepared."""
    if model.config._attn_implementation == INVARIANT:
        raise refused(
            "a model of lowbit.inference.invariant_",
            "its graph has kernels whose sums have another order",
        )
    options = read(model, call)
    # Buffers that outlive the call are not inference tensors, which nothing may write to elsewhere.
    with torch.inference_mode(False), torch.no_grad(), _device_of(model.device):
        ids = call.input_ids.to(model.device)
        batch, length = ids.shape
        tokens = padded_length(ids.device, batch, length) + options.new_tokens
        seed = _drawn(generator) if options.choice.samples else 0
        with borrowed_decoder(model, batch, tokens, ids.device, kv_cache) as decoder:
            decoder.begin(ids, options.start, seed, options.hides_padding)
            found = decode(
                model, decoder, ids, options.new_tokens, options.choice, options.chunk, streamer
            )
    return found.to(call.input_ids.device)


def _device_of(device: torch.device) -> Any:
    """Graphs are captured on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _drawn(generator: torch.Generator | None) -> int:
    """A seed of 63 bits."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device))

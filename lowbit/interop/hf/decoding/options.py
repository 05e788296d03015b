"""The options of a call, in transformers' names: what is taken, and errors for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import stopping_criteria as criteria
from transformers.generation.configuration_utils import GenerationMode

from lowbit.interop.hf.decoding.cache import CACHE
from lowbit.interop.hf.decoding.choice import TokenChoice, checked_processors, hides_padding
from lowbit.interop.hf.decoding.refused import refused
from lowbit.numerics.settings import check_whole

CHUNK = 2048
"""Tokens of a prompt that the model reads at a time, without `prefill_chunk_size`."""
OWN = ("attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep")
"""Arguments of a model's forward that transformers makes for every call."""
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments in which processors of images say which tokens are text: 0."""
STATIC = ("static", "hybrid", "sliding_window")
"""Names of caches whose place the own one takes."""
KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers whose only state is their keys and values."""
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class PreparedCall:
    """A call of transformers' `generate`, as far as it has prepared it: input_ids int64 [batch, length], the
    GenerationConfig, logits processors, stopping criteria, arguments of the model's forward."""

    input_ids: Tensor
    config: Any
    processors: Any
    stops: Any
    model_kwargs: dict[str, Any]


@dataclass(frozen=True)
class Options:
    """A call's options. ``start``: the first column of each sequence; those before it are padding. ``hides_padding``:
    the choice does not see padding."""

    choice: TokenChoice
    new_tokens: int
    chunk: int
    start: list[int]
    hides_padding: bool


def read(model: Any, call: PreparedCall) -> Options:
    """The options of a call. Raises ValueError, which names the option, for everything else than `generate`
    describes."""
    config = call.config
    _check_config(config)
    _check_model(model)
    for name, value in call.model_kwargs.items():
        if name not in OWN and not _says_nothing(model, name, value):
            # transformers encodes images and sounds before it calls a loop
            kind = "images, videos and sounds" if name == "mm_encoder_outputs" else name
            raise refused(kind, "it takes input_ids and attention_mask")
    longest, ends = _limits(call.stops)
    pad = config._pad_token_tensor
    pad_id = 0 if pad is None else int(pad)
    batch, length = call.input_ids.shape
    _check_angles(model, length, longest)
    _check_tokens(model, call.input_ids)
    start = _starts(call.model_kwargs, batch, length)
    processors = checked_processors(call.processors, start)
    chunk = config.prefill_chunk_size
    return Options(
        TokenChoice(processors, bool(config.do_sample), ends, pad_id),
        longest - length,
        CHUNK if chunk is None else check_whole("prefill_chunk_size", chunk),
        start,
        hides_padding(call.processors),
    )


def _says_nothing(model: Any, name: str, value: Any) -> bool:
    """True for an argument that changes nothing, such as no images, and token types of prompts that are text alone. A
    model without images, such as GPT-2, may add an embedding of type 0 to each token."""
    sees = model.config.get_text_config(decoder=True) is not model.config
    if sees and name in TOKEN_TYPES and value is not None:
        return not bool(value.any())
    return value is None or value is False or value == {}


def _check_config(config: Any) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise refused(
            f"the mode {mode.value!r} (num_beams={config.num_beams})", "it is greedy or samples"
        )
    for name in OUTPUTS:
        if getattr(config, name, None):
            raise refused(f"{name}=True", "it returns tokens alone")
    if config.return_dict_in_generate:
        raise refused("return_dict_in_generate=True", "it returns a tensor of tokens")
    if config.use_cache is False:
        raise refused("use_cache=False", "its cache is static")
    if config.cache_implementation not in (None, *STATIC):
        raise refused(
            f"cache_implementation={config.cache_implementation!r}", "its cache is static"
        )
    for name in ("compile_config", "prompt_lookup_num_tokens", "use_mtp", "speculation_type"):
        if getattr(config, name, None):
            raise refused(
                f"{name}={getattr(config, name)!r}", "it captures a CUDA graph of a token"
            )


def _check_model(model: Any) -> None:
    if model.config.is_encoder_decoder:
        raise refused(type(model).__name__, "it takes decoder-only models")
    if model.training:
        raise refused("a model in training mode", "call model.eval() first")
    if model.device.type == "meta":
        raise refused(
            "a model whose weights are on meta, as accelerate leaves those that it offloads",
            "it reads them where they are; load the model onto one device",
        )
    if model.dtype == torch.float64:
        raise refused("a model in torch.float64", "it takes float32, bfloat16 and float16")
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if others := sorted({*kinds} - {*KINDS}):
        raise refused(type(model).__name__, f"it has layers without plain attention ({others})")
    if not model._supports_attention_backend:
        raise refused(type(model).__name__, "its attention is its own")
    prepares = model.prepare_inputs_for_generation
    maker = getattr(prepares, "__module__", None) or ""
    if not maker.startswith("transformers."):  # such as PEFT's for prompts that are learned
        raise refused(
            f"the prepare_inputs_for_generation of {maker}", "it gives the model tokens alone"
        )
    places = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if len(places) > 1:
        raise refused(f"a model on {sorted(places)}", "one device holds the whole model")


def _check_tokens(model: Any, input_ids: Tensor) -> None:
    """Raise ValueError for a token that the model has no embedding for, before a kernel of a GPU aborts the process.
    The host waits for the device, once a call."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if weight is None:
        return
    least, most = torch.stack(input_ids.aminmax()).tolist()
    if least < 0 or most >= len(weight):
        raise ValueError(
            f"input_ids has the token {most if most >= len(weight) else least}; accepted: 0 to {len(weight) - 1}, the "
            f"embeddings of {type(model).__name__}. Take the tokenizer of this model, or call "
            "model.resize_token_embeddings(len(tokenizer)) before the model is quantized"
        )


def _check_angles(model: Any, length: int, longest: int) -> None:
    """Where Phi-3's angles switch to those of long sequences, transformers computes the cache again."""
    own = model.config.get_text_config(decoder=True)
    limit = getattr(own, "original_max_position_embeddings", None)
    kind = (getattr(own, "rope_parameters", None) or {}).get("rope_type")
    if kind == "longrope" and limit is not None and length <= limit < longest - 1:
        raise refused(
            f"sequences of {longest} tokens", f"beyond {limit} tokens the angles of all are others"
        )


def _limits(stops: Any) -> tuple[int, tuple[int, ...]]:
    """The most tokens of a sequence, and the tokens that end it."""
    longest, ends = None, ()
    for one in stops:
        if type(one) is criteria.MaxLengthCriteria:
            longest = one.max_length if longest is None else min(longest, one.max_length)
        elif type(one) is criteria.EosTokenCriteria:
            ends = (*ends, *one.eos_token_id.flatten().tolist())
        else:
            raise refused(
                f"the stopping criterion {type(one).__name__}",
                "it stops at max_new_tokens, max_length and eos_token_id",
            )
    if longest is None:
        raise refused("no max_new_tokens or max_length", "its cache has a fixed length")
    return longest, ends


def _starts(model_kwargs: dict[str, Any], batch: int, length: int) -> list[int]:
    """The first column of each sequence, from the mask and the positions."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    seen = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask.bool().cpu()
    if seen.shape != (batch, length):
        raise refused(
            f"an attention_mask of shape {tuple(seen.shape)}", f"it takes {(batch, length)}"
        )
    if mask is not None and not ((mask == 0) | (mask == 1)).all():
        raise refused("an attention_mask with other values than 0 and 1", "1 is a token, 0 padding")
    starts = (~seen).sum(1)
    expected = torch.arange(length) >= starts[:, None]
    if not torch.equal(seen, expected) or not seen[:, -1].all():
        raise refused(
            "this attention_mask",
            "padding stands on the left (padding_side='left'), and pad_token_id in a prompt without a mask counts as "
            "padding, so give torch.ones_like(input_ids) where it does not",
        )
    if positions is not None:
        own = (torch.arange(length) - starts[:, None]).clamp(min=0)
        given = positions.cpu()
        # images have positions along several axes, text the same along each
        axes = given if given.ndim == 3 else given[None]
        if axes.shape[2:] != own.shape[1:] or axes.shape[1] not in (1, batch):
            raise refused(
                f"position_ids of shape {tuple(given.shape)}", f"it takes {(batch, length)}"
            )
        if any(not torch.equal(one[seen], own[seen]) for one in axes.expand(-1, batch, -1)):
            raise refused("these position_ids", "they count from each sequence's first token")
    return [int(n) for n in starts]

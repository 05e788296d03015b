"""`lowbit.hf.generate`: errors for the options, prompts and models that it does not take."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from tests.integrations.models import SIZES

transformers = pytest.importorskip("transformers")

from lowbit import hf  # noqa: E402
from tests.integrations.test_generate import fresh, made, prompts  # noqa: E402

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "num_beams=2"),
    ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
    ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
    ({"use_cache": False}, "use_cache=False"),
    ({"cache_implementation": "dynamic"}, "cache_implementation='dynamic'"),
    ({"max_time": 3.0}, "the stopping criterion MaxTimeCriteria"),
    ({"no_repeat_ngram_size": 2}, "the logits processor NoRepeatNGramLogitsProcessor"),
    ({"eta_cutoff": 1e-3, "do_sample": True}, "the logits processor EtaLogitsWarper"),
    ({"min_new_tokens": 3}, "the logits processor Min(NewTokens)?LengthLogitsProcessor"),
    ({"guidance_scale": 1.5}, "the logits processor UnbatchedClassifierFreeGuidance"),
    ({"prefix_allowed_tokens_fn": lambda *_: [5]}, "PrefixConstrainedLogitsProcessor"),
    ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens|assisted_generation"),
    ({"synced_gpus": True}, "synced_gpus"),
    ({"stop_strings": ["a"]}, "stop_strings|stop strings"),
    ({"past_key_values": transformers.DynamicCache()}, "past_key_values|take cache"),
    ({"token_type_ids": torch.zeros(1, 11, dtype=torch.int64)}, "token_type_ids"),
    ({"attention_mask": torch.ones(1, 11).long().index_fill(1, torch.tensor([10]), 0)}, "attention_mask"),
    ({"attention_mask": torch.ones(1, 11).long().index_fill(1, torch.tensor([5]), 0)}, "attention_mask"),
    ({"attention_mask": torch.full((1, 11), 2)}, "attention_mask with other values than 0 and 1"),
    ({"position_ids": torch.arange(11)[None] + 3}, "position_ids"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_it_does_not_do_raises(option: dict[str, Any], said: str) -> None:
    model, inputs = made(), prompts(1)
    settings = {**inputs, "max_new_tokens": 3, "do_sample": False, **option}
    for call in (
        lambda: hf.generate(model, **settings),
        lambda: model.generate(**settings, custom_generate=hf.generate),
    ):
        with pytest.raises(ValueError, match=said) as error:
            call()
        # For two of them, transformers' own message comes first.
        if option.keys() != {"token_type_ids"} and "stop strings" not in str(error.value):
            assert "without custom_generate, which is transformers' own loop" in str(error.value)


def test_a_token_that_transformers_takes_for_padding() -> None:
    """It makes the mask itself. The message says how to say that the token is none."""
    prompt = torch.tensor([[5, 0, 7]])
    settings: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    settings["eos_token_id"] = None
    with pytest.raises(
        ValueError, match=r"pad_token_id in a prompt .* torch\.ones_like\(input_ids\)"
    ):
        hf.generate(made(), prompt, **settings)
    mask = torch.ones_like(prompt)
    assert hf.generate(made(), prompt, attention_mask=mask, **settings).shape == (1, 5)


@pytest.mark.parametrize(
    "prompt",
    [torch.tensor([1, 2]), torch.zeros(1, 0).long(), torch.zeros(0, 3).long(), torch.ones(1, 3), [[1]]],
    ids=["1-D", "empty", "no batch", "float", "list"],
)  # fmt: skip
def test_prompts_that_it_does_not_take(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"input_ids are .*; accepted: a tensor of integers"):
        hf.generate(made(), prompt, max_new_tokens=2)


@pytest.mark.parametrize("hook", [False, True], ids=["function", "hook"])
def test_settings_of_other_kinds(hook: bool) -> None:
    """By transformers' hook they arrive as they were given, and transformers checks none of them."""
    model, inputs = made(), {**prompts(1), "max_new_tokens": 2, "do_sample": False}
    call = functools.partial(hf.generate, model)
    if hook:
        call = functools.partial(model.generate, custom_generate=hf.generate)
    for chunk in (0, -1, 2.5, "4", True):
        message = rf"prefill_chunk_size must be a whole number of at least 1, got {chunk!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            call(**inputs, prefill_chunk_size=chunk)
    with pytest.raises(TypeError, match=r"torch.Generator, got int"):
        call(**inputs, generator=3)
    with pytest.raises(
        ValueError, match="kv_cache of int8, float8, int8_int4, or None, got 'int4'"
    ):
        call(**inputs, kv_cache="int4")


@pytest.mark.parametrize("token", [-1, 10**6])
@pytest.mark.parametrize("hook", [False, True], ids=["function", "hook"])
def test_tokens_without_an_embedding(token: int, hook: bool) -> None:
    model, inputs = made(), prompts(2)
    inputs["input_ids"][1, -3] = token
    call = functools.partial(hf.generate, model)
    if hook:
        call = functools.partial(model.generate, custom_generate=hf.generate)
    size = len(model.get_input_embeddings().weight)
    with pytest.raises(ValueError, match=rf"the token {token}; accepted: 0 to {size - 1}.*resize"):
        call(**inputs, max_new_tokens=2)


def test_models_that_it_does_not_take() -> None:
    inputs = {**prompts(1), "max_new_tokens": 3}
    model = fresh()
    model.train()
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        hf.generate(model, **inputs)
    model = fresh(attention_dropout=0.5)
    model.model.layers[1].train()
    with pytest.raises(ValueError, match="an attention layer in training mode"):
        hf.generate(model, **inputs)
    offloaded = fresh()
    pytest.importorskip("accelerate").cpu_offload(offloaded, "cpu")
    with pytest.raises(ValueError, match="weights are on meta, as accelerate leaves those"):
        hf.generate(offloaded, **inputs)
    with pytest.raises(ValueError, match="custom_generate: it is one itself"):
        hf.generate(made(), **inputs, custom_generate=hf.generate)
    with pytest.raises(ValueError, match=r"a model in torch.float64"):
        hf.generate(fresh().double(), **inputs)
    chunked = transformers.Llama4TextConfig(
        **{**SIZES, "attention_chunk_size": 6, "head_dim": 16, "num_local_experts": 2}
    )
    llama4 = transformers.Llama4ForCausalLM(chunked).eval()
    with pytest.raises(ValueError, match="neither causal nor a causal sliding window"):
        hf.generate(llama4, **inputs)
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**SIZES)).eval()
    with pytest.raises(ValueError, match="FalconForCausalLM: its attention is its own"):
        hf.generate(falcon, **inputs)
    angles = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12}
    angles |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    sizes = {"rope_parameters": angles, "original_max_position_embeddings": 12}
    phi3 = transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES, **sizes)).eval()
    with pytest.raises(ValueError, match=r"beyond 12 tokens the angles of all are others"):
        hf.generate(phi3, **inputs)
    conv = transformers.Lfm2Config(**SIZES, layer_types=["conv"])
    with pytest.raises(ValueError, match=r"layers without plain attention \(\['conv'\]\)"):
        hf.generate(transformers.Lfm2ForCausalLM(conv).eval(), **inputs)
    recurrent = transformers.RecurrentGemmaConfig(**SIZES, lru_width=64)
    earlier = (
        "its attention is its own|'attention' is not in list"  # the latter is transformers' own
    )
    with pytest.raises(
        ValueError, match=rf"layers without plain attention \(\['linear_attention'\]|{earlier}"
    ):
        hf.generate(transformers.RecurrentGemmaForCausalLM(recurrent).eval(), **inputs)
    peft = pytest.importorskip("peft")
    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        learned = peft.get_peft_model(fresh(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
        with pytest.raises(ValueError, match="the prepare_inputs_for_generation of peft"):
            hf.generate(learned.eval(), **inputs)
    with pytest.raises(TypeError, match="got Linear"):
        hf.generate(torch.nn.Linear(2, 2), **inputs)
    own = transformers.StoppingCriteriaList([lambda ids, scores, **_: ids[:, 0] > 0])
    with pytest.raises(ValueError, match="the stopping criterion function"):
        hf.generate(made(), **inputs, stopping_criteria=own)

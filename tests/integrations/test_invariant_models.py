"""`invariant_` of transformers' models: batches, padding, chunks, decoding with a cache, generation, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import lowbit.hf  # noqa: E402
from lowbit import Int8DynamicActivationInt8Weight  # noqa: E402
from lowbit.inference import invariant_  # noqa: E402
from tests.schemes import relative_error  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
KINDS = {
    "llama": ("Llama", {}),
    "llama-3-rope": (
        "Llama",
        {
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
}
DTYPES = (torch.float32, torch.bfloat16)
every_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    torch.manual_seed(0)
    name, own = KINDS.get(kind, (kind, {}))
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **own, **changed})
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def quantized(kind: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    model = made(kind, dtype, **changed)
    lowbit.quantize_(model, Int8DynamicActivationInt8Weight())
    return model


@torch.no_grad()
def in_chunks(model: Any, ids: Tensor, mask: Tensor, cuts: list[int], cache: Any = None) -> Tensor:
    """Logits of all tokens, read in chunks that end at `cuts`, and at the end."""
    position = (mask.cumsum(1) - 1).clamp(min=0)
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    found = []
    for begin, end in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        part = slice(begin, end)
        found.append(
            model(
                ids[:, part],
                attention_mask=mask[:, :end],
                position_ids=position[:, part],
                past_key_values=cache,
            ).logits
        )
    return torch.cat(found, 1)


@every_kind
@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_batch_padding_chunks_and_decoding_leave_no_trace(kind: str, dtype: torch.dtype) -> None:
    model = quantized(kind, dtype)
    invariant_(model)
    length = 23
    ids = torch.randint(1, 101, (3, length))
    alone = [model(row[None]).logits for row in ids]
    assert torch.equal(model(ids).logits, torch.cat(alone))
    for left, right in ((0, 0), (5, 0), (0, 7), (3, 2)):
        width = left + length + right
        mask = torch.zeros(3, width, dtype=torch.long)
        mask[:, left : left + length] = 1
        padded = torch.randint(1, 101, (3, width))
        padded[:, left : left + length] = ids
        for cuts in ([], [9], [1, 2, 20], [*range(10, width)]):
            found = in_chunks(model, padded, mask, cuts)[:, left : left + length]
            assert torch.equal(found, torch.cat(alone)), (left, right, cuts)
    static = transformers.StaticCache(config=model.config, max_cache_len=40)
    found = in_chunks(model, ids, torch.ones_like(ids), [9, 10, 11], static)
    assert torch.equal(found, torch.cat(alone))


@torch.no_grad()
def test_the_ordinary_model_has_other_bits() -> None:
    """What the tests above would say without the mode."""
    model = quantized("llama")
    ids = torch.randint(1, 101, (3, 40))
    mask = torch.ones_like(ids)
    whole = in_chunks(model, ids, mask, [])
    others = [in_chunks(model, ids, mask, cuts) for cuts in ([9], [1, 2, 20], [*range(10, 40)])]
    assert not all(torch.equal(whole, other) for other in others)


@every_kind
@torch.no_grad()
def test_the_error_is_that_of_int8(kind: str) -> None:
    ids = torch.randint(1, 101, (2, 40))
    exact = made(kind).double()(ids).logits
    model = quantized(kind)
    ordinary = relative_error(model(ids).logits, exact)
    invariant_(model)
    assert 1e-3 < relative_error(model(ids).logits, exact) < 1.3 * ordinary < 0.1


def test_training_has_the_bits_of_generation() -> None:
    model = made("qwen3", torch.bfloat16).train()
    lowbit.qat.prepare_(model, Int8DynamicActivationInt8Weight())
    invariant_(model)
    ids = torch.randint(1, 101, (2, 12))
    out = model(ids, labels=ids)
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.gradient_checkpointing_enable()
    again = model(ids, labels=ids, use_cache=False)
    again.loss.backward()
    assert torch.equal(again.logits, out.logits)
    lowbit.qat.convert_(model.eval())
    found = in_chunks(model, ids, torch.ones_like(ids), [*range(4, 12)])
    assert torch.equal(found, out.logits.detach())


def test_generation_of_transformers_chooses_the_tokens_of_one_pass() -> None:
    model = quantized("llama")
    invariant_(model)
    ids = torch.randint(1, 101, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {"do_sample": False, "eos_token_id": None, "output_logits": True}
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, return_dict_in_generate=True, **options
    )
    own = found.sequences[1, 4:]
    with torch.no_grad():
        logits = model(own[None]).logits[0, 4:-1]
    assert torch.equal(torch.stack(found.logits)[:, 1], logits)
    with pytest.raises(ValueError, match=r"does not take a model of lowbit.inference.invariant_"):
        lowbit.hf.generate(model, ids, max_new_tokens=2, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("Gemma2", {}, "Gemma2Attention: invariant attention has no softcap"),
        ("GptOss", {}, r"model.layers.0.mlp.* its weight is not in int8|calls aten|has no"),
        ("Phi", {}, r"LayerNorm\) calls aten.native_layer_norm"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            r"model.rotary_emb \(LlamaRotaryEmbedding\) calls aten.*; for rotary angles",
        ),
        ("llama", {"hidden_act": "gelu"}, r"mlp.act_fn \(GELUActivation\) calls aten.gelu"),
    ],
    ids=["softcap", "mixture", "layer-norm", "dynamic-rope", "erf-gelu"],
)
def test_other_models_are_refused_by_name(kind: str, changed: Any, message: str) -> None:
    sizes = {"pad_token_id": 0}
    if kind == "GptOss":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = quantized(kind, **{**sizes, **changed})
    before = model.config._attn_implementation
    ids = torch.randint(1, 101, (1, 6))
    expected = model(ids).logits
    with pytest.raises(NotImplementedError, match=message):
        invariant_(model)
    assert model.config._attn_implementation == before
    assert torch.equal(model(ids).logits, expected)


def test_caches_in_few_bits_and_masks_of_floats_are_refused() -> None:
    model = quantized("llama")
    invariant_(model)
    ids = torch.randint(1, 101, (1, 6))
    with pytest.raises(NotImplementedError, match="takes a mask of bool"):
        model(ids, attention_mask=torch.zeros(1, 1, 6, 6))
    cache = lowbit.hf.KVCache(model.config, 32)
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match=r"KVCache with a model of.*DynamicCache"),
    ):
        for part in (ids, ids[:, :1]):
            model(part, past_key_values=cache)

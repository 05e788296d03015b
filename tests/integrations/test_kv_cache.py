"""`KVCache` in transformers' models: the values that the attention reads, prompts, windows, padding, graphs, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import lowbit.hf  # noqa: E402
from lowbit.hf import KVCache  # noqa: E402
from lowbit_kernels.decoding.quantize_to_cache import dequantized, quantized  # noqa: E402
from lowbit_kernels.runtime import launches  # noqa: E402
from tests.kernels.quantized_attention_emulator import emulated  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "attn_implementation": "lowbit",
}
FORMATS = {"int8": torch.int8, "float8": torch.float8_e4m3fn, "int4": torch.uint8}
PARTS = {"layers": 2, "ffn_dim": 96, "attention_heads": 4}
KINDS = ("llama", "mistral", "gemma2", "gpt-oss")
"""Without and with a sliding window; with a softcap; with sinks."""
every_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: str = "llama", **changed: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, **changed}
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    elif kind == "mistral":
        config = transformers.MistralConfig(**sizes, sliding_window=8)
        model = transformers.MistralForCausalLM(config)
    elif kind == "gemma2":
        config = transformers.Gemma2Config(**sizes, head_dim=16, sliding_window=8)
        model = transformers.Gemma2ForCausalLM(config)
    else:
        experts = {"num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 16}
        config = transformers.GptOssConfig(**sizes, **experts, sliding_window=8)
        model = transformers.GptOssForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().requires_grad_(False)


class Rounded(transformers.StaticCache):
    """A cache in high precision that holds the values of the codes."""

    def __init__(self, config: Any, length: int, keys: str, values: str) -> None:
        super().__init__(config=config, max_cache_len=length)
        self.formats = (FORMATS[keys], FORMATS[values])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        rounded = []
        for x, dtype in zip((key_states, value_states), self.formats, strict=True):
            width = x.shape[-1] // (1 + (dtype == torch.uint8))
            rounded.append(dequantized(*quantized(x, dtype, width), x.shape[-1]).to(x.dtype))
        return super().update(*rounded, layer_idx, *args, **kwargs)


def steps(model: Any, cache: Any, tokens: Tensor, prompt: int = 1) -> Tensor:
    """Logits of all positions, the prompt in one call and then token by token."""
    found = [model(tokens[:, :prompt], past_key_values=cache).logits]
    for t in range(prompt, tokens.shape[1]):
        found.append(model(tokens[:, t : t + 1], past_key_values=cache).logits)
    return torch.cat(found, 1)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@every_kind
@pytest.mark.parametrize("attention", ["lowbit", "own"])
@pytest.mark.parametrize(
    ("keys", "values"), [("int8", "int8"), ("float8", "float8"), ("int8", "int4")]
)
@pytest.mark.cover("pairs")
def test_tokens_read_the_values_of_the_codes(
    kind: str, attention: str, keys: str, values: str
) -> None:
    model = made(kind)
    if attention == "own":
        model.set_attn_implementation("sdpa" if kind in ("llama", "mistral") else "eager")
    tokens = torch.randint(128, (2, 21))
    expected = steps(model, Rounded(model.config, 24, keys, values), tokens)
    found = steps(model, KVCache(model.config, 24, keys, values), tokens)
    assert difference(found, expected) < 1e-5


@every_kind
@pytest.mark.parametrize("prompt", [3, 12])
def test_a_prompt_and_a_second_one(kind: str, prompt: int) -> None:
    model = made(kind)
    tokens = torch.randint(128, (2, 30))
    plain = transformers.StaticCache(config=model.config, max_cache_len=32)
    cache = KVCache(model.config, 32)
    for cut in (0, 16):  # the second prompt comes after tokens of the first answer
        own = tokens[:, cut : cut + 16]
        found, expected = (steps(model, c, own, prompt) for c in (cache, plain))
        assert difference(found[:, :prompt], expected[:, :prompt]) < (0.03 if cut else 1e-6)
        assert difference(found, expected) < 0.03
    cache.reset()
    plain.reset()
    assert difference(steps(model, cache, tokens, 9), steps(model, plain, tokens, 9)) < 0.03


@every_kind
def test_padding_on_the_left_changes_nothing(kind: str) -> None:
    model = made(kind)
    prompt = torch.randint(1, 128, (2, 12))
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0

    def generated(rows: slice, columns: slice) -> Any:
        return model.generate(
            prompt[rows, columns],
            attention_mask=mask[rows, columns],
            past_key_values=KVCache(model.config, 40),
            max_new_tokens=20,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=0,
        )

    both, alone = generated(slice(None), slice(None)), generated(slice(1, 2), slice(5, None))
    for step, (a, b) in enumerate(zip(both.logits, alone.logits, strict=True)):
        assert difference(a[1:], b) < 1e-3
        if both.sequences[1, 12 + step] != alone.sequences[0, 7 + step]:
            assert b.topk(2).values.diff().abs() < 1e-2  # a tie, after which the texts part
            break


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_kernel_reads_the_codes(kind: str) -> None:
    model = made(kind, num_attention_heads=2, num_key_value_heads=1).bfloat16()
    tokens = torch.randint(128, (2, 12))
    expected = steps(model, KVCache(model.config, 16), tokens)
    with emulated(), launches.counted() as calls:
        found = steps(model, KVCache(model.config, 16), tokens)
    assert calls["quantized_attention", "sm90"] == 2 * 12
    # A router of experts amplifies the rounding to bfloat16.
    assert difference(found.float(), expected.float()) < (0.06 if kind == "gpt-oss" else 0.03)


def test_bytes_of_a_token() -> None:
    model = made(num_attention_heads=1, num_key_value_heads=1)
    for values, expected in (("int8", 2 * 64 + 2 * 2), ("int4", 64 + 32 + 3 * 2)):
        cache = KVCache(model.config, 64, values=values)
        model(torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache)
        assert sum(t.nbytes for t in cache.layers[0].codes.tensors()) == 64 * expected


def test_beams_and_addresses() -> None:
    model = made()
    cache = KVCache(model.config, 16, "float8")
    tokens = torch.randint(128, (3, 5))
    steps(model, cache, tokens)
    layer = cache.layers[1]
    before = [t.data_ptr() for t in layer.codes.tensors()]
    codes, scale = layer.codes.keys.float(), layer.codes.value_scale.clone()
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    assert torch.equal(layer.codes.keys.float(), codes[order])
    assert torch.equal(layer.codes.value_scale, scale[order])
    cache.reset()
    assert before == [t.data_ptr() for t in layer.codes.tensors()]
    assert not layer.codes.keys.float().any() and cache.get_seq_length() == 0


def test_a_compiled_step_serves_all_lengths() -> None:
    torch._dynamo.reset()
    model = made()
    tokens = torch.randint(128, (2, 12))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    cache, eager = KVCache(model.config, 16), KVCache(model.config, 16)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    steps(model, cache, tokens[:, :3], 3)
    expected = steps(model, eager, tokens, 3)
    mask = torch.ones(2, 1, 1, 16, dtype=torch.bool)
    with torch.compiler.set_stance("default"), torch.no_grad():
        for t in range(3, 12):
            mask = torch.arange(16)[None, None, None] <= t
            position = torch.full((2, 1), t)
            found = compiled(
                tokens[:, t : t + 1],
                past_key_values=cache,
                attention_mask=mask,
                position_ids=position,
            ).logits
            assert difference(found[:, 0], expected[:, t]) < 1e-5
            if t == 3:
                torch._dynamo.config.error_on_recompile = True
    torch._dynamo.config.error_on_recompile = False


def test_errors() -> None:
    model = made()
    for arguments, message in (
        ((16, "int4"), "takes keys in int8, float8, got 'int4'"),
        ((16, "int8", "fp8"), "takes values in int8, float8, int4, got 'fp8'"),
        ((0,), r"max_cache_len=0\) holds no token"),
    ):
        with pytest.raises(ValueError, match=message):
            KVCache(model.config, *arguments)
    with pytest.raises(TypeError, match=r"got LlamaForCausalLM and int"):
        KVCache(model, 16)
    cache = KVCache(model.config, 16)
    with pytest.raises(ValueError, match=r"max_cache_len=16\) does not hold 17 tokens"):
        steps(model, cache, torch.zeros(2, 17, dtype=torch.int64), 17)
    with pytest.raises(ValueError, match="make a new cache for another batch"):
        steps(model, cache, torch.zeros(3, 2, dtype=torch.int64), 2)
    with pytest.raises(NotImplementedError, match="no offloading"):
        cache.offload(0)
    with pytest.raises(TypeError, match=r"keys of .*got torch.float64"):
        KVCache(model.config, 16).update(*[torch.zeros(1, 2, 1, 16).double()] * 2, 0)


def test_an_encoder_decoder_takes_it_for_its_own_attention() -> None:
    """Given as it is, keys of the encoder would come to it as well, and later tokens would be NaN."""
    torch.manual_seed(0)
    sizes = {f"{side}_{part}": n for side in ("encoder", "decoder") for part, n in PARTS.items()}
    config = transformers.BartConfig(vocab_size=96, d_model=64, **sizes, forced_eos_token_id=None)
    model = transformers.BartForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(5)
    tokens = torch.arange(14).view(2, 7) + 3
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tokens, **options)
    cache = KVCache(config, 16)
    with pytest.raises(ValueError, match=r"EncoderDecoderCache\(cache, DynamicCache\(\)\)"):
        model.generate(tokens, past_key_values=cache, **options)
    both = transformers.EncoderDecoderCache(KVCache(config, 16), transformers.DynamicCache())
    assert torch.equal(model.generate(tokens, past_key_values=both, **options), expected)


@pytest.mark.parametrize("helper", ["prompt_lookup_num_tokens", "assistant_model"])
def test_assisted_generation_takes_tokens_back(helper: str) -> None:
    model, other = made(), made(num_hidden_layers=1)
    prompt = torch.arange(5).repeat(2)[None]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    options |= {"eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(prompt, past_key_values=KVCache(model.config, 40), **options)
    options[helper] = 3 if helper == "prompt_lookup_num_tokens" else other
    found = model.generate(prompt, past_key_values=KVCache(model.config, 40), **options)
    assert torch.equal(found, expected)


def test_a_full_window_takes_no_tokens_back() -> None:
    model = made("mistral")
    cache, tokens = KVCache(model.config, 32), torch.arange(20)[None]
    steps(model, cache, tokens[:, :6], 6)
    cache.crop(-2)
    found = steps(model, cache, tokens[:, 4:7])
    expected = steps(model, KVCache(model.config, 32), tokens[:, :7], 6)
    assert difference(found[:, -1], expected[:, -1]) < 0.03
    steps(model, cache, tokens[:, 7:])
    with pytest.raises(NotImplementedError, match="a sliding window of 8; generate without"):
        cache.crop(-2)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_cache_of_inference_mode_serves_outside(kind: str) -> None:
    model, tokens = made(kind), torch.arange(20).view(2, 10)
    with torch.inference_mode():
        cache = KVCache(model.config, 16)
        expected = steps(model, cache, tokens, 7)
        cache.reset()
    with torch.no_grad():
        assert torch.equal(steps(model, cache, tokens, 7), expected)
        cache.reset()
    with torch.inference_mode():
        assert torch.equal(steps(model, cache, tokens, 7), expected)


@pytest.mark.parametrize("values", ["int8", "int4"])
@pytest.mark.parametrize("attention", ["lowbit", "sdpa", "eager"])
def test_beyond_the_cache_the_output_is_nan(attention: str, values: str) -> None:
    model, tokens = made(), torch.zeros(2, 6, dtype=torch.int64)
    model.set_attn_implementation(attention)
    logits = steps(model, KVCache(model.config, 4, values=values), tokens)
    assert logits[:, :4].isfinite().all() and logits[:, 4:].isnan().all()
    if attention == "lowbit":
        with emulated():
            logits = steps(model.bfloat16(), KVCache(model.config, 4, values=values), tokens)
        assert logits[:, :4].isfinite().all() and logits[:, 4:].isnan().all()


@pytest.mark.gpu
@every_kind
def test_a_gpu_reads_the_codes(kind: str) -> None:
    model = made(kind, hidden_size=256, num_attention_heads=4).to("cuda", torch.bfloat16)
    tokens = torch.randint(128, (2, 21), device="cuda")
    with launches.counted() as calls:
        found = steps(model, KVCache(model.config, 24), tokens)
    assert calls["quantized_attention", "sm90"] == 2 * 21
    expected = steps(model, Rounded(model.config, 24, "int8", "int8"), tokens)
    # a router's weights carry the rounding of bfloat16 on, so the bound is the rounding of the formula itself
    exact = steps(model.float(), Rounded(model.config, 24, "int8", "int8"), tokens)
    bound = max(0.02, 1.5 * difference(expected.float(), exact))
    assert difference(found.float(), exact) < bound


@pytest.mark.gpu
def test_generate_compiles_once() -> None:
    """transformers compiles the forward of a token and captures it; two prompt lengths and 200 tokens add no graph."""
    torch._dynamo.reset()
    model = made(hidden_size=256, num_attention_heads=4).to("cuda", torch.bfloat16)
    prompt = torch.randint(1, 128, (2, 12), device="cuda")
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    cache = KVCache(model.config, 256)
    graphs = []
    for length, new in ((12, 8), (9, 200), (12, 8)):
        cache.reset()
        with launches.counted() as calls:
            model.generate(
                prompt[:, -length:],
                attention_mask=mask[:, -length:],
                past_key_values=cache,
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if length == 12 and len(graphs) == 1:
            assert calls["quantized_attention", "sm90"] > 0
    assert graphs[0] == graphs[-1]


@every_kind
@pytest.mark.parametrize("name", ["int8", "float8", "int8_int4"])
@pytest.mark.cover("values")
def test_the_loop_of_lowbit_has_the_same_cache(kind: str, name: str) -> None:
    model = made(kind)
    prompt = torch.randint(1, 128, (2, 12))
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    keys, _, values = name.partition("_")
    cache = KVCache(model.config, 40, keys, values or keys)
    expected = model.generate(prompt, attention_mask=mask, past_key_values=cache, **settings)
    found = lowbit.hf.generate(model, prompt, attention_mask=mask, kv_cache=name, **settings)
    assert torch.equal(found, expected)
    in_parts = {**settings, "prefill_chunk_size": 5}
    parts = lowbit.hf.generate(model, prompt, attention_mask=mask, kv_cache=name, **in_parts)
    assert (parts[:, :14] == expected[:, :14]).float().mean() > 0.9
    with pytest.raises(ValueError, match=r"kv_cache of int8, float8, int8_int4, .*got 'int4'"):
        lowbit.hf.generate(model, prompt, kv_cache="int4", **settings)


@pytest.mark.gpu
@every_kind
def test_the_graph_of_a_token_reads_the_codes(kind: str) -> None:
    model = made(kind, hidden_size=256, num_attention_heads=4).to("cuda", torch.bfloat16)
    prompt = torch.randint(1, 128, (2, 12), device="cuda")
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with launches.counted() as calls:
        found = lowbit.hf.generate(model, prompt, kv_cache="int8", **settings)
    assert calls["quantized_attention", "sm90"] > 0 and found.shape == (2, 32)
    assert torch.equal(found, lowbit.hf.generate(model, prompt, kv_cache="int8", **settings))

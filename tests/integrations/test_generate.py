"""`lowbit.hf.generate`: the tokens of transformers' own loop, and its options."""

from __future__ import annotations

import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import _disable_current_modes

import lowbit as lb
from tests.integrations.models import SIZES

transformers = pytest.importorskip("transformers")

from lowbit import hf  # noqa: E402
from lowbit.convert import side_by_side  # noqa: E402
from lowbit.interop.hf.decoding import held  # noqa: E402
from lowbit.interop.hf.decoding.choice import TokenChoice  # noqa: E402
from lowbit.interop.hf.decoding.step import Decoder, _token  # noqa: E402
from lowbit_kernels.runtime import launches  # noqa: E402

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HEADS = {"head_dim": 16, "sliding_window": 6}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", HEADS),
    "gemma3": ("Gemma3", HEADS),
    "phi3": ("Phi3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "gpt-oss": ("GptOss", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-neox": ("GPTNeoX", {}),
}
MIXTURES = ("mixtral", "qwen3-moe", "gpt-oss")
over_families = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def made(family: str = "llama", **changes: Any) -> Any:
    """A tiny model whose tokens vary; tests that change it take a copy."""
    name, settings = FAMILIES[family]
    kind = "TextConfig" if family == "gemma3" else "Config"
    own = {**SIZES, "num_hidden_layers": 2, "tie_word_embeddings": False, **settings, **changes}
    torch.manual_seed(0)
    config = getattr(transformers, name + kind)(**own)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def fresh(family: str = "llama", **changes: Any) -> Any:
    made.cache_clear()
    model = made(family, **changes)
    made.cache_clear()
    return model


def prompts(batch: int, length: int = 11, padding: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(3, SIZES["vocab_size"], (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding:
        for row in range(1, batch):
            mask[row, : (3 * row) % length] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


# ---- greedy --------------------------------------------------------------------------------------------------------


@over_families
def test_the_tokens_of_transformers_greedy_loop(family: str) -> None:
    model = made(family)
    for batch, penalty in ((1, None), (3, None), (3, 1.8)):
        inputs = {**prompts(batch), "max_new_tokens": 20, "do_sample": False}
        settings = {**inputs, "eos_token_id": None, "repetition_penalty": penalty}
        expected = model.generate(**settings)
        assert torch.equal(hf.generate(model, **settings), expected)
        assert torch.equal(model.generate(**settings, custom_generate=hf.generate), expected)
        chunked = hf.generate(model, **settings, prefill_chunk_size=4)
        assert torch.equal(chunked, expected)
    assert len(set(expected[0, 11:].tolist())) > 9


def test_a_prompt_beyond_the_least_cache_and_a_shorter_one_after_it() -> None:
    model = fresh()
    for length in (300, 5, 700):
        settings = {**prompts(2, length), "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(hf.generate(model, **settings), model.generate(**settings))
    with torch.inference_mode():
        assert torch.equal(hf.generate(model, **settings), model.generate(**settings))
    assert torch.equal(hf.generate(model, **settings), model.generate(**settings))
    (decoder,) = held._held[model][1].values()
    assert decoder.capacity == 1024
    numbers = 2 * 2 * 2 * 1024 * SIZES["num_key_value_heads"] * 16
    assert decoder.nbytes() == 4 * numbers + 8 * 2 * 1025
    assert [held.capacity_for(n) for n in (1, 256, 257, 1024, 1025, 5000)] == [
        *(256, 256, 512, 1024, 2048, 5120)
    ]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kv_cache", [None, "int8"])
def test_logits_that_are_nan_raise(kv_cache: str | None, do_sample: bool) -> None:
    model, given = fresh(), prompts(3)
    bad = int(given["input_ids"][1, -1])
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
    settings = {**given, "max_new_tokens": 4, "do_sample": do_sample, "kv_cache": kv_cache}
    with pytest.raises(RuntimeError, match=r"logits are NaN.*in sequence (0, )?1(, 2)? of 3"):
        hf.generate(model, **settings)
    assert hf.generate(model, **settings, remove_invalid_values=True).shape == (3, 15)
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = 0.0
    assert hf.generate(model, **settings).shape == (3, 15)


def test_sequences_end_one_by_one() -> None:
    model = made()
    settings: dict[str, Any] = {**prompts(3), "max_new_tokens": 30, "do_sample": False}
    plain = model.generate(**settings, eos_token_id=None)[:, 11:]
    ends = [int(plain[0, 3]), int(plain[1, 9]), int(plain[2, 14])]
    for eos in (ends, ends[:1], ends[1]):
        own = {**settings, "eos_token_id": eos, "pad_token_id": 77}
        expected = model.generate(**own)
        assert torch.equal(hf.generate(model, **own), expected)
    assert expected.shape[1] <= 41 and (model.generate(**settings, eos_token_id=ends) != 77).any()


def test_settings_of_the_generation_config() -> None:
    model = fresh()
    model.generation_config.max_new_tokens = 6
    model.generation_config.repetition_penalty = 1.7
    inputs = prompts(2)
    expected = model.generate(**inputs)
    assert expected.shape[1] == 17 and torch.equal(hf.generate(model, **inputs), expected)
    own = transformers.GenerationConfig(max_length=15, num_return_sequences=1, eos_token_id=None)
    expected = model.generate(**inputs, generation_config=own)
    assert torch.equal(hf.generate(model, **inputs, generation_config=own), expected)
    assert hf.generate(model, inputs["input_ids"][:1], max_new_tokens=1).shape == (1, 12)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tokens_under_autocast(family: str) -> None:
    model = fresh(family)
    settings = {**prompts(3), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**settings)
    for kv_cache in (None, "int8"):
        with torch.autocast("cpu", torch.bfloat16):
            expected = model.generate(**settings)
            found = hf.generate(model, **settings, kv_cache=kv_cache)
        assert kv_cache or torch.equal(found, expected)
    assert torch.equal(hf.generate(model, **settings), plain)


# ---- sampling ------------------------------------------------------------------------------------------------------

WARPED = [
    {"temperature": 0.7},
    {"top_k": 7},
    {"top_p": 0.6, "temperature": 1.3},
    {"min_p": 0.2, "top_k": 0},
    {"repetition_penalty": 1.9, "top_k": 20, "renormalize_logits": True},
    {"typical_p": 0.5, "epsilon_cutoff": 1e-3},
]


@pytest.mark.parametrize("warped", WARPED, ids=str)
def test_scores_are_those_of_transformers_processors(
    warped: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    own = TokenChoice.scores

    def scores(self: TokenChoice, ids: Tensor, logits: Tensor) -> Tensor:
        found = own(self, ids, logits)
        assert hash(self.key) == hash(self.key), "graphs are kept by it"
        seen.append((ids.clone(), logits.clone(), found.clone()))
        return found

    monkeypatch.setattr(TokenChoice, "scores", scores)
    model, inputs = made(), prompts(2)
    settings = {**inputs, "do_sample": True, "max_new_tokens": 4, "eos_token_id": None, **warped}
    found = hf.generate(model, **settings)
    lists: list[Any] = []

    def keep(model: Any, input_ids: Tensor, *, logits_processor: Any, **_: Any) -> Tensor:
        lists.append(logits_processor)
        return input_ids

    model.generate(**settings, custom_generate=keep)
    assert len(seen) == 4 and len(lists[0]) >= len(warped) - 1
    for n, (_, logits, processed) in enumerate(seen):
        expected = lists[0](found[:, : 11 + n], logits.float())
        assert torch.equal(processed, expected)


def test_draws_have_the_distribution_of_the_scores() -> None:
    logits = torch.tensor([0.3, -1.2, 0.9, 0.0, 0.1])
    logits[3] = -torch.inf
    rows = 40_000
    seed, position, shift = (torch.tensor([n]) for n in (9, 4, 1))
    choice = TokenChoice((), True, (), 0)
    ids = torch.zeros(rows, 1, dtype=torch.int64)
    found = choice.tokens(ids, logits.expand(rows, 5), seed, position, shift)
    share = logits.double().softmax(0)
    off = (found.bincount(minlength=5) / rows - share).abs()
    assert (off <= 5 * (share * (1 - share) / rows).sqrt()).all()
    again = choice.tokens(ids, logits.expand(rows, 5), seed, position, shift)
    other = choice.tokens(ids, logits.expand(rows, 5), seed, position + 1, shift)
    assert torch.equal(found, again) and 0.3 < (found == other).float().mean() < 0.9
    padded = choice.tokens(ids, logits.expand(rows, 5), seed, position + 7, shift + 7)
    assert torch.equal(found, padded)


def test_a_seed_gives_the_same_tokens() -> None:
    model, inputs = made(), prompts(2)
    settings = {**inputs, "do_sample": True, "max_new_tokens": 12, "top_k": 0}

    def drawn(seed: int) -> Tensor:
        return hf.generate(model, **settings, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    torch.manual_seed(3)
    first = model.generate(**settings, custom_generate=hf.generate)
    second = model.generate(**settings, custom_generate=hf.generate)
    torch.manual_seed(3)
    assert torch.equal(hf.generate(model, **settings), first) and not torch.equal(first, second)
    by_hook = {**settings, "generator": torch.Generator().manual_seed(1)}
    assert torch.equal(model.generate(**by_hook, custom_generate=hf.generate), drawn(1))
    several = hf.generate(model, **{**settings, **prompts(1)}, num_return_sequences=3)
    assert several.shape[0] == 3 and not torch.equal(several[0], several[1])


class Heard:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[list[Any]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu" and not self.ended
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("eos", [None, 1], ids=["to-the-end", "eos"])
def test_a_streamer_hears_what_transformers_tells_it(eos: int | None) -> None:
    model, inputs = made(), prompts(1)
    settings: dict[str, Any] = {**inputs, "max_new_tokens": 12, "do_sample": False}
    if eos is not None:
        eos = int(model.generate(**settings, eos_token_id=None)[0, 11 + 6])
    heard = [Heard(), Heard(), Heard()]
    settings |= {"eos_token_id": eos}
    model.generate(**settings, streamer=heard[0])
    hf.generate(model, **settings, streamer=heard[1])
    model.generate(**settings, streamer=heard[2], custom_generate=hf.generate)
    assert heard[0].tokens == heard[1].tokens == heard[2].tokens
    assert all(one.ended for one in heard)


class Asking(Heard):
    """A streamer that generates with the same model in between."""

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.settings = model, settings

    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.tokens) == 3:
            self.found = hf.generate(self.model, **self.settings)


def test_a_call_within_a_call_changes_neither() -> None:
    model = made()
    outer = {**prompts(1), "max_new_tokens": 9, "eos_token_id": None}
    inner = {**prompts(1, 7), "max_new_tokens": 5}
    expected = model.generate(**outer), model.generate(**inner)
    for call in (hf.generate, functools.partial(type(model).generate, custom_generate=hf.generate)):
        streamer = Asking(model, inner)
        assert torch.equal(call(model, **outer, streamer=streamer), expected[0])
        assert torch.equal(streamer.found, expected[1]) and len(streamer.tokens) == 10


def test_the_hook_takes_the_streamer_of_its_own_call() -> None:
    """Not that of a call around it, and none if a GenerationConfig is used a second time."""
    model, streamer = made(), Heard()
    used = transformers.GenerationConfig(max_new_tokens=4, do_sample=False)
    model._prepare_special_tokens(used)
    expected = model.generate(prompts(1)["input_ids"], generation_config=used)

    def around(model: Any, input_ids: Tensor, **_: Any) -> Tensor:
        return hf.generate(model, input_ids, generation_config=used)

    found = model.generate(**prompts(1), streamer=streamer, custom_generate=around)
    assert torch.equal(found, expected) and len(streamer.tokens) == 1  # the prompt, by transformers


def test_threads_take_turns() -> None:
    model, name = made(), made().config._attn_implementation
    inputs = [{**prompts(1, 5 + n), "max_new_tokens": 12, "do_sample": False} for n in range(4)]
    expected = [model.generate(**own) for own in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda own: hf.generate(model, **own), inputs))
    assert all(map(torch.equal, found, expected)) and model.config._attn_implementation == name


# ---- what a model keeps --------------------------------------------------------------------------------------------


def decoder_of(model: Any, batch: int = 2) -> Any:
    """The decoder after a call."""
    hf.generate(model, **prompts(batch), max_new_tokens=3, do_sample=False)
    return held._held[model][1][batch]


def test_patches_and_settings_give_another_decoder() -> None:
    model = fresh()
    layer, config = model.model.layers[0], model.config
    last, hooks = decoder_of(model), []
    assert decoder_of(model) is last
    for change in (
        lambda: setattr(layer.mlp, "forward", lambda x: 0 * x),
        lambda: setattr(layer.mlp, "forward", lambda x: 2 * x),
        lambda: setattr(layer, "own", functools.partial(torch.add, 1)),
        lambda: setattr(config, "hidden_act", "gelu"),
        lambda: hooks.append(register_module_forward_hook(lambda *_: None)),
        lambda: hooks[0].remove(),
    ):
        change()
        assert decoder_of(model) is not last
        last = decoder_of(model)
    model.generate(**prompts(2), max_new_tokens=2)
    model.set_attn_implementation("eager")
    assert decoder_of(model) is last


def test_a_model_keeps_its_decoders_until_it_changes_or_goes() -> None:
    model = fresh().bfloat16()
    first = decoder_of(model)
    assert decoder_of(model) is first
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # the same address
    assert decoder_of(model) is first
    lb.quantize_(model, lb.Int4WeightOnly(32))
    second = decoder_of(model)
    assert second is not first
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    third = decoder_of(model)
    assert third is not second
    model.model.layers[0].register_forward_hook(lambda module, args, result: result)
    assert decoder_of(model) is not third
    for batch in range(1, 7):
        decoder_of(model, batch)
    assert list(held._held[model][1]) == [3, 4, 5, 6]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.cover("values")
@over_families
@pytest.mark.parametrize("layout", ["", "side by side"])
def test_the_folded_graph_of_a_token_computes_the_forward(
    family: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced on a CPU, where `generate` traces nothing."""
    model = fresh(family).bfloat16()
    if layout == "side by side":
        monkeypatch.setattr(side_by_side, "DEVICES", ("cpu",))
    head = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    lb.quantize_(model, {head: None, "*": lb.Int4WeightOnly(32)})
    with torch.no_grad():
        decoder = Decoder(model, 2, 256, torch.device("cpu"))
        decoder.begin(prompts(2)["input_ids"], [0, 3], 0)
        decoder.choose(TokenChoice((), False, (), 0), decoder.read_prompt(model, 100))
        given = (decoder.token, decoder.position_ids, decoder.position, decoder.start)
        expected = _token(model, decoder.cache)(*given).float()
        graph = decoder.traced(model)
        with launches.counted() as calls:
            found = graph(*given).float()
    assert (found - expected).norm() < 0.03 * expected.norm()
    layers = 2
    assert decoder.folded["tables"] == 2, "cosines and sines"
    if layout == "side by side" and family not in ("phi3", "gpt-neox"):
        assert decoder.folded["siblings"] == layers * (1 if family in MIXTURES else 2)
        linears = sum(n for (op, _), n in calls.items() if op == "weight_linear")
        assert family in MIXTURES or linears == layers * 4
        assert decoder.folded.get("gated_linear", 0) == (0 if family in MIXTURES else layers)
    if family == "gpt-neox":  # it has layer norms, and gates nothing
        return
    norms = {"qwen3": 4, "gemma2": 4, "gemma3": 6, "qwen3-moe": 4}.get(family, 2)
    assert decoder.folded["rms_norm"] == layers * norms + 1
    assert calls["decode_attention", "torch"] == layers
    if family not in ("phi3", "gpt-oss"):  # other ways to rotate
        assert decoder.folded["rotated attention"] == layers
    if family not in MIXTURES:
        assert decoder.folded["gated_activation"] == layers
        if "gemma" not in family or family == "gemma":  # they have a norm before the sum
            assert decoder.folded["residual"] == 2 * layers


class Unseen(torch.nn.Module):
    """An activation that no trace sees, as of a kernel that is called by its address."""

    def forward(self, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        with _disable_current_modes():
            result.copy_(x.relu())
        return result


class Waiting(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[..., 0] > -1e9][None]


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Unseen(), "it runs kernels that are not ops of torch"),
        (Waiting(), "index.Tensor waits for the device"),
    ],
    ids=["unseen", "waiting"],
)
def test_forwards_that_are_no_graph_are_refused(layer: Any, said: str) -> None:
    model = fresh()
    model.model.layers[1].mlp.act_fn = layer
    with torch.no_grad():
        decoder = Decoder(model, 1, 256, torch.device("cpu"))
        decoder.begin(prompts(1)["input_ids"], [0])
        decoder.choose(TokenChoice((), False, (), 0), decoder.read_prompt(model, 100))
        with pytest.raises(ValueError, match=said):
            decoder.traced(model)


def test_angles_that_the_length_changes_are_no_graph() -> None:
    """Without a graph, on a CPU, they are those of transformers' loop."""
    angles = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = transformers.LlamaConfig(**SIZES, rope_parameters=angles, max_position_embeddings=16)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    settings = {**prompts(2), "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    assert torch.equal(hf.generate(model, **settings), model.generate(**settings))
    with torch.no_grad(), pytest.raises(ValueError, match="its forward is not a graph"):
        held._held[model][1][2].traced(model)

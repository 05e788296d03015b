"""`lowbit.hf.generate` over more families of transformers: the tokens of its greedy loop, or a clear refusal."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

import lowbit as lb
from tests.integrations.models import SIZES, fill_adapters

transformers = pytest.importorskip("transformers")

from lowbit import hf  # noqa: E402
from lowbit.interop.hf.decoding.choice import TokenChoice  # noqa: E402
from lowbit.interop.hf.decoding.step import Decoder, _part_of_prompt, _token, _traced  # noqa: E402
from tests.integrations.test_generate import fresh, prompts  # noqa: E402
from tests.integrations.test_generate_gpu import check_parting  # noqa: E402

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
GLM_MOE = {
    **ROUTED,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LATER: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", {}),
    "cohere2": ("Cohere2", WINDOWS),
    "dots1": ("Dots1", GLM_MOE),
    "ernie-4.5": ("Ernie4_5", {}),
    "exaone4": ("Exaone4", WINDOWS),
    "gemma4": ("Gemma4", {**WINDOWS, "global_head_dim": 16, "hidden_size_per_layer_input": 16}),
    "glm": ("Glm", {}),
    "glm4": ("Glm4", {}),
    "glm4-moe": ("Glm4Moe", GLM_MOE),
    "granite": ("Granite", {}),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "helium": ("Helium", {}),
    "hunyuan": ("HunYuanDenseV1", {}),
    "minimax-m2": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "ministral3": ("Ministral3", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", WINDOWS),
    "olmoe": ("Olmoe", EXPERTS),
    "phi": ("Phi", {}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "seed-oss": ("SeedOss", {}),
    "smollm3": ("SmolLM3", {}),
    "starcoder2": ("Starcoder2", {}),
}
CHOOSING = [family for family, (_, own) in LATER.items() if "num_experts_per_tok" in own]
"""Families whose tokens choose among four experts."""
WAITING = ("phimoe",)
"""Families whose forward makes the host wait for the GPU: it copies the frequencies of the rotation there."""
over_later = pytest.mark.parametrize("family", LATER)
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepseek-v3": (
        "DeepseekV3",
        {**GLM_MOE, **LATENT, "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 8},
        "it does not read what the cache returned, as multi-head latent attention does not",
    ),
    "doge": ("Doge", {}, "the attention of this model: it reads dtype of its mask"),
    "qwen3-next": (
        "Qwen3Next",
        {**EXPERTS, "shared_expert_intermediate_size": 32, "head_dim": 16}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"layer_types": ["linear_attention", "full_attention"]},
        r"Qwen3NextForCausalLM: it has layers without plain attention \(\['linear_attention'\]\)",
    ),
}


def class_of(name: str) -> Any:
    found = getattr(transformers, name, None)
    return found or pytest.skip(f"this release of transformers has no {name}")


def drawn(kind: Any, config: Any) -> Any:
    """A model whose tokens vary."""
    torch.manual_seed(0)
    model = kind(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def made(name: str, settings: dict[str, Any]) -> Any:
    kind = class_of(f"{name}ForCausalLM")
    text = "Text" if name == "Gemma4" else ""
    own = {"num_hidden_layers": 2, "tie_word_embeddings": False, "head_dim": 16}
    config = class_of(f"{name}{text}Config")(**{**SIZES, **own, **settings})
    return drawn(kind, config)


def of_family(family: str, **own: Any) -> Any:
    if Version(transformers.__version__) < Version("5.17"):
        pytest.skip("earlier releases have other configs and forwards of these families")
    name, settings = LATER[family]
    return made(name, settings | own)


def settings(batch: int) -> dict[str, Any]:
    return {**prompts(batch), "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}


@torch.no_grad()
def check_graph(model: Any) -> dict[str, int]:
    """The traced forwards of a prompt and of a token compute what the model does. Returns how many chains of the latter
    one kernel replaces."""
    decoder = Decoder(model, 2, 256, torch.device("cpu"))
    decoder.begin(prompts(2)["input_ids"], [0, 3])
    inputs = (decoder.ids[:, : decoder.length], decoder.start)
    prompt = _part_of_prompt(model, decoder.cache, 0)
    check_close(_traced(model, prompt, inputs)[0](*inputs), prompt(*inputs))
    decoder.choose(TokenChoice((), False, (), 0), decoder.read_prompt(model, 100))
    given = (decoder.token, decoder.position_ids, decoder.position, decoder.start)
    expected = _token(model, decoder.cache)(*given)
    check_close(decoder.traced(model)(*given), expected)
    assert decoder.folded["embedding"] >= 1
    return decoder.folded


def check_close(found: Tensor, expected: Tensor) -> None:
    bound = 0.03 if found.dtype is torch.bfloat16 else 1e-5
    assert (found - expected).float().norm() < bound * expected.float().norm()


@over_later
def test_the_tokens_of_transformers_greedy_loop(family: str) -> None:
    model = of_family(family)
    for batch in (1, 3):
        expected = model.generate(**settings(batch))
        assert torch.equal(hf.generate(model, **settings(batch)), expected)
    assert len(set(expected[0, 11:].tolist())) > 3
    found = hf.generate(model, **settings(3), kv_cache="int8")
    model.set_attn_implementation("lowbit")
    cache = hf.KVCache(model.config, max_cache_len=64)
    assert torch.equal(found, model.generate(**settings(3), past_key_values=cache))
    check_graph(model)
    if not any("expert" in name for name, _ in model.named_modules()):  # roundings choose others
        folded = check_graph(model.bfloat16())
        layers = 2
        if family in ("smollm3", "granite", "gemma4"):
            assert folded["rotated attention"] == layers
        if family == "gemma4":
            # its norms take the power -1/2; a key without weight has one besides
            assert folded["rms_norm"] == layers * 8


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("kind", ["float32", "int4"])
@over_later
def test_graphs_generate_what_transformers_does(family: str, kind: str) -> None:
    """float32: the same tokens. int4: the same, or the two logits are within the bound; tokens take all experts, since
    roundings would choose others."""
    takes_all = {"num_experts_per_tok": 4} if kind == "int4" and family in CHOOSING else {}
    model = of_family(family, **takes_all).cuda()
    if kind == "int4":
        lb.quantize_(model.bfloat16(), {"lm_head": None, "*": lb.Int4WeightOnly(32)})
    given = settings(3)
    inputs = {name: given.pop(name).cuda() for name in ("input_ids", "attention_mask")}
    if family in WAITING:
        with pytest.raises(ValueError, match="the host waits for the device in it"):
            hf.generate(model, **inputs, **given)
        return
    expected = model.generate(**inputs, **given)
    found = hf.generate(model, **inputs, **given)
    assert kind != "float32" or torch.equal(found, expected)
    check_parting(model, inputs, found, expected)


@pytest.mark.parametrize("family", REFUSED)
def test_models_whose_layers_it_does_not_take(family: str) -> None:
    name, own, said = REFUSED[family]
    model = made(name, own)
    attention = model.model.layers[-1].self_attn
    if family == "deepseek-v3" and not hasattr(attention, "expand_kv"):  # its cache holds keys
        assert torch.equal(hf.generate(model, **settings(3)), model.generate(**settings(3)))
        return
    with pytest.raises(ValueError, match=said):
        hf.generate(model, **settings(3))


def test_hooks_that_move_arguments_let_the_mask_pass() -> None:
    """accelerate asks each argument of a layer whether it can be moved."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = fresh()
    expected = model.generate(**settings(3))
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu", io_same_device=True))
    assert torch.equal(hf.generate(model, **settings(3)), expected)


def test_adapters_of_peft_over_low_bit_weights() -> None:
    """The tokens follow the adapter, also once it is switched off."""
    peft = pytest.importorskip("peft")
    base = fresh()
    lb.quantize_(base, {"lm_head": None, "*": lb.Int4WeightOnly(32)})
    plain = base.generate(**settings(3))
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    model = peft.get_peft_model(base, adapters).eval()
    fill_adapters(model, 0.05)
    expected = model.generate(**settings(3))
    assert not torch.equal(expected, plain)
    assert torch.equal(hf.generate(model, **settings(3)), expected)
    assert torch.equal(model.generate(**settings(3), custom_generate=hf.generate), expected)
    with model.disable_adapter():
        assert torch.equal(hf.generate(model, **settings(3)), plain)
    assert torch.equal(hf.generate(model, **settings(3)), expected)
    check_graph(model.get_base_model())


# ---- prompts of text for models that also see ----------------------------------------------------------------------

TEXT = {**SIZES, "num_hidden_layers": 2, "head_dim": 16}
EYES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
CLIP = {**EYES, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
QWEN = {**EYES, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
IMAGE = 120
"""The token that stands for a part of an image."""
SEEING: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "text_config": TEXT,
        "vision_config": CLIP,
        "image_token_index": IMAGE,
        "mm_tokens_per_image": 4,
    },
    "Mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**CLIP, "model_type": "pixtral"},
        "image_token_index": IMAGE,
    },
    "Qwen3VL": {
        "text_config": {**TEXT, "rope_parameters": AXES},
        "vision_config": QWEN,
        "image_token_id": IMAGE,
    },
}


def seeing(name: str) -> Any:
    config = class_of(f"{name}Config")(**SEEING[name])
    return drawn(class_of(f"{name}ForConditionalGeneration"), config)


@pytest.mark.parametrize("name", SEEING)
def test_prompts_of_text_for_models_that_see(name: str) -> None:
    model, given = seeing(name), settings(3)
    given["input_ids"] = given["input_ids"].clamp(max=99)  # no image
    expected = model.generate(**given)
    assert torch.equal(hf.generate(model, **given), expected)
    assert torch.equal(model.generate(**given, custom_generate=hf.generate), expected)
    check_graph(model.bfloat16())


@pytest.mark.parametrize(
    ("name", "kind"), [("Gemma3", "token_type_ids"), ("Qwen3VL", "mm_token_type_ids")]
)
def test_token_types_of_text_change_nothing(name: str, kind: str) -> None:
    model, given = seeing(name), settings(1)
    types: Tensor = torch.zeros_like(given["input_ids"])
    if kind not in inspect.signature(model.forward).parameters:
        pytest.skip(f"this release of transformers has another name than {kind}")
    expected = hf.generate(model, **given)
    assert torch.equal(hf.generate(model, **given, **{kind: types}), expected)
    types[0, 2] = 1
    with pytest.raises(ValueError, match=f"does not take {kind}"):
        hf.generate(model, **given, **{kind: types})


def test_token_types_that_a_model_embeds_are_refused() -> None:
    """GPT-2 adds an embedding of each type, also of 0."""
    sizes = {"vocab_size": 128, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model, given = (
        drawn(transformers.GPT2LMHeadModel, transformers.GPT2Config(**sizes)),
        settings(1),
    )
    types = {"token_type_ids": torch.zeros_like(given["input_ids"])}
    expected = model.generate(**given)
    assert torch.equal(hf.generate(model, **given), expected)
    assert not torch.equal(model.generate(**given, **types), expected)
    with pytest.raises(ValueError, match="does not take token_type_ids"):
        hf.generate(model, **given, **types)


def test_an_image_is_refused() -> None:
    model, given = seeing("Gemma3"), settings(1)
    given["input_ids"][0, : model.config.mm_tokens_per_image] = IMAGE
    with pytest.raises(ValueError, match=r"does not take (images|pixel_values)"):
        hf.generate(model, **given, pixel_values=torch.zeros(1, 3, 28, 28))

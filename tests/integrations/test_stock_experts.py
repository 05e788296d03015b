"""Stock mixtures of transformers: `quantize_` takes their experts without a filter, and leaves their routers alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit_kernels.runtime import launches
from tests.integrations.models import SIZES, TOKENS, gpt_oss, logits, mixtral, qwen3_moe, train
from tests.schemes import relative_error

transformers = pytest.importorskip("transformers")

INT4 = lb.Int4WeightOnly(16)
PATTERNS = {"lm_head": None, "*": INT4}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "num_key_value_heads": 4},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
}
LLAMA4 = {
    **{"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64},
    **{"head_dim": 16, "interleave_moe_layer_step": 1, "attention_chunk_size": 64},
}
JETMOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}


def made(config: str, model: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        if not hasattr(transformers, model):
            pytest.skip(f"this transformers has no {model}")
        torch.manual_seed(0)
        own = getattr(transformers, config)(**{**SIZES, **settings})
        return getattr(transformers, model)(own).eval()

    return make


FAMILIES: dict[str, tuple[Callable[[], Any], int, set[str]]] = {
    "mixtral": (mixtral, 2, {"mlp.gate"}),
    "qwen3-moe": (qwen3_moe, 2, {"mlp.gate"}),
    "gpt-oss": (gpt_oss, 2, {"mlp.router"}),
    "qwen2-moe": (
        made("Qwen2MoeConfig", "Qwen2MoeForCausalLM", shared_expert_intermediate_size=32, **ROUTED),
        2,
        {"mlp.gate", "mlp.shared_expert_gate"},
    ),
    "deepseek-v3": (
        made("DeepseekV3Config", "DeepseekV3ForCausalLM", **DEEPSEEK),
        2,
        {"mlp.gate"},
    ),
    "llama4": (
        made("Llama4TextConfig", "Llama4ForCausalLM", **LLAMA4),
        2,
        {"feed_forward.router"},
    ),
    "jetmoe": (
        made("JetMoeConfig", "JetMoeForCausalLM", **JETMOE),
        4,
        {"mlp.router.layer", "self_attention.experts.router.layer"},
    ),
}
"""How to make a model, its stacks of experts in a layer, and its routers."""
INPUTS_FIRST = {"gpt-oss", "llama4"}
families = pytest.mark.parametrize("family", FAMILIES)


def stacks(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.ndim == 3}


def routers(model: nn.Module, family: str) -> set[str]:
    ends = tuple(f"{end}.weight" for end in FAMILIES[family][2])
    return {name for name, _ in model.named_parameters() if name.endswith(ends)}


# ---- quantize_ -------------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("schemes", [INT4, PATTERNS], ids=["a bare scheme", "patterns"])
def test_experts_are_taken_and_routers_are_not(family: str, schemes: Any, tmp_path: Path) -> None:
    make, count, _ = FAMILIES[family]
    model = make()
    plain = logits(model)
    report = lb.quantize_(model, schemes)
    taken = {n for n, p in stacks(model).items() if isinstance(p, lb.LowbitTensor)}
    assert len(taken) == count and taken <= {*report.converted}
    assert all(p.transposed == (family in INPUTS_FIRST) for p in stacks(model).values())
    left = routers(model, family)
    assert len(left) == len(FAMILIES[family][2])
    for name in left:
        assert report.left[name] == "a router: a pattern that names it converts it"
        assert f"- {name} " in str(report)
    found = logits(model)
    assert 0 < relative_error(found, plain) < 0.3
    tokens = model.generate(TOKENS, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (2, 16)

    lb.save(model, tmp_path / "model.safetensors")
    again = make()
    again.load_state_dict(lb.load(tmp_path / "model.safetensors"), assign=True)
    assert torch.equal(logits(again), found)
    values = copy.deepcopy(model)
    lb.dequantize_(values)
    assert not any(isinstance(p, lb.LowbitTensor) for p in values.parameters())
    assert relative_error(logits(values), found) < 1e-5
    model.save_pretrained(tmp_path / "saved")
    kind = type(model)
    assert torch.equal(logits(kind.from_pretrained(tmp_path / "saved").eval()), found)


@families
def test_the_weights_are_those_of_lowbit_config(family: str, tmp_path: Path) -> None:
    from lowbit.hf import LowbitConfig

    make = FAMILIES[family][0]
    model = make()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=LowbitConfig(INT4)).eval()
    report = lb.quantize_(model, PATTERNS)
    assert {*report.converted} == {*loaded.hf_quantizer.report.converted}
    for name, weight in model.named_parameters():
        other = loaded.get_parameter(name)
        assert type(other) is type(weight) and torch.equal(other, weight), name
    assert torch.equal(logits(loaded), logits(model))


@families
@pytest.mark.parametrize("flow", [lb.quantize_, lb.qat.prepare_], ids=["quantize_", "prepare_"])
def test_patterns_for_experts_need_no_filter(family: str, flow: Any) -> None:
    """ "*.experts.*" takes the stacks that it matches, a router needs its name."""
    model = FAMILIES[family][0]()
    names = stacks(model)
    inside = {n for n in names if ".experts." in n}
    if inside:
        assert {*flow(model, {"*.experts.*": INT4}).converted} == inside
    one = next(iter(names))
    _, _, last = one.removesuffix(".weight").rpartition(".")
    for pattern in (one, f"*.{last}", f"re:.*\\.{last}(\\.weight)?"):
        model = FAMILIES[family][0]()
        found = {*flow(model, {pattern: INT4}).converted}
        assert one in found and all(last in name for name in found)
    model = FAMILIES[family][0]()
    router = next(iter(sorted(routers(model, family))))
    report = flow(model, {router: INT4})
    assert report.converted == [router]
    logits(model)


def test_a_pattern_for_no_weight_is_refused_with_what_it_left() -> None:
    for flow in (lb.quantize_, lb.qat.prepare_):
        model = qwen3_moe()
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match=r"\['\*\.expert\.\*'\] chose no weight"):
            flow(model, {"*.expert.*": INT4, "*": INT4})
        with pytest.raises(ValueError, match=r"mlp\.gate\.weight: a router: a pattern that names"):
            flow(model, {"*mlp.gate*": INT4})
        assert all(model.get_parameter(n) is p for n, p in before.items())


def test_a_filter_chooses_as_before() -> None:
    model = qwen3_moe()
    linears = lambda module, name: isinstance(module, nn.Linear)  # noqa: E731
    report = lb.quantize_(model, INT4, linears)
    assert all(report.left[name] == "not selected by the filter" for name in stacks(model))
    report = lb.quantize_(model, INT4, lambda module, name: name.endswith("experts"))
    assert {*report.converted} == {*stacks(model)}


def test_position_embeddings_are_no_experts() -> None:
    """They have three dimensions as well, and only a pattern that names them takes them."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.ViTConfig(**sizes, num_hidden_layers=1, image_size=16, patch_size=4)
    model = transformers.ViTModel(config)
    name = next(n for n, p in model.named_parameters() if p.ndim == 3 and p.shape[1] > 1)
    report = lb.quantize_(model, {"*": INT4})
    assert "a pattern that names it" in report.left[name]
    assert all("weight" in converted for converted in report.converted)
    model = transformers.ViTModel(config)
    assert lb.quantize_(model, {name: INT4}).converted == [name]


# ---- QAT and training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("scheme", [INT4, lb.IntxWeightOnly(3, 16, "asymmetric")], ids=str)
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "llama4"])
def test_qat_takes_the_same_weights(family: str, scheme: lb.Scheme, scales: Any) -> None:
    """What is converted equals what was trained to the bit, and without training what `quantize_` makes."""
    make = FAMILIES[family][0]
    model, quantized = make(), make()
    patterns = {"lm_head": None, "*": scheme}
    report = lb.qat.prepare_(model, patterns, scales=scales)
    assert report.converted == lb.quantize_(quantized, patterns).converted
    assert not routers(model, family) & {*report.converted}
    if scales == "present":
        assert torch.equal(logits(model), logits(quantized))
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), steps=3)
    assert losses[-1] < losses[0]
    expected = logits(model)
    lb.qat.convert_(model)
    assert torch.equal(logits(model), expected)
    for name, weight in stacks(model).items():
        own = quantized.get_parameter(name)
        assert weight.meta() == own.meta() and weight.codes.shape == own.codes.shape


def test_qat_with_rounded_inputs_leaves_experts_that_are_stored_inputs_first() -> None:
    model = gpt_oss()
    report = lb.qat.prepare_(model, lb.Int8DynamicActivationInt4Weight(16))
    for name in stacks(model):
        assert report.left[name].startswith("stored as [experts, inputs, outputs], whose input")
    converted = lb.qat.convert_(model)
    assert len(converted.converted) == len(report.converted)
    with pytest.raises(ValueError, match=r"nothing to prepare.*_proj: stored as \[experts, inputs"):
        lb.qat.prepare_(gpt_oss(), {"*.experts.*": lb.Int8DynamicActivationInt4Weight(16)})


TRAINED = {
    "int8": lb.Int8MixedPrecision(always=True),
    "int8 weight": lb.train.Int8Weight(),
    "bitnet": lb.BitNet(),
}


@pytest.mark.parametrize("scheme", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_training_schemes_take_the_same_weights(family: str, scheme: Any) -> None:
    model, quantized = (FAMILIES[family][0]() for _ in range(2))
    report = lb.train.prepare_(model, scheme)
    expected = {*lb.quantize_(quantized, INT4).converted}
    if family in INPUTS_FIRST and not isinstance(scheme, lb.train.Int8Weight):  # it has no products
        assert all("[experts, inputs, outputs]" in report.left[name] for name in stacks(model))
        expected -= {*stacks(model)}
    assert {*report.converted} == expected
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    assert losses[-1] < losses[0]
    lb.train.restore_(model)
    assert not any(isinstance(p, lb.LowbitTensor) for p in model.parameters())


def test_blocks_of_experts_with_inputs_first() -> None:
    """a outputs by b inputs, as for linears; but PerBlock(g, 1) is PerGroup(g), and for linears g outputs."""
    found: dict[str, Any] = {}
    for name, granularity in {
        "tiles": lb.PerBlock(16, 32),
        "columns": lb.PerBlock(16, 1),
        "groups": lb.PerGroup(16),
    }.items():
        model = FAMILIES["gpt-oss"][0]()
        plain = next(iter(stacks(model).values())).detach().clone()  # [E, K, N]
        linear = model.model.layers[0].self_attn.o_proj
        lb.quantize_(model, lb.Scheme(lb.Spec(lb.Int(8), granularity)))
        stack = next(iter(stacks(model).values()))
        found[name] = stack
        (experts, inputs, outputs), (rows, columns) = plain.shape, linear.weight.shape
        if name == "tiles":
            assert stack.scale.shape == (experts, -(-outputs // 16), -(-inputs // 32))
            assert linear.weight.scale.shape == (-(-rows // 16), -(-columns // 32))
        elif name == "columns":
            assert linear.weight.scale.shape == (-(-rows // 16), columns)
    assert found["columns"].spec == found["groups"].spec
    assert torch.equal(found["columns"].dequantize(), found["groups"].dequantize())


# ---- the products of the chosen experts -----------------------------------------------------------------------------

ROUTED_FAMILIES = [family for family in FAMILIES if family not in ("llama4", "jetmoe")]
"""Those whose experts have transformers' interface."""
IMPLEMENTATIONS = ["grouped_mm", "batched_mm", "eager"]


def converted(family: str, scheme: lb.Scheme, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = FAMILIES[family][0]().to(dtype)
    lb.quantize_(model, {"lm_head": None, "*.experts.*": scheme})
    return model


def exact(model: nn.Module) -> tuple[Tensor, float]:
    """The logits of the dequantized weights in float32, and how far they are off in 16 bits."""
    plain = copy.deepcopy(model)
    lb.dequantize_(plain)
    in_16_bits = logits(plain).float()
    expected = logits(plain.float())
    return expected, relative_error(in_16_bits, expected)


@pytest.mark.parametrize(
    "scheme",
    [lb.Int4WeightOnly(32), lb.Int8WeightOnly(), lb.Float8WeightOnly(), lb.MXFP4WeightOnly()],
    ids=str,
)
@pytest.mark.parametrize("family", ROUTED_FAMILIES)
def test_chosen_experts_in_16_bits(family: str, scheme: lb.Scheme) -> None:
    """One product of the chosen experts each for up and down, whatever the implementation that is set."""
    model = converted(family, scheme)
    expected, bound = exact(model)
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        with launches.counted() as calls:
            found = logits(model)
        assert calls["expert_linear", "loop"] == 2, calls
        assert relative_error(found.float(), expected) < 1.5 * bound
    with torch.no_grad():
        traced = lb.trace(model, TOKENS, backward=False)
    names = [n for n in stacks(model) if n.endswith(("gate_up_proj", "down_proj"))]
    assert {p.layer for p in traced.products} >= {*names}


@pytest.mark.cover("values")
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("family", ROUTED_FAMILIES)
def test_compiled_experts_in_16_bits(family: str, implementation: str) -> None:
    """One graph without breaks and without subclasses among its inputs; other lengths of the prompt bring one more."""
    torch._dynamo.reset()
    model = converted(family, lb.Int4WeightOnly(32))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(inputs)
        return graph

    fast = torch.compile(model, backend=backend, fullgraph=True)
    model.set_experts_implementation(implementation)
    with torch.no_grad(), launches.counted() as calls:
        for length in (12, 9, 7, 12):
            found = fast(input_ids=TOKENS[:, :length], use_cache=False).logits
    assert relative_error(found.float(), logits(model).float()) < 5e-3  # sums round once more
    assert calls["expert_linear", "loop"] == 8
    assert len(graphs) <= 2
    assert not any(isinstance(t, lb.LowbitTensor) for inputs in graphs for t in inputs)


@pytest.mark.cover("values")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_compiled_experts_in_float32(family: str, implementation: str) -> None:
    torch._dynamo.reset()
    model = converted(family, lb.Int4WeightOnly(32), torch.float32)
    model.set_experts_implementation(implementation)
    expected = logits(model)
    fast = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        found = fast(input_ids=TOKENS, use_cache=False).logits
    assert relative_error(found, expected) < 1e-5


@pytest.mark.gpu
def test_llama4_multiplies_by_a_kernel_too() -> None:
    """Its experts take all tokens, as one product of stacks."""
    model = converted("llama4", lb.Int4WeightOnly(32)).cuda()
    plain = copy.deepcopy(model)
    lb.dequantize_(plain)
    tokens = TOKENS.cuda()
    with torch.no_grad(), launches.counted() as calls:
        found = model(input_ids=tokens).logits
        expected = plain.float()(input_ids=tokens).logits
    assert sum(n for (name, _), n in calls.items() if name == "expert_linear") == 2
    assert relative_error(found.float(), expected) < 2e-2


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_gradients_through_frozen_experts_take_the_stock_way(family: str) -> None:
    model = converted(family, lb.Int4WeightOnly(32))
    plain = copy.deepcopy(model)
    lb.dequantize_(plain)
    hidden = torch.randn(6, 64, dtype=torch.bfloat16)
    grads = []
    for one in (model, plain):
        (experts,) = (m for n, m in one.named_modules() if n.endswith("experts"))
        x = hidden.clone().requires_grad_()
        ids = torch.arange(12).view(6, 2) % 4
        y = experts(x, ids, torch.full((6, 2), 0.5, dtype=torch.bfloat16))
        y.square().sum().backward()
        grads.append(x.grad)
    assert relative_error(*grads) < 2e-2


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3"])
def test_adapters_of_experts(family: str) -> None:
    """PEFT's LoRA of the stacked parameters: products beside those of the packed stack, which stays as it is."""
    peft = pytest.importorskip("peft")
    model = FAMILIES[family][0]()
    lb.quantize_(model, PATTERNS)
    base = logits(model)
    plain = copy.deepcopy(model)
    lb.dequantize_(plain)
    targets = [name for name, _ in stacks(model).items()]
    adapted = []
    for one in (model, plain):
        config = peft.LoraConfig(r=2, target_modules=[], target_parameters=targets)
        adapted.append(peft.get_peft_model(one, config))
        torch.manual_seed(1)
        for p in adapted[-1].parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.2)
        with launches.counted() as calls:
            adapted[-1](TOKENS, labels=TOKENS).loss.backward()
        # an output and an input's gradient of each stack; inputs of the first one may need no gradient
        count = calls["add_grouped_mm", "torch"]
        assert count == 0 if one is plain else count in (2 * len(targets), 2 * len(targets) - 1)
    found, expected = (
        [p.grad for p in one.parameters() if p.requires_grad and p.grad is not None]
        for one in adapted
    )
    assert len(found) == len(expected) == 2 * len(targets)
    for own, other in zip(found, expected, strict=True):
        assert relative_error(own, other) < 1e-4
    outputs = logits(adapted[0])
    assert relative_error(outputs, logits(adapted[1])) < 1e-5
    assert relative_error(outputs, base) > 1e-3
    assert torch.equal(logits(copy.deepcopy(adapted[0])), outputs)
    assert torch.equal(logits(adapted[0].unload()), base)


def test_decoding_generates_as_dequantized_weights_do() -> None:
    model = converted("qwen3-moe", lb.Int4WeightOnly(32))
    plain = copy.deepcopy(model)
    lb.dequantize_(plain)
    settings = {"max_new_tokens": 8, "do_sample": False, "output_logits": True}
    found, expected = (
        m.generate(TOKENS, return_dict_in_generate=True, **settings) for m in (model, plain)
    )
    assert relative_error(found.logits[0].float(), expected.logits[0].float()) < 2e-2
    assert found.sequences.shape == expected.sequences.shape


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_silu_is_a_part_of_the_product(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted(family, lb.Int4WeightOnly(32))
    expected = logits(model)
    experts = next(m for n, m in model.named_modules() if n.endswith(".mlp.experts"))
    monkeypatch.setattr(type(experts), "_apply_gate", None)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(("family", "routers"), [("qwen3-moe", 1), ("mixtral", 1), ("gpt-oss", 0)])
def test_a_traced_router_becomes_one_op(family: str, routers: int) -> None:
    """Softmax, the largest, their sum, the quotient and its rounding, where the model has them in this order."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from lowbit.interop.hf.decoding.folding import fold

    block = converted(family, lb.Int4WeightOnly(32)).model.layers[0].mlp
    hidden = torch.randn(1, 3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        graph = make_fx(block)(hidden)
        counts = fold(graph)
        with launches.counted() as calls:
            found, expected = graph(hidden), block(hidden)
    ran = sum(n for (op, _), n in calls.items() if op == "top_experts")
    assert counts.get("router", 0) == ran == routers
    pairs = (found, expected) if routers == 0 else ((found,), (expected,))
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def test_other_choices_of_the_largest_stay() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from lowbit.interop.hf.decoding.folding import fold

    def unnormalized(x: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = x.softmax(-1, dtype=torch.float32).topk(2)
        return values, ids

    def read_twice(x: Tensor) -> tuple[Tensor, ...]:
        values, ids = x.softmax(-1, dtype=torch.float32).topk(2)
        return values / values.sum(-1, keepdim=True), values, ids

    def smallest(x: Tensor) -> Any:
        return x.softmax(-1, dtype=torch.float32).topk(2, largest=False)

    x = torch.randn(3, 8, dtype=torch.bfloat16)
    for function, folded in ((unnormalized, 1), (read_twice, 1), (smallest, 0)):
        graph = make_fx(function)(x)
        assert fold(graph).get("router", 0) == folded
        assert all(torch.equal(a, b) for a, b in zip(graph(x), function(x), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [lb.Int4WeightOnly(32), lb.MXFP4WeightOnly()], ids=str)
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_decoding_in_a_cuda_graph(family: str, scheme: lb.Scheme) -> None:
    """Nothing waits for the host, and replays follow the router's choice."""
    model = converted(family, scheme).cuda()
    (experts,) = (m for n, m in model.named_modules() if n.endswith("experts"))
    plain = copy.deepcopy(experts)
    lb.dequantize_(plain)
    plain.float()
    x = torch.randn(5, 64, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(5, 2, device="cuda").bfloat16()
    ids = torch.arange(10, device="cuda").view(5, 2) % 4
    with torch.no_grad():
        experts(x, ids, weights)
        torch.cuda.set_sync_debug_mode("error")
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph), launches.counted() as calls:
                found = experts(x, ids, weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sum(n for (name, _), n in calls.items() if name == "expert_linear") == 2
        for shift in range(3):
            ids.copy_((torch.arange(10) + shift).view(5, 2) % 4)
            graph.replay()
            expected = plain(x.float(), ids, weights.float())
            assert relative_error(found.float(), expected) < 1e-2

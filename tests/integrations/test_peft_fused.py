"""LoRA layers of PEFT with the outputs and gradients that PEFT computes, in fewer passes: by themselves over low-bit
weights, and by `lowbit.peft.fuse_`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
import lowbit.peft
from lowbit.layers import fused_lora
from lowbit.layers.stand_in import take
from tests.integrations.models import TOKENS, fill_adapters, is_inner_linear, llama

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

SCHEMES = {
    "nf4": lb.NF4WeightOnly(32, double_quantization=True),
    "int4": lb.Int4WeightOnly(32),
    "mxfp4": lb.MXFP4WeightOnly(),
    "int8xint4": lb.Int8DynamicActivationInt4Weight(32),
    "float8-blocks": lb.Float8WeightOnly(lb.PerBlock(32, 32)),
    "plain": None,
}


def adapted(scheme: str, config: Any = None, **changes: Any) -> Any:
    model = llama(num_hidden_layers=2, **changes)
    if SCHEMES[scheme] is not None:
        lb.quantize_(model, SCHEMES[scheme], is_inner_linear)
    model = peft.get_peft_model(model, config or peft.LoraConfig(r=4, target_modules="all-linear"))
    torch.manual_seed(1)
    fill_adapters(model, 0.1)
    return model.train()


def as_peft_runs(model: Any) -> Any:
    model = copy.deepcopy(model)
    for module in model.modules():
        take(module, fused_lora.FewerPasses)
    return model


def gradients(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """By name, the loss too."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {**found, "loss": loss.detach()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], most: float):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= most * grad.norm(), name


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of fused products so far."""
    count, forward = [0], fused_lora._Product.forward

    def counting(*args: Any) -> torch.Tensor:
        count[0] += 1
        return forward(*args)

    monkeypatch.setattr(fused_lora._Product, "forward", staticmethod(counting))
    return count


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_peft(scheme: str, checkpointed: bool, products: list[int]) -> None:
    model = adapted(scheme)
    expected = gradients(as_peft_runs(model))
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # The last product of each of two blocks does not run twice.
    usual = 28 - 2 if checkpointed else 14
    assert_same(gradients(model), expected, 0 if scheme == "plain" else 2e-6)
    assert products == [0 if scheme == "plain" else usual]
    products[0] = 0
    assert lowbit.peft.fuse_(model) == 14 and lowbit.peft.fuse_(model) == 0
    assert_same(gradients(model), expected, 2e-6)
    assert products == [usual]


def test_gradients_against_float64() -> None:
    """Of x, A and B of one layer, by the formula."""
    base = nn.Linear(64, 48)
    lb.quantize_(base, SCHEMES["nf4"], lambda module, name: True)
    layer = peft.get_peft_model(
        nn.Sequential(base), peft.LoraConfig(r=4, lora_alpha=12, target_modules=["0"])
    )
    lowbit.peft.fuse_(layer)
    lora = layer.get_base_model()[0]
    assert isinstance(lora, fused_lora.Fused)
    a, b = lora.lora_A["default"].weight, lora.lora_B["default"].weight
    nn.init.normal_(b)
    x, grad = torch.randn(5, 3, 64, requires_grad=True), torch.randn(5, 3, 48)
    y = layer(x)
    wide = [t.detach().double().requires_grad_() for t in (x, a, b)]
    weight = base.weight.dequantize().double() + 3 * wide[2] @ wide[1]
    exact = wide[0] @ weight.T + base.bias.double()
    assert (y - exact).norm() <= 1e-6 * exact.norm()
    of_x = torch.autograd.grad(y, (x, a, b), grad)
    for name, found, own in zip(
        "xab", of_x, torch.autograd.grad(exact, wide, grad.double()), strict=True
    ):
        assert (found - own).norm() <= 1e-6 * own.norm(), name


def test_bfloat16_under_autocast(products: list[int]) -> None:
    model = adapted("nf4")
    plain = as_peft_runs(model)
    exact = gradients(plain)
    expected = gradients(plain, torch.bfloat16)
    found = gradients(model, torch.bfloat16)
    assert products == [14]
    errors, own = (
        torch.stack([(given[n] - g).norm() / g.norm() for n, g in exact.items()])
        for given in (found, expected)
    )
    assert errors.mean() <= 1.2 * own.mean() and errors.max() <= 1.5 * own.max(), (errors, own)


def test_a_write_between_forward_and_backward_raises() -> None:
    model = adapted("int4")
    lowbit.peft.fuse_(model)
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_A" in n).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("scheme", ["nf4", "int8xint4"])
def test_outputs_change_in_place(scheme: str, products: list[int]) -> None:
    base = nn.Linear(64, 48)
    lb.quantize_(base, SCHEMES[scheme], lambda module, name: True)
    layer = peft.get_peft_model(nn.Sequential(base), peft.LoraConfig(r=4, target_modules=["0"]))
    lowbit.peft.fuse_(layer)
    b = layer.get_base_model()[0].lora_B["default"].weight
    x = torch.randn(5, 3, 64)
    (expected,) = torch.autograd.grad((layer(x) * 3).sum(), b)
    (found,) = torch.autograd.grad(layer(x).mul_(3).sum(), b)
    assert torch.equal(found, expected) and expected.any() and products == [2]


def test_several_adapters_add_up() -> None:
    model = adapted("int4")
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=3, target_modules="all-linear"))
    model.base_model.set_adapter(["default", "other"])
    expected = gradients(as_peft_runs(model))
    assert_same(gradients(model), expected, 2e-6)


def test_several_adapters_in_train_mode_under_inference_mode() -> None:
    model = adapted("int4")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules="all-linear"))
    model.base_model.set_adapter(["default", "other"])
    with torch.inference_mode():
        found, expected = (m.train()(input_ids=TOKENS).logits for m in (model, as_peft_runs(model)))
    torch.testing.assert_close(found, expected)


def test_forward_mode_is_peft_s(products: list[int]) -> None:
    layer, x, along = one_layer(), torch.randn(5, 64), torch.randn(5, 64)
    layer.base_layer = nn.Linear(64, 48).requires_grad_(False)
    lowbit.peft.fuse_(layer)
    with torch.autograd.forward_ad.dual_level():
        y = layer(torch.autograd.forward_ad.make_dual(x, along))
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    zero = torch.zeros_like(x)
    torch.testing.assert_close(tangent, layer(along) - layer(zero))
    assert products == [2]


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_other_adapters_run_by_peft(config: dict[str, Any], products: list[int]) -> None:
    model = adapted("int4", peft.LoraConfig(r=4, target_modules="all-linear", **config))
    torch.manual_seed(2)
    expected = gradients(as_peft_runs(model))
    lowbit.peft.fuse_(model)
    torch.manual_seed(2)
    assert_same(gradients(model), expected, 0)
    assert products == [0]


def test_evaluation_disabled_adapters_and_hooks(products: list[int]) -> None:
    model = as_peft_runs(adapted("nf4")).eval()
    before = model(input_ids=TOKENS).logits.detach()
    with model.disable_adapter():
        disabled = model(input_ids=TOKENS).logits.detach()
    lowbit.peft.fuse_(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=TOKENS).logits, before)
    with model.disable_adapter():
        assert torch.equal(model(input_ids=TOKENS).logits, disabled)
    assert products == [0]
    model.train()
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, lb.LowbitTensor):
            module.register_forward_hook(lambda *_: seen.append(1))
    model(input_ids=TOKENS)
    assert products == [0] and len(seen) == 14


def test_hooks_that_do_nothing_give_the_forward_of_peft(products: list[int]) -> None:
    """The switch that docs/integrations.md names: the bits are PEFT's, with its casts, under autocast too."""
    model = adapted("nf4")
    plain = as_peft_runs(model)
    for name, module in model.named_modules():
        if name.endswith(".lora_A.default"):
            module.register_forward_hook(lambda *_: None)
    for dtype in (torch.float32, torch.bfloat16):
        found, expected = gradients(model, dtype), gradients(plain, dtype)
        assert found.keys() == expected.keys() and not products[0]
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_hooks_of_factors_run(products: list[int]) -> None:
    model = adapted("nf4", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    lowbit.peft.fuse_(model)
    layers = [m for m in model.modules() if isinstance(m, fused_lora.Fused)]
    layers[0].lora_A["default"].register_forward_hook(lambda *args: args[2] * 0)
    layers[1].lora_B["default"].register_forward_pre_hook(lambda _, args: (args[0] * 0,))
    found = model(input_ids=TOKENS).logits
    assert products == [0]
    with model.disable_adapter():
        assert torch.equal(found, model(input_ids=TOKENS).logits)


def test_layers_stay_those_of_peft(tmp_path) -> None:
    model = adapted("nf4")
    state, expected = model.state_dict(), gradients(as_peft_runs(model))
    lowbit.peft.fuse_(model)
    assert model.state_dict().keys() == state.keys()
    assert_same(gradients(copy.deepcopy(model)), expected, 2e-6)
    model.save_pretrained(tmp_path)
    other = llama(num_hidden_layers=2)
    lb.quantize_(other, SCHEMES["nf4"], is_inner_linear)
    other = peft.PeftModel.from_pretrained(other, tmp_path, is_trainable=True).train()
    assert_same(gradients(other), expected, 2e-6)
    report = lowbit.peft.merge_(model)
    assert len(report.layers) == 14
    report.unmerge_()
    assert_same(gradients(model), expected, 2e-6)


def test_compiled_blocks_are_one_graph(products: list[int]) -> None:
    torch.compiler.reset()
    model = adapted("nf4")
    expected = gradients(as_peft_runs(model))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.get_base_model().model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_same(gradients(model), expected, 1e-5)
    assert products == [0]


def test_models_without_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match="get_peft_model"):
        lowbit.peft.fuse_(llama())
    with pytest.raises(TypeError):
        lowbit.peft.fuse_(3)  # type: ignore[arg-type]


def one_layer(dtype: torch.dtype = torch.float32, kind: Any = None) -> Any:
    """A LoRA layer over a linear [48, 64] in NF4, of this class if it is not PEFT's."""
    base = nn.Linear(64, 48, dtype=dtype)
    lb.quantize_(base, SCHEMES["nf4"], lambda module, name: True)
    config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    if kind is not None:
        config._register_custom_module({nn.Linear: kind})
    model = peft.get_peft_model(nn.Sequential(base), config)
    return model.get_base_model()[0].train()


def test_second_derivatives() -> None:
    layer = one_layer()
    plain, found = as_peft_runs(layer), []
    x, direction = torch.randn(5, 64, requires_grad=True), torch.randn(5, 48)
    for each in (plain, layer):
        own = [x, each.lora_A["default"].weight, each.lora_B["default"].weight]
        first = torch.autograd.grad((each(x).sin() * direction).sum(), own, create_graph=True)
        found.append(torch.autograd.grad(sum((g**2).sum() for g in first), own))
    for name, expected, got in zip("xab", *found, strict=True):
        assert expected.any() and (got - expected).norm() <= 1e-5 * expected.norm(), name


def test_without_autocast_the_factors_dtype_decides(products: list[int]) -> None:
    """PEFT multiplies 16-bit inputs by float32 factors in float32."""
    layer = one_layer(torch.bfloat16)
    assert layer.lora_A["default"].weight.dtype is torch.float32
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    assert torch.equal(layer(x), as_peft_runs(layer)(x)) and products == [0]
    lowbit.peft.fuse_(layer)
    layer(x)
    assert products == [1]
    half = one_layer(torch.bfloat16).bfloat16()
    half(x)
    assert products == [2]


def test_both_passes_of_reentrant_checkpoints_are_fused(products: list[int]) -> None:
    model = adapted("nf4")
    expected = gradients(as_peft_runs(model))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    found = gradients(model)
    assert products == [28]
    assert_same(found, expected, 2e-6)


def test_evaluation_without_gradients_is_peft_s(products: list[int]) -> None:
    layer = one_layer().eval()
    x = torch.randn(5, 64)
    with torch.no_grad():
        assert torch.equal(layer(x), as_peft_runs(layer)(x))
    assert products == [0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_inputs_that_autocast_leaves_alone(dtype: torch.dtype, products: list[int]) -> None:
    layer, x = one_layer(), torch.ones(5, 64, dtype=dtype)
    outcomes = []
    for each in (layer, as_peft_runs(layer)):
        with torch.autocast("cpu", torch.bfloat16):
            try:
                outcomes.append(each(x).dtype)
            except (RuntimeError, ValueError) as error:
                outcomes.append(type(error))
    assert outcomes[0] is outcomes[1] and products == [0]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_dropout(checkpointed: bool, products: list[int]) -> None:
    """In float32 it draws what PEFT draws."""
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)
    model = adapted("nf4", config)
    plain = as_peft_runs(model)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(2)
    expected = gradients(plain)
    torch.manual_seed(2)
    assert_same(gradients(model), expected, 2e-6)
    assert products == [28 - 2 if checkpointed else 14]


def test_dropout_under_autocast() -> None:
    layer = one_layer()
    layer.lora_dropout["default"] = nn.Dropout(0.5)
    weight, bias = layer.base_layer.weight.dequantize(), layer.base_layer.bias
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x, grad = torch.randn(5, 64).bfloat16().requires_grad_(), torch.randn(5, 48).bfloat16()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    found = [y, *torch.autograd.grad(y, (x, a, b), grad)]
    torch.manual_seed(3)
    dropped = nn.functional.dropout(x, 0.5).float()
    expected = x.float() @ weight.T + bias + layer.scaling["default"] * (dropped @ a.T) @ b.T
    wanted = [expected, *torch.autograd.grad(expected, (x, a, b), grad.float())]
    for name, one, exact in zip("yxab", found, wanted, strict=True):
        assert (one - exact).norm() <= 1e-2 * exact.norm(), name


def test_layers_of_users_keep_their_forward(products: list[int]) -> None:
    class Doubled(peft.tuners.lora.layer.Linear):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return 2 * super().forward(x, *args, **kwargs)

    base = nn.Linear(64, 48)
    lb.quantize_(base, SCHEMES["nf4"], lambda module, name: True)
    config = peft.LoraConfig(r=4, target_modules=["0"])
    config._register_custom_module({nn.Linear: Doubled})
    layer = peft.get_peft_model(nn.Sequential(base), config).get_base_model()[0].train()
    x = torch.randn(5, 64)
    assert isinstance(layer, Doubled) and torch.equal(layer(x), 2 * base(x)) and products == [0]


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def _own_forward(module: Any) -> None:
    module.forward = lambda x: nn.functional.linear(x, module.weight, module.bias) + 1


@pytest.mark.parametrize("of", ["base_layer", "lora_A", "lora_B"])
@pytest.mark.parametrize(
    "watch",
    [
        lambda module: module.register_full_backward_hook(lambda _, into, out: (into[0] * 3,)),
        lambda module: module.register_full_backward_pre_hook(lambda _, out: (out[0] * 3,)),
        _own_forward,
    ],
    ids=["backward", "backward_pre", "own_forward"],
)
def test_hooks_of_backward_and_patched_modules(watch: Any, of: str, products: list[int]) -> None:
    found = []
    own = one_layer()
    for layer in (own, as_peft_runs(own)):
        part = getattr(layer, of)
        watch(part["default"] if of != "base_layer" else part)
        x = torch.linspace(-1, 1, 5 * 64).view(5, 64).requires_grad_()
        y = layer(x)
        found.append([y, *torch.autograd.grad(y.sin().sum(), x)])
    assert products == [0] and all(map(torch.equal, *found))


def test_a_forward_that_accelerate_put_back_is_the_class_s(products: list[int]) -> None:
    layer = one_layer()
    layer.base_layer.forward = layer.base_layer.forward
    layer(torch.randn(5, 64))
    assert products == [1]


def test_hooks_of_all_modules_see_the_factors(products: list[int]) -> None:
    layer, seen = one_layer(), []
    with nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m)):
        layer(torch.randn(5, 64))
    assert products == [0] and {layer.lora_A["default"], layer.lora_B["default"]} <= {*seen}


def test_a_dropout_of_the_user_runs(products: list[int]) -> None:
    layer, x = one_layer(), torch.randn(5, 64)
    plain = layer(x)
    layer.lora_dropout["default"] = Twice()
    base = layer.base_layer(x)
    assert torch.allclose(layer(x) - base, 2 * (plain - base), atol=1e-6)
    layer.lora_dropout["default"] = nn.Dropout(1.0)
    layer.eval()
    assert torch.allclose(layer(x), plain, atol=1e-6)
    layer.lora_dropout.train()  # as those do who sample in evaluation
    assert torch.allclose(layer(x), base, atol=1e-6) and products == [4]


@pytest.mark.parametrize("is_earlier", [False, True], ids=["later", "earlier"])
def test_a_patched_forward_of_peft_is_respected(
    is_earlier: bool, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("Linear", (peft.tuners.lora.layer.Linear,), {})  # a class that no test has seen
    layer = None if is_earlier else one_layer(kind=kind)
    plain = peft.tuners.lora.layer.Linear.forward

    def patched(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * plain(self, x, *args, **kwargs)

    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "forward", patched)
    layer = layer or one_layer(kind=kind)
    x = torch.randn(5, 64)
    assert isinstance(layer, kind) and isinstance(layer, fused_lora.FewerPasses)
    assert torch.equal(layer(x), 2 * plain(as_peft_runs(layer), x)) and products == [0]


def test_compiled_autograd() -> None:
    layer = one_layer()
    found = []
    for each in (as_peft_runs(layer), layer):
        x = torch.linspace(-1, 1, 5 * 64).view(5, 64).requires_grad_()
        loss = each(x).sin().sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        found.append([x.grad, *(p.grad for p in each.parameters() if p.grad is not None)])
    assert len(found[1]) == 3
    for name, expected, grad in zip("xab", *found, strict=True):
        assert (grad - expected).norm() <= 2e-6 * expected.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("liger", [False, True], ids=["", "liger"])
def test_autocast_on_a_gpu(liger: bool, products: list[int]) -> None:
    """With checkpoints, and with Liger Kernel, whose functions write into gradients and saved results."""
    model = adapted("nf4").cuda()
    tokens = TOKENS.cuda()

    def found(each: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = each(input_ids=tokens, labels=tokens).loss
        loss.backward()
        grads = [p.grad for p in each.parameters() if p.grad is not None]
        each.zero_grad()
        return [loss.detach(), *grads]

    plain = as_peft_runs(model)
    exact, usual = found(plain, torch.float32), found(plain, torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    llama: Any = pytest.importorskip("transformers.models.llama.modeling_llama")
    rotation = llama.apply_rotary_pos_emb
    if liger:
        kernels = pytest.importorskip("liger_kernel.transformers")
        kernels.apply_liger_kernel_to_llama(model=model.get_base_model())
    try:
        own = found(model, torch.bfloat16)
    finally:
        llama.apply_rotary_pos_emb = rotation
    assert products == [26] and len(own) == len(exact) == 29
    errors, theirs = (
        torch.stack([(g - e).norm() / e.norm() for g, e in zip(given, exact, strict=True)])
        for given in (own, usual)
    )
    assert errors.mean() <= 1.3 * theirs.mean() and errors.max() <= 1.6 * theirs.max()

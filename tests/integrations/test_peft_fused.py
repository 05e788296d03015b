"""`lowbit.peft.fuse_`: PEFT's adapters with the outputs and gradients that PEFT computes, in fewer passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
import lowbit.peft
from lowbit.interop import fused_lora
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
    expected = gradients(model)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert lowbit.peft.fuse_(model) == 14 and lowbit.peft.fuse_(model) == 0
    assert_same(gradients(model), expected, 2e-6)
    # The last product of each of two blocks does not run twice.
    assert products == [28 - 2 if checkpointed else 14]


def test_gradients_against_float64() -> None:
    """Of x, A and B of one layer, by the formula."""
    base = nn.Linear(64, 48)
    lb.quantize_(base, SCHEMES["nf4"], lambda module, name: True)
    layer = peft.get_peft_model(
        nn.Sequential(base), peft.LoraConfig(r=4, lora_alpha=12, target_modules=["0"])
    )
    lowbit.peft.fuse_(layer)
    lora = layer.get_base_model()[0]
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
    exact = gradients(model)
    expected = gradients(model, torch.bfloat16)
    lowbit.peft.fuse_(model)
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
    expected = gradients(model)
    lowbit.peft.fuse_(model)
    assert_same(gradients(model), expected, 2e-6)


@pytest.mark.parametrize(
    "config", [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}], ids=str
)
def test_other_adapters_run_by_peft(config: dict[str, Any], products: list[int]) -> None:
    model = adapted("int4", peft.LoraConfig(r=4, target_modules="all-linear", **config))
    torch.manual_seed(2)
    expected = gradients(model)
    lowbit.peft.fuse_(model)
    torch.manual_seed(2)
    assert_same(gradients(model), expected, 0)
    assert products == [0]


def test_evaluation_disabled_adapters_and_hooks(products: list[int]) -> None:
    model = adapted("nf4")
    before = model(input_ids=TOKENS).logits.detach()
    with model.disable_adapter():
        disabled = model(input_ids=TOKENS).logits.detach()
    lowbit.peft.fuse_(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=TOKENS).logits, before)
    with model.disable_adapter():
        assert torch.equal(model(input_ids=TOKENS).logits, disabled)
    assert products == [0]
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, lb.LowbitTensor):
            module.register_forward_hook(lambda *_: seen.append(1))
    model(input_ids=TOKENS)
    assert products == [0] and len(seen) == 14


def test_hooks_of_factors_run(products: list[int]) -> None:
    model = adapted("nf4", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    lowbit.peft.fuse_(model)
    layers = [m for m in model.modules() if isinstance(m, fused_lora._Fused)]
    layers[0].lora_A["default"].register_forward_hook(lambda *args: args[2] * 0)
    layers[1].lora_B["default"].register_forward_pre_hook(lambda _, args: (args[0] * 0,))
    found = model(input_ids=TOKENS).logits
    assert products == [0]
    with model.disable_adapter():
        assert torch.equal(found, model(input_ids=TOKENS).logits)


def test_layers_stay_those_of_peft(tmp_path) -> None:
    model = adapted("nf4")
    state, expected = model.state_dict(), gradients(model)
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
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lowbit.peft.fuse_(model)
    for layer in model.get_base_model().model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_same(gradients(model), expected, 1e-5)
    assert products == [0]


def test_models_without_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match="get_peft_model"):
        lowbit.peft.fuse_(llama())
    with pytest.raises(TypeError):
        lowbit.peft.fuse_(3)  # type: ignore[arg-type]

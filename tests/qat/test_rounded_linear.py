"""The linear of a prepared weight keeps what a high-precision one keeps, and has the gradients of its roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit
from lowbit import Scheme, qat
from lowbit.linear import fused_rounding
from lowbit.numerics.granularity import PerGroup, PerRow, PerToken
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.spec import Spec
from lowbit.tensor.trained.learned_scales import scales_of
from lowbit_kernels.runtime.launches import counted
from tests.qat.test_factors import rounded_by_factors

CLIPS = Spec(Int(8), PerToken())  # the largest positive value of a token
SCHEMES = {
    "int4": lowbit.Int4WeightOnly(128),
    "int4-asymmetric": lowbit.Int4WeightOnly(32, "asymmetric"),
    "int4-float-zero": lowbit.Int4WeightOnly(32, "float_zero_point"),
    "int4-float16-scales": lowbit.Int4WeightOnly(32, scale_dtype=torch.float16),
    "int4-float16-minimum": lowbit.Int4WeightOnly(
        32, "float_zero_point", scale_dtype=torch.float16
    ),
    "int2-half": lowbit.Int2WeightOnly(),
    "int8-row": lowbit.Int8WeightOnly(),
    "float8": lowbit.Float8WeightOnly(),
    "int4-int8": lowbit.Int8DynamicActivationInt4Weight(32),
    "int4-int8-clipped": Scheme(Spec(Int(4), PerGroup(32)), CLIPS),
    "int4-float8": Scheme(Spec(Int(4), PerGroup(32)), Spec(Float8(), PerToken())),
    "int4-padded": Scheme(Spec(Int(4), PerGroup(48))),
    "int3-row": Scheme(Spec(Int(3), PerRow())),
}
DTYPES = [torch.float32, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("x", "weight", "bias", "scale", "zero")


def prepared(scheme: Scheme, scales: str, dtype: torch.dtype, device: str = "cpu") -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 24)).to(device, dtype)
    qat.prepare_(model, scheme, scales=scales)
    return model[0]  # type: ignore[return-value]


def operands(layer: Any, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Everything that the product is differentiated by, by name."""
    x = torch.randn(2, 5, 64, device=device).to(dtype).requires_grad_()
    found = {"x": x, "weight": layer.weight, "bias": layer.bias}
    if "weight_scale" in layer._parameters:
        found |= dict(zip(NAMES[3:], scales_of(layer), strict=True))
    return {name: t for name, t in found.items() if t is not None}


def by_formula(layer: Any, found: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The product of the rounded operands and its gradients by name, the products in float64."""
    x, weight = (t.detach().clone() for t in (found["x"], layer.weight.weight))
    scheme = layer.weight.scheme
    leaves = {"x": x, "weight": weight, "bias": found["bias"].detach().clone()}
    leaves |= {name: found[name].detach().clone() for name in NAMES[3:] if name in found}
    for t in leaves.values():
        t.requires_grad_()
    own = x if scheme.activation is None else scheme.activation.fake_quantize(x)
    if "scale" in leaves:
        values = rounded_by_factors(weight, leaves["scale"], leaves.get("zero"), scheme.weight)
    else:
        values = scheme.weight.fake_quantize(weight, weight.dtype)
    y = F.linear(own.double(), values.double(), leaves["bias"].double())
    grads = torch.autograd.grad(y.square().sum(), [*leaves.values()])
    return y, dict(zip(leaves, grads, strict=True))


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_gradients(scheme: Scheme, scales: str, dtype: torch.dtype, device: str) -> None:
    layer = prepared(scheme, scales, dtype, device)
    found = operands(layer, dtype, device)
    y = layer(found["x"])
    grads = torch.autograd.grad(y.double().square().sum(), [*found.values()])
    expected_y, expected = by_formula(layer, found)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert (y - expected_y).norm() <= tolerance * expected_y.norm()
    for name, grad in zip(found, grads, strict=True):
        wanted = expected[name].double()
        assert (grad.double() - wanted).norm() <= tolerance * wanted.norm(), name
        if name in ("x", "weight"):
            assert torch.equal(grad == 0, wanted == 0), f"{name}: other elements clip"
    if scheme.activation == CLIPS:
        assert (expected["x"] == 0).any(), "no element of x clips"


def kept(run: Callable[[], Tensor], parameters: Any) -> int:
    """Bytes of the storages that autograd keeps for backward, without those of the parameters."""
    storages: dict[int, int] = {}

    def inner(t: Any) -> list[Tensor]:
        return [*t.inner_tensors().values()] if hasattr(t, "inner_tensors") else [t]

    own = {t.untyped_storage().data_ptr() for p in parameters for t in inner(p)}

    def pack(t: Tensor) -> Tensor:
        for part in inner(t):
            if (place := part.untyped_storage().data_ptr()) not in own:
                storages[place] = part.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(storages.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_keeps_what_a_plain_linear_keeps(scheme: Scheme, scales: str, device: str) -> None:
    """Also where two layers read one input. Learned scales add at most three numbers a group: the scale, the zero point
    and the present scale, which backward would have to find again."""
    plain = nn.ModuleList([nn.Linear(64, 24), nn.Linear(64, 24)]).to(device)
    model = nn.ModuleList([nn.Linear(64, 24), nn.Linear(64, 24)]).to(device)
    qat.prepare_(model, scheme, scales=scales)
    x = torch.randn(5, 64, device=device, requires_grad=True) * 1
    found = [kept(lambda m=m: m[0](x) + m[1](x), m.parameters()) for m in (plain, model)]
    groups = sum(layer.weight_scale.numel() for layer in model if scales == "learned")
    assert found[0] <= found[1] <= found[0] + 3 * 4 * groups


@pytest.mark.parametrize("name", ["int4", "int4-asymmetric", "int4-int8", "int4-padded", "float8"])
def test_present_scales_are_found_once_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, found = [], fused_rounding.present_parameters

    def counts(*args: Any) -> Any:
        calls.append(args)
        return found(*args)

    monkeypatch.setattr(fused_rounding, "present_parameters", counts)
    layer = prepared(SCHEMES[name], "learned", torch.float32)
    y = layer(torch.randn(5, 64, requires_grad=True))
    assert len(calls) == 1
    y.square().sum().backward()
    assert len(calls) == 1 and layer.weight_scale.grad.any()


@pytest.mark.parametrize("scales", ["present", "learned"])
def test_second_derivatives(scales: str) -> None:
    layer = prepared(SCHEMES["int4-int8-clipped"], scales, torch.float32)
    found = operands(layer, torch.float32, "cpu")

    def penalty(y: Tensor, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return grad.square().sum()

    grads = torch.autograd.grad(penalty(layer(found["x"]), found["x"]), [*found.values()])
    scheme = layer.weight.scheme
    own = scheme.activation.fake_quantize(found["x"])
    values = (
        layer.weight.quantized_by(*scales_of(layer))
        if scales == "learned"
        else layer.weight.fake_quantized()
    )
    y = F.linear(own, values, layer.bias)
    expected = torch.autograd.grad(penalty(y, found["x"]), [*found.values()])
    for name, a, b in zip(found, grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4, msg=name)


@pytest.mark.parametrize("scales", ["present", "learned"])
def test_an_update_of_the_bias_before_backward(scales: str) -> None:
    """No gradient reads the bias, as for a plain linear."""
    layer = prepared(SCHEMES["int4"], scales, torch.float32)
    found = operands(layer, torch.float32, "cpu")
    expected = torch.autograd.grad(layer(found["x"]).square().sum(), [*found.values()])
    loss = layer(found["x"]).square().sum()
    with torch.no_grad():
        layer.bias.add_(1.0)
    grads = torch.autograd.grad(loss, [*found.values()])
    for name, own, wanted in zip(found, grads, expected, strict=True):
        assert torch.equal(own, wanted), name


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("name", ["int4", "int8-row", "int4-int8"])
def test_layers_without_features(name: str, scales: str) -> None:
    model = nn.Sequential(nn.Linear(64, 0), nn.Linear(0, 24))
    qat.prepare_(model, SCHEMES[name], scales=scales)
    x = torch.randn(3, 64, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, model[1].bias.expand(3, 24))
    assert x.grad is not None and torch.equal(x.grad, torch.zeros(3, 64))
    qat.convert_(model)
    assert torch.equal(model(x), y)


def test_autocast() -> None:
    layer = prepared(SCHEMES["int4-int8"], "present", torch.float32)
    x = torch.randn(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    own = SCHEMES["int4-int8"].activation.fake_quantize(x.bfloat16())  # type: ignore[union-attr]
    values = layer.weight.dequantize().bfloat16()  # type: ignore[operator]
    assert torch.equal(y, F.linear(own, values, layer.bias.bfloat16()))
    y.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32


@pytest.mark.cover("values")
@pytest.mark.parametrize("where", ["backward", "everywhere"])
@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("name", ["int4", "int4-int8", "int4-int8-clipped"])
def test_compiled_with_the_op(
    monkeypatch: pytest.MonkeyPatch, name: str, scales: str, where: Any
) -> None:
    """The graphs of GPUs, on a CPU: the op rounds by PyTorch's operations there."""
    monkeypatch.setattr(fused_rounding, "in_graphs", lambda x: True)
    monkeypatch.setattr(fused_rounding, "IN_GRAPHS", where)
    layer = prepared(SCHEMES[name], scales, torch.float32)
    found = operands(layer, torch.float32, "cpu")
    _, expected = by_formula(layer, found)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")
    with counted() as calls:
        y = compiled(found["x"])
        forward = calls["fake_quantize", "torch"]
        grads = torch.autograd.grad(y.square().sum(), [*found.values()])
    assert (forward > 0) == (where == "everywhere")
    assert calls["fake_quantize", "torch"] > forward
    assert calls["fake_quantize_gradients", "torch"] == (scales == "learned")
    for key, grad in zip(found, grads, strict=True):
        wanted = expected[key].double()
        assert (grad.double() - wanted).norm() <= 1e-5 * wanted.norm(), key


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4", "int4-int8"])
@pytest.mark.parametrize("scales", ["present", "learned"])
def test_the_kernel_runs(scales: str, name: str) -> None:
    """Forward rounds the weight and the input, backward both again. Learned scales have a kernel of their own."""
    layer = prepared(SCHEMES[name], scales, torch.bfloat16, "cuda")
    found = operands(layer, torch.bfloat16, "cuda")
    with counted() as calls:
        layer(found["x"]).sum().backward()
    operands_rounded = 2 if "int8" in name else 1
    assert calls["fake_quantize", "triton"] == 2 * operands_rounded
    assert calls["fake_quantize_gradients", "triton"] == (scales == "learned")


@pytest.mark.cover("pairs")
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_prepared_equals_converted_on_a_gpu(
    scheme: Scheme, scales: str, dtype: torch.dtype, compiled: bool
) -> None:
    """To the bit: an identity matrix as the input shows the weight that the product sees."""
    if scheme.activation is not None:
        scheme = Scheme(scheme.weight)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512, bias=False)).to("cuda", dtype)
    qat.prepare_(model, scheme, scales=scales)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True) if compiled else model
    seen = run(torch.eye(256, device="cuda", dtype=dtype)).detach().t()
    qat.convert_(model)
    weight: Any = model[0].weight
    if dtype is not torch.float32:  # TF32 or not, a float32 product may round
        assert torch.equal(seen, weight.dequantize())
    else:
        torch.testing.assert_close(seen, weight.dequantize(), rtol=1e-6, atol=0)

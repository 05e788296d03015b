"""Training around a quantized model: gradients to inputs and biases, LoRA, autocast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.linear.frozen import choose_linear, row
from tests.schemes import DYNAMIC, SCHEMES, WEIGHT_ONLY, over, relative_error

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def pair(scheme: lb.Scheme, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, nn.Linear]:
    """A quantized layer, and a plain one with its dequantized weight."""
    quantized = nn.Linear(37, 16, dtype=dtype)
    lb.quantize_(quantized, scheme)
    plain = nn.Linear(37, 16, dtype=dtype)
    with torch.no_grad():
        plain.weight.copy_(quantized.weight.dequantize())
        plain.bias.copy_(quantized.bias)
    return quantized, plain


@pytest.mark.cover("pairs")
@over(SCHEMES)
@DTYPES
@pytest.mark.parametrize("shape", [(37,), (5, 37), (2, 3, 37), (2, 1, 2, 37)], ids=str)
def test_gradients_are_those_of_the_dequantized_weight(scheme, dtype, shape) -> None:
    x = torch.randn(shape, dtype=dtype)
    upstream = torch.randn(*shape[:-1], 16, dtype=dtype)
    grads = []
    for layer in pair(scheme, dtype):
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(upstream)
        grads.append({"x": leaf.grad, "bias": layer.bias.grad})
        assert layer.weight.grad is None or layer.weight.requires_grad
    for name, grad in grads[0].items():
        assert grad.dtype is dtype and grad.shape == grads[1][name].shape, name
        bound = 1e-6 if dtype is torch.float32 else 1e-2
        assert relative_error(grad, grads[1][name]) < bound, name


@pytest.mark.cover("pairs")
@over(SCHEMES)
@DTYPES
def test_values_as_a_whole_are_rounded_once(scheme, dtype, monkeypatch) -> None:
    """So are those of a float32 base, which PEFT's preparation makes. The gradient of the input may be added to another
    tensor."""
    weight = pair(scheme)[0].weight
    values = row.decoded(weight, dtype)
    reads = weight.stored_as in row.READ_BY_OPS
    if dtype is torch.float32 or reads:
        assert values is not None and torch.equal(values, weight.dequantize().to(dtype))
        grad, to = torch.randn(5, 16).to(dtype), torch.randn(5, 37).to(dtype)
        expected = to.double() + grad.double() @ values.double()
        found = row.grad_of_input(grad, weight, to)
        assert found is to and relative_error(found, expected) < (
            1e-6 if dtype is torch.float32 else 1e-2
        )
    else:
        assert values is None
    monkeypatch.setattr(row, "MOST_BYTES", 16 * 37 * dtype.itemsize - 1)
    assert row.decoded(weight, dtype) is None


def test_of_a_layer_without_outputs() -> None:
    weight = lb.tensor.AffineTensor.from_float(torch.zeros(0, 64), lb.Int8WeightOnly())
    x, bias = torch.randn(2, 3, 64, requires_grad=True), torch.zeros(0, requires_grad=True)
    F.linear(x, weight, bias).sum().backward()
    assert bias.grad is not None and bias.grad.shape == (0,)
    assert x.grad is not None and torch.equal(x.grad, torch.zeros(2, 3, 64))


@pytest.mark.parametrize("needs", ["x", "bias", "neither"])
def test_only_the_gradients_asked_for(needs: str) -> None:
    layer, _ = pair(lb.Int4WeightOnly(8))
    layer.bias.requires_grad_(needs == "bias")
    x = torch.randn(4, 37, requires_grad=needs == "x")
    y = layer(x)
    assert y.requires_grad == (needs != "neither")
    if y.requires_grad:
        y.sum().backward()
    assert (x.grad is not None) == (needs == "x")
    assert (layer.bias.grad is not None) == (needs == "bias")


class LoRA(nn.Module):
    """y = base(x) + B A x, the base frozen."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


@over({"int4-g32": lb.Int4WeightOnly(32), "int8": lb.Int8WeightOnly(), **DYNAMIC})
def test_lora_trains(scheme: lb.Scheme) -> None:
    x = torch.randn(64, 32)
    target = x @ torch.randn(32, 32) / 4
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    lb.quantize_(model, scheme)
    codes = [model[i].weight.codes.clone() for i in (0, 2)]
    model[0], model[2] = LoRA(model[0]), LoRA(model[2])
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 4
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    losses = []
    for _ in range(40):
        loss = F.mse_loss(model(x), target)
        loss.backward()
        assert all(p.grad.abs().sum() > 0 for p in (model[0].b, model[2].b))
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
    for i, before in zip((0, 2), codes, strict=True):
        assert torch.equal(model[i].base.weight.codes, before)


def test_a_quantized_weight_asks_for_no_gradient() -> None:
    layer, _ = pair(lb.Int4WeightOnly(8))
    with pytest.warns(UserWarning, match="leaves AffineTensor frozen"):
        layer.requires_grad_(True)
    assert not layer.weight.requires_grad and layer.bias.requires_grad
    with pytest.raises(NotImplementedError, match=r"no gradient.*lowbit.qat.prepare_"):
        layer.weight.requires_grad = True
    layer(torch.randn(2, 37)).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None


def check_product(layer: nn.Linear, x: Tensor, found: Tensor, plain: Tensor) -> None:
    """Compare to the bit where no kernel runs. Kernels do not round the weight to 16 bits, plain products do."""
    assert found.dtype is plain.dtype
    if choose_linear(x, layer.weight, layer.bias).name in ("cpu_linear", "plain_linear"):
        assert torch.equal(found, plain)
    else:
        assert relative_error(found, plain) < (5e-3 if x.dtype is torch.bfloat16 else 1e-3)


@over(SCHEMES)
def test_autocast(scheme: lb.Scheme) -> None:
    """As F.linear under autocast: every product runs in bfloat16, each gradient has the dtype of its tensor."""
    quantized, plain = pair(scheme)
    x = torch.randn(6, 37)
    grads = []
    for layer in (quantized, plain):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(leaf)
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        assert leaf.grad.dtype is layer.bias.grad.dtype is torch.float32
        grads.append((y, leaf.grad, layer.bias.grad))
    if scheme.activation is None:
        check_product(quantized, x.bfloat16(), grads[0][0], grads[1][0])
    bound = 0.01 if scheme.activation is None else 0.1
    for a, b in zip(*grads, strict=True):
        assert relative_error(a, b) < bound


@over(WEIGHT_ONLY)
def test_autocast_of_another_dtype(scheme: lb.Scheme) -> None:
    quantized, plain = pair(scheme)
    x = torch.ones(2, 37).bfloat16()
    with torch.autocast("cpu", torch.float16):
        check_product(quantized, x.half(), quantized(x), plain(x))
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert torch.equal(quantized(torch.ones(2, 37)), plain(torch.ones(2, 37)))


@over(SCHEMES)
def test_activation_checkpointing(scheme: lb.Scheme) -> None:
    from torch.utils.checkpoint import checkpoint

    quantized, _ = pair(scheme)
    x = torch.randn(4, 37)
    grads = []
    for run in (quantized, lambda v: checkpoint(quantized, v, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        run(leaf).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_saved_tensors_may_be_offloaded() -> None:
    layer, _ = pair(lb.Int4WeightOnly(8))
    grads = []
    for offload in (False, True):
        x = torch.ones(2, 37, requires_grad=True)
        if offload:
            with torch.autograd.graph.save_on_cpu():
                y = layer(x)
        else:
            y = layer(x)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("scheme", ["int4-g8", "int8xint8", "int8xint4"])
def test_compiled(scheme: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(pair(SCHEMES[scheme])[0], nn.ReLU(), nn.Linear(16, 3))
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    for shape in [(1, 37), (5, 37)]:
        results = []
        for run in (model, compiled):
            x = torch.linspace(-1, 1, shape[0] * 37).view(shape).requires_grad_()
            y = run(x)
            y.square().sum().backward()
            results.append((y, x.grad))
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()

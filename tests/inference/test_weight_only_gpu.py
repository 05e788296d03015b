"""The kernels' linears on a GPU: against float64, in CUDA graphs, compiled, and over experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.inference import grouped_linear, linear
from lowbit_kernels.runtime import launches
from tests.schemes import over, relative_error

pytestmark = pytest.mark.gpu
SCHEMES = {
    "int4-g128": lb.Int4WeightOnly(128),
    "int4-g32-asymmetric": lb.Int4WeightOnly(32, "asymmetric"),
    "int4-row": lb.IntxWeightOnly(4),
    "int8": lb.Int8WeightOnly(),
    "int8-g64": lb.Int8WeightOnly(64),
}
TOKENS = pytest.mark.parametrize("tokens", [1, 5, 17, 100, 1500])


def layer(scheme: lb.Scheme, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    model = nn.Linear(512, 272, dtype=dtype, device="cuda")
    lb.quantize_(model, scheme)
    return model


def exact(x: Tensor, weight: Tensor, *extra: Tensor) -> Tensor:
    """With the weight as it is stored, not rounded to 16 bits."""
    y = x.double() @ weight.float().dequantize().double().t()
    return sum((t.double() for t in extra), y)


@over(SCHEMES)
@TOKENS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_against_float64(scheme: lb.Scheme, tokens: int, dtype: torch.dtype) -> None:
    model = layer(scheme, dtype)
    x = torch.randn(tokens, 512, dtype=dtype, device="cuda")
    residual = torch.randn(tokens, 272, dtype=dtype, device="cuda")
    bound = 2e-3 if tokens < 1000 else 4e-3  # above, the weight is rounded once
    assert relative_error(model(x), exact(x, model.weight, model.bias)) < bound
    y = linear(x, model.weight, model.bias, residual)
    assert relative_error(y, exact(x, model.weight, model.bias, residual)) < bound


FORMATS = {
    "1-bit": lb.Int1WeightOnly(),
    "2-bits": lb.Int2WeightOnly(),
    "3-bits": lb.IntxWeightOnly(3, 32),
    "5-bits-asymmetric": lb.IntxWeightOnly(5, 64, "asymmetric"),
    "float8": lb.Float8WeightOnly(),
    "nf4": lb.NF4WeightOnly(),
    "nf4-double": lb.NF4WeightOnly(double_quantization=True),
    "mxfp4": lb.MXFP4WeightOnly(),
    "nvfp4": lb.NVFP4WeightOnly(),
}


@over(FORMATS)
@pytest.mark.parametrize("tokens", [1, 16, 40])
@torch.no_grad()
def test_formats_against_float64(scheme: lb.Scheme, tokens: int) -> None:
    model = layer(scheme)
    x = torch.randn(tokens, 512, dtype=torch.bfloat16, device="cuda")
    with launches.counted() as calls:
        y = model(x)
    expected = exact(x, model.weight, model.bias)
    if tokens > 16:
        assert relative_error(y, expected) < 4e-3  # the weight may be rounded once
        return
    assert relative_error(y, expected) < 2e-3
    if torch.cuda.get_device_capability() == (9, 0):
        assert calls["weight_linear", "decode"] == 1
    torch.compiler.reset()  # compiled code of a forward is kept for all formats together
    compiled = torch.compile(model, fullgraph=True)
    assert relative_error(compiled(x), expected) < 2e-3


@over(SCHEMES)
@pytest.mark.parametrize("tokens", [1, 40])
@torch.no_grad()
def test_in_a_graph_and_compiled(scheme: lb.Scheme, tokens: int) -> None:
    torch._dynamo.reset()
    model = layer(scheme)
    x = torch.randn(tokens, 512, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(3):
        compiled(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compiled(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert relative_error(y, exact(x, model.weight, model.bias)) < 2e-3


@over(SCHEMES)
@torch.no_grad()
def test_experts_in_a_graph(scheme: lb.Scheme) -> None:
    weight = torch.randn(4, 272, 512, dtype=torch.bfloat16, device="cuda")
    quantized = lb.AffineTensor.from_float(weight, scheme)
    x = torch.randn(50, 512, dtype=torch.bfloat16, device="cuda")
    offsets = torch.tensor([3, 3, 30, 41], dtype=torch.int32, device="cuda")
    grouped_linear(x, quantized, offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped_linear(x, quantized, offsets)
    for ends in ([3, 3, 30, 41], [0, 20, 20, 50]):
        offsets.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if start < end:
                assert relative_error(y[start:end], exact(x[start:end], quantized[e])) < 2e-3
        assert not y[ends[-1] :].any()

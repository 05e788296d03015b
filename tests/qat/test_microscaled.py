"""Fake quantization of FP4 and microscaled formats by the kernel: the bits and gradients of `Spec.fake_quantize`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit_kernels as kernels
from benchmarks.cases.fake_quantize import microscaled
from lowbit import MXFP4WeightOnly, MXFP8WeightOnly, NVFP4WeightOnly, qat
from lowbit.linear import fused_rounding
from lowbit.numerics.granularity import PerBlock, PerGroup
from lowbit.numerics.lookup_table import E2M1, NF4
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.spec import Spec
from lowbit_kernels.runtime.launches import counted
from tests.kernels.interpreted import interpreted
from tests.kernels.test_dequantize import equal_bits
from tests.qat.test_rounded_linear import by_formula, operands, prepared

SPECS = {
    **microscaled(),
    "nvfp4-inverse": Spec(E2M1, PerGroup(16), scale_format="e4m3_inverse"),
    "e2m1-float-scales": Spec(E2M1, PerGroup(32)),
    "odd-group": replace(microscaled()["mx-e2m1-symmetric"], granularity=PerGroup(24)),
}
SHAPES = [(13, 96), (13, 45), (13, 3, 64), (13, 3, 33), (0, 32), (2, 0, 32), (1, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLACES = [math.nan, math.inf, -math.inf, -0.0, 3e38, 1e-38, 1e-44, 6e4, -1.0]
FACTORS = [1e30, 1e-30, 0.0]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random numbers, and some with a huge, a tiny and a zero row or expert, and others with one extreme number each,
    also transposed, as experts lie in memory as [E, K, N]."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    found = [x]
    if shape[0] > len(PLACES) + len(FACTORS):
        found.append(x.clone())
        for part, value in zip(found[1], PLACES, strict=False):
            part.view(-1)[2] = value
        for part, factor in zip(found[1][len(PLACES) :], FACTORS, strict=False):
            part *= factor
    found.append(found[-1].mT.contiguous().mT)
    return [t.to(dtype).to(device) for t in found]


def agree(x: Tensor, spec: Spec, joint: Tensor | None = None) -> bool:
    """Values and gradients have the bits of PyTorch's operations, and the kernel has run."""
    leaves = [x.detach().clone().requires_grad_() for _ in range(2)]
    with counted() as calls:
        values = fused_rounding.fake_quantize(leaves[0], spec, joint=joint)
    wanted = spec.fake_quantize(leaves[1], joint=joint)
    if x.numel() and calls["fake_quantize", "triton"] != 1:
        return False
    grad = torch.randn(x.shape, device=x.device).to(x.dtype)
    for y in (values, wanted):
        y.backward(grad)
    pairs = (values, wanted), (leaves[0].grad, leaves[1].grad)
    dense = x.numel() == 0 or values.is_contiguous()
    return dense and all(equal_bits(a.detach(), b.detach()) for a, b in pairs)


def in_columns(spec: Spec) -> Spec:
    """Groups along the last dimension but one, as in experts [E, K, N] of gpt-oss."""
    return replace(spec, granularity=PerBlock(spec.block_size((1, 999))[1], 1))


def joint_of(x: Tensor, spec: Spec) -> Tensor | None:
    """The global scale that a sibling of half the size leaves."""
    if spec.scales is None or spec.scales.joint is None or not x.numel():
        return None
    return spec.joint_part([x, x * 0.5], torch.float32)


def results(device: str = "cpu") -> list[str]:
    """The cases that differ; called where Triton runs."""
    wrong = []
    for name, spec in SPECS.items():
        for shape in (
            SHAPES if name in ("mx-e2m1-symmetric", "nvfp4") or device == "cuda" else SHAPES[1:4:2]
        ):
            for dtype in DTYPES if shape == (13, 45) or device == "cuda" else DTYPES[1:2]:
                for i, x in enumerate(inputs(shape, dtype, device)):
                    joint = joint_of(x, spec)
                    same = agree(x, spec) and (joint is None or agree(x, spec, joint))
                    if len(shape) == 3:
                        same &= agree(x, in_columns(spec))
                        same &= joint is None or agree(x, in_columns(spec), joint)
                    if not same:
                        wrong.append(f"{name} {shape} {dtype} {i}")
    return wrong


def test_under_the_interpreter_of_triton() -> None:
    code = (
        "import json\nfrom tests.qat.test_microscaled import results\nprint(json.dumps(results()))"
    )
    assert interpreted(code) == []


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    assert results("cuda") == []


@pytest.mark.parametrize("fmt", [E2M1, Float8(), Float8(torch.float8_e5m2)], ids=str)
def test_no_code_clips_where_the_spec_says_so(fmt: object) -> None:
    """Every bfloat16 number, and numbers between them, as the largest of a block."""
    spec = Spec(fmt, PerGroup(32), "symmetric_no_clipping_err", scale_format="e8m0")  # type: ignore[arg-type]
    assert not spec.may_clip(torch.float32)
    assert replace(spec, mapping="symmetric").may_clip(torch.float32) is True
    ends = torch.arange(2**15 - 2**7, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for largest in (ends.float(), (ends.float() * torch.linspace(1, 2, len(ends)))):
        x = largest[largest.isfinite()].unsqueeze(1) * torch.tensor([[-1.0] + [0.5] * 31])
        _, inside = spec.rounded(x)
        assert inside is not None and inside.all()


SCHEMES = {
    "mxfp4": MXFP4WeightOnly(),
    "mxfp4-clipped": MXFP4WeightOnly("symmetric"),
    "nvfp4": NVFP4WeightOnly(),
    "mxfp8": MXFP8WeightOnly(),
}


@pytest.mark.parametrize("where", ["backward", "everywhere"])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_compiled_with_the_op(monkeypatch: pytest.MonkeyPatch, name: str, where: Any) -> None:
    """The graphs of GPUs, on a CPU: the op rounds by PyTorch's operations there."""
    monkeypatch.setattr(fused_rounding, "in_graphs", lambda x: True)
    monkeypatch.setattr(fused_rounding, "IN_GRAPHS", where)
    layer = prepared(SCHEMES[name], "present", torch.float32)
    found = operands(layer, torch.float32, "cpu")
    _, expected = by_formula(layer, found)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")
    with counted() as calls:
        y = compiled(found["x"])
        forward = calls["fake_quantize", "torch"]
        grads = torch.autograd.grad(y.square().sum(), [*found.values()])
    assert (forward > 0) == (where == "everywhere") and calls["fake_quantize", "torch"] > forward
    for key, grad in zip(found, grads, strict=True):
        wanted = expected[key].double()
        assert (grad.double() - wanted).norm() <= 1e-5 * wanted.norm(), key


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, False) for name in SCHEMES), *((n, True) for n in SCHEMES if n != "nvfp4")],
)
def test_linears_on_a_gpu(name: str, compiled: bool) -> None:
    """The kernel rounds the weight, forward and backward; prepared layers equal converted ones."""
    layer = prepared(SCHEMES[name], "present", torch.bfloat16, "cuda")
    found = operands(layer, torch.bfloat16, "cuda")
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    with counted() as calls:
        y = run(found["x"])
        grads = torch.autograd.grad(y.double().square().sum(), [*found.values()])
    assert calls["fake_quantize", "triton"] == (1 if compiled else 2)
    expected_y, expected = by_formula(layer, found)
    assert (y - expected_y).norm() <= 2e-2 * expected_y.norm()
    for key, grad in zip(found, grads, strict=True):
        wanted = expected[key].double()
        assert (grad.double() - wanted).norm() <= 2e-2 * wanted.norm(), key
    values = layer.weight.fake_quantized()
    model = nn.Sequential(layer)
    qat.convert_(model)
    assert torch.equal(values, model[0].weight.dequantize())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 48, 64).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.up.transpose(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMES)
def test_prepared_experts_equal_converted_ones(name: str) -> None:
    torch.manual_seed(0)
    model = Experts().cuda()
    x = torch.randn(4, 5, 64, device="cuda").bfloat16()
    qat.prepare_(model, SCHEMES[name], lambda module, name: True)
    with counted() as calls:
        found = model(x)
        found.sum().backward()
    assert calls["fake_quantize", "triton"] == 1 and model.up.grad is not None
    qat.convert_(model)
    assert torch.equal(found, torch.bmm(x, model.up.dequantize().transpose(1, 2)))


def test_scales_of_other_formats_are_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of super-blocks and double-quantized ones: the kernel takes the first where they are given."""
    monkeypatch.setattr(kernels.fake_quantize, "runs_on", lambda device: True)
    x = torch.randn(4, 256)
    super_blocks = Spec(Int(4), PerGroup(32), "float_zero_point", scale_format="super_block")
    assert not fused_rounding.runs(super_blocks, x)
    assert fused_rounding.runs(super_blocks, x, given=True)
    for spec in (Spec(E2M1, PerGroup(64), scale_format="double"), Spec(NF4, PerGroup(64))):
        assert not fused_rounding.runs(spec, x)
    values = fused_rounding.fake_quantize(x, super_blocks)
    assert torch.equal(values, super_blocks.fake_quantize(x))

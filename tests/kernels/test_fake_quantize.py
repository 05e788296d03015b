"""fake_quantize: the reference against `Spec.fake_quantize`, the kernels against the reference, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.cases.fake_quantize import CASES, Case
from lowbit.code_range import within_range
from lowbit.scheme import crop
from lowbit_kernels.fake_quantize import (
    gradients_reference,
    reference,
    unpack_inside,
    zero_outside,
)
from tests.kernels.interpreted import interpreted
from tests.kernels.test_dequantize import equal_bits

SMALL = [case for case in CASES if not case.large]
EXACT = [case for case in SMALL if case.rows and case.columns]
OP = torch.ops.lowbit.fake_quantize
GRADIENTS = torch.ops.lowbit.fake_quantize_gradients
EXTREMES = [math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-38, 1e-44, 6e4, 1e-7, -1.0]


def extreme(case: Case, device: str = "cpu") -> Tensor:
    """x of the case, with rows of zeros and of a constant, and one number of EXTREMES in each of some others."""
    generator = torch.Generator().manual_seed(0)
    count = len(EXTREMES)
    x = torch.randn(count + 5, case.columns, generator=generator)
    for row, value in enumerate(EXTREMES):
        x[row, row % case.columns] = value
    x[count], x[count + 1], x[count + 2] = 0.0, 2.5, -0.5
    x[count + 3] *= 1e30
    x[count + 4] *= 1e-30
    return x.to(case.dtype).to(device)


def expected(x: Tensor, case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """values and inside, and scale and zero point, as `lowbit.affine` computes them."""
    spec = case.spec
    padded = spec.pad(x)
    scale, zero_point = spec.choose_qparams(padded, case.scale_dtype)
    codes, *_ = spec.quantize(x, qparams=(scale, zero_point))
    values = spec.dequantize(codes, scale, zero_point, x.shape, x.dtype)
    unclamped, _, _ = spec.unclamped_codes(x, case.scale_dtype)
    if spec.format.dtype.is_floating_point:  # `unclamped_codes` clamps them
        inside = within_range(_float8_codes(padded, case, scale), spec.format.dtype, *_ends(case))
    else:
        inside = within_range(unclamped.float(), spec.format.dtype, *_ends(case))
    return values, crop(inside, x.shape), scale, zero_point


def _ends(case: Case) -> tuple[float, float]:
    return case.spec.format.quant_min, case.spec.format.quant_max


def _float8_codes(x: Tensor, case: Case, scale: Tensor) -> Tensor:
    blocks = x.float().unflatten(1, (-1, case.group_size))
    return (blocks * (1 / scale.double()).float().unsqueeze(-1)).flatten(1)


def _agrees(run, case: Case, x: Tensor) -> bool:
    """Computed parameters, and the same parameters given, give the values and bits of `lowbit.affine`."""
    values, inside, scale, zero_point = expected(x, case)
    same = True
    for parameters in ((None, None), (scale, zero_point)):
        for with_bits in (True, False):
            dtypes = (case.scale_dtype, case.dtype)
            found, bits = run(x, *parameters, case.group_size, *case.grid, *dtypes, with_bits)
            same &= equal_bits(found, values) and found.is_contiguous()
            if with_bits:
                same &= torch.equal(unpack_inside(bits, case.group_size, x.shape[1]), inside)
    return same


@pytest.mark.parametrize("case", EXACT, ids=lambda c: c.name)
def test_reference_is_the_maths_of_lowbit(case: Case) -> None:
    assert _agrees(reference, case, case.x())
    assert _agrees(reference, case, extreme(case))


def results() -> dict[str, bool]:
    """Whether the kernels agree, by case; called in a process in which Triton is interpreted."""
    from lowbit_kernels.launches import counted

    torch.manual_seed(0)
    found = {}
    for case in SMALL:
        with counted() as calls:
            found[case.name] = _agrees(OP, case, case.x())
            if case in EXACT and case.columns < 1000:
                found[case.name] &= _agrees(OP, case, extreme(case))
        if case in EXACT:
            found[case.name] &= set(calls) == {("fake_quantize", "triton")}
            found[case.name] &= _gradients_agree(case)
    return found


def _gradients_agree(case: Case, device: str = "cpu") -> bool:
    for constant_codes in (False, True):
        arguments = gradient_arguments(case, device, constant_codes)
        found, wanted = GRADIENTS(*arguments), gradients_reference(*arguments)
        if not equal_bits(found[0].cpu(), wanted[0].cpu()):
            return False
        for a, b in zip(found[1:], wanted[1:], strict=True):
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max())):
                return False
    x, _, grad = case.x(device), None, torch.randn_like(case.x(device))
    _, bits = OP(x, *case.arguments(device)[1:])
    kept = unpack_inside(bits, case.group_size, case.columns)
    wanted = torch.where(kept, grad, 0.0)
    return torch.equal(zero_outside(grad, bits, case.group_size), wanted)


def gradient_arguments(case: Case, device: str = "cpu", constant_codes: bool = False) -> tuple:
    """Scales are smaller than the values ask for, and of either sign, so that some codes clip."""
    x = case.x(device)
    _, _, scale, zero_point = expected(x, case)
    signs = torch.ones_like(scale)
    signs.view(-1)[::2] = -1
    scale = scale * 0.75 * signs if case.grid.format != "e4m3" else scale * 0.75
    grad = torch.randn_like(x.float()).to(case.dtype)
    return (grad, x, scale, zero_point, case.group_size, *case.grid, constant_codes)


@pytest.fixture(scope="module")
def under_triton() -> dict[str, bool]:
    return interpreted(
        "import json\nfrom tests.kernels.test_fake_quantize import results\nprint(json.dumps(results()))"
    )


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_interpreted_kernels(under_triton: dict[str, bool], case: Case) -> None:
    assert under_triton[case.name]

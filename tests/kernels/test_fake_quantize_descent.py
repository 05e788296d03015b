"""fake_quantize_descent: the reference against learned rounding by PyTorch's operations and a float64 formula, the
kernel against the reference, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.cases.fake_quantize import CASES, Case
from lowbit.numerics.blocks import crop
from lowbit.numerics.learned_scales import RATE, as_parameters, gradients, qparams, rate_of
from lowbit.numerics.learned_scales import codes_and_residual as of_codes
from lowbit.numerics.number_format import Int
from lowbit_kernels.elementwise.fake_quantize import fake_quantize_descent
from lowbit_kernels.runtime import launches
from tests.kernels.interpreted import interpreted, names
from tests.kernels.test_dequantize import equal_bits
from tests.kernels.test_fake_quantize import each_kind, expected

OP = torch.ops.lowbit.fake_quantize_descent
INTEGERS = [c for c in CASES if isinstance(c.spec.format, Int)]
SMALL = [c for c in INTEGERS if not c.large and c.rows and c.columns]
STEP = 0.013


def arguments(case: Case, device: str = "cpu") -> tuple:
    """Scales are smaller than the values ask for, so that some codes clip; one block has no gradient, one x is NaN."""
    x = case.x(device).float().contiguous()
    _, _, scale, zero_point = expected(x, case)
    signs = torch.ones_like(scale)
    signs.view(-1)[::2] = -1
    scale = scale.float() * 0.75 * signs
    p, q = as_parameters(case.spec, scale, zero_point)
    grad = torch.randn_like(x).to(case.dtype)
    grad[:1, : case.group_size] = 0
    if case.rows > 1 and case.columns > 1:
        x[1, 1] = torch.nan
    own = [None if t is None else t.float().contiguous() for t in (p, q)]
    rates = rate_of(case.spec), RATE
    how = case.group_size, case.grid.name, *rates, case.scale_dtype, case.dtype
    return (grad, x, *own, own[0].abs() * 0.1, STEP, *how)


def copied(given: tuple) -> tuple:
    return tuple(t.clone() if isinstance(t, Tensor) else t for t in given)


def run(op, given: tuple) -> list[Tensor]:
    """values, x, scale and zero after the step."""
    own = copied(given)
    values = op(*own)
    return [values, *(t for t in own[1:4] if t is not None)]


def by_lowbit(case: Case, given: tuple) -> list[Tensor]:
    """The same by the functions of lowbit that train scales."""
    grad, x, p, q, unit, *_ = copied(given)
    spec, dtype = case.spec, case.scale_dtype
    narrow = p.to(dtype), None if q is None else q.to(dtype)
    scale, zero = qparams(spec, *narrow)
    codes, residual = of_codes(x, spec, scale, zero)
    of_x, of_scale, of_zero = gradients(grad.float(), codes, residual, spec, p, q)
    steps = scale.float().abs().repeat_interleave(case.group_size, 1)[:, : x.shape[1]]
    x -= of_x.sign() * (steps * STEP)
    p -= of_scale.sign() * (unit * STEP)
    if q is not None:
        q -= of_zero.sign() * (unit * (STEP * rate_of(spec) / RATE))
    found = qparams(spec, p.to(dtype), None if q is None else q.to(dtype))
    values = crop(spec.codes_and_values(x, *found)[1], x.shape).to(case.dtype)
    return [values, x, p, *([] if q is None else [q])]


def agree(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(equal_bits(a.cpu(), b.cpu()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_reference_is_learned_rounding(case: Case) -> None:
    torch.manual_seed(0)
    given = arguments(case)
    assert agree(run(fake_quantize_descent.reference, given), by_lowbit(case, given))


@pytest.mark.parametrize("case", [c for c in SMALL if "-groups" in c.name], ids=lambda c: c.name)
def test_moves_are_those_of_float64(case: Case) -> None:
    """The formula in float64 for one block after another. A number in the middle of two codes may move otherwise."""
    torch.manual_seed(0)
    given = arguments(case)
    grad, x, p, q, unit, *_ = given
    _, new_x, new_p, *new_q = run(OP, given)
    spec, fmt, narrow = case.spec, case.spec.format, case.scale_dtype
    scale, zero = qparams(spec, p.to(narrow), None if q is None else q.to(narrow))
    mid = (fmt.quant_min + fmt.quant_max + 1) // 2
    wrong, seen = 0, 0
    for row in range(case.rows):
        for b in range(scale.shape[1]):
            own = slice(b * case.group_size, (b + 1) * case.group_size)
            w, g, s = x[row, own].double(), grad[row, own].double(), float(scale[row, b])
            z = 0.0 if zero is None else float(zero[row, b])
            offset, start = (z, mid) if spec.zero_point_is_value else (-z * s, 0)
            code_of_z = {"half_integer": mid - 0.5, "asymmetric": 0.0}.get(spec.mapping, mid)
            if spec.zero_point_is_value:  # codes count from the lowest one
                low = offset + (fmt.quant_min - mid) * s
                code = ((w - low) / s).round().nan_to_num(mid - fmt.quant_min) + fmt.quant_min
            else:
                code = (w / s).round().nan_to_num(0.0) + z
            inside = (code >= fmt.quant_min) & (code <= fmt.quant_max)
            value = (code - start) * s + offset
            ends = code.clamp(fmt.quant_min, fmt.quant_max) - code_of_z
            of_scale = (g * torch.where(inside, (value - w) / s, ends)).sum().sign()
            of_zero = (g * ~inside).sum().sign()
            moved = w - STEP * abs(s) * (g * inside).sign()
            pairs = [(new_x[row, own], moved)]
            step = STEP * float(unit[row, b])
            pairs.append((new_p[row, b], p[row, b] - step * of_scale))
            ratio = rate_of(spec) / RATE
            pairs += [(t[row, b], q[row, b] - step * ratio * of_zero) for t in new_q]
            for found, wanted in pairs:
                far = (found.double() - wanted).abs() > 1e-5 * wanted.abs().clamp(min=abs(s))
                wrong, seen = wrong + int(far.sum()), seen + found.numel()
                assert torch.equal(found.isnan(), wanted.isnan())
    assert wrong <= 0.02 * seen


def results(names: list[str]) -> dict[str, bool]:
    """True for each case where the kernel agrees; called in a process in which Triton is interpreted."""
    found = {}
    for case in (c for c in SMALL if c.name in names):
        torch.manual_seed(0)
        given = arguments(case)
        with launches.counted() as calls:
            found[case.name] = agree(run(OP, given), run(fake_quantize_descent.reference, given))
        found[case.name] &= calls["fake_quantize_descent", "triton"] == 1
    return found


@pytest.fixture(scope="module")
def under_triton(request: pytest.FixtureRequest) -> dict[str, bool]:
    return interpreted(
        "import json\nfrom tests.kernels.test_fake_quantize_descent import results\n"
        f"print(json.dumps(results({names(request)})))"
    )


@each_kind
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_interpreted_kernel(under_triton: dict[str, bool], case: Case) -> None:
    assert under_triton[case.name]


@each_kind
@pytest.mark.gpu
@pytest.mark.parametrize("case", INTEGERS, ids=lambda c: c.name)
def test_cuda_equals_the_reference(case: Case) -> None:
    torch.manual_seed(0)
    given = arguments(case, "cuda")
    assert agree(run(OP, given), run(fake_quantize_descent.reference, given))


def test_op_is_registered_well() -> None:
    torch.library.opcheck(OP.default, arguments(SMALL[0]))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({7: "symmetric e4m3 -448 448"}, ValueError, "grid of integers"),
        ({7: "asymmetric int8 -8 7"}, ValueError, "takes zero beside its scale"),
        ({3: torch.ones(4, 1)}, ValueError, "takes no zero"),
        ({1: torch.ones(4, 4).double()}, TypeError, "float64"),
        ({1: torch.ones(4, 4).T}, ValueError, "contiguous"),
        ({4: torch.ones(4, 2)}, ValueError, "unit"),
    ],
)
def test_errors_name_what_is_wrong(change: dict, error: type, message: str) -> None:
    given: list = [torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 1), None, torch.ones(4, 1)]
    given += [STEP, 4, "symmetric int8 -8 7", 0.125, 0.125, torch.float32, torch.float32]
    for place, value in change.items():
        given[place] = value
    with pytest.raises(error, match=message):
        OP(*given)

"""fake_quantize: the reference against `Spec.fake_quantize`, the kernels against the reference, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.cases.fake_quantize import CASES, Case
from lowbit.numerics.affine import unclamped_codes
from lowbit.numerics.blocks import crop
from lowbit.numerics.code_range import within_range
from lowbit.numerics.granularity import PerRow
from lowbit.numerics.learned_scales import RATE, learned_fake_quantize, learns_zero, rate_of
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit_kernels.elementwise import fake_quantize
from lowbit_kernels.elementwise.fake_quantize import (
    fake_quantize_gradients,
    gradients_in_place,
    reference,
    unpack_inside,
    zero_outside,
)
from lowbit_kernels.elementwise.grid import E4M3
from tests.kernels.interpreted import interpreted, names
from tests.kernels.test_dequantize import equal_bits

SMALL = [case for case in CASES if not case.large]
EXACT = [case for case in SMALL if case.rows and case.columns]
INTEGERS = [case for case in EXACT if isinstance(case.spec.format, Int)]
OP = torch.ops.lowbit.fake_quantize
GRADIENTS = torch.ops.lowbit.fake_quantize_gradients
CODES = torch.ops.lowbit.fake_quantize_codes
EXTREMES = [math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-38, 1e-44, 6e4, 1e-7, -1.0]


each_kind = pytest.mark.cover(
    "values",
    case=lambda c: (
        f"{c.spec.format} {c.spec.mapping} {c.grid.scales}",
        (c.rows, c.columns),
        c.dtype,
        c.scale_dtype,
    ),
)
"""Each format with its mappings, and each shape."""


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


def expected(
    x: Tensor, case: Case, joint: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """values and inside, and scale and zero point, as `lowbit.numerics.affine` computes them. `joint`: the global scale
    of each row, where it is a matrix."""
    spec = case.spec
    padded = spec.pad(x)
    each = padded if joint is None else padded.unsqueeze(1)
    scale, zero_point = spec.choose_qparams(each, case.scale_dtype, joint)
    scale = scale.view(spec.blocks(x.shape))
    codes, *_ = spec.quantize(x, qparams=(scale, zero_point))
    values = spec.dequantize(codes, scale, zero_point, x.shape, x.dtype)
    unclamped, _, _ = spec.unclamped_codes(x, case.scale_dtype)
    if not isinstance(spec.format, Int):  # `unclamped_codes` clamps float8
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
    """Computed parameters, and the same parameters given, give the values and bits of `lowbit.numerics.affine`."""
    joint = None
    if case.grid.scales == E4M3:  # of each row, as one NaN spreads over a matrix
        joint = case.spec.joint_part([x.unsqueeze(1)], torch.float32)
    values, inside, scale, zero_point = expected(x, case, joint)
    same = True
    for parameters, own in (((None, None), joint), ((scale, zero_point), None)):
        for with_bits in (True, False):
            dtypes = (case.scale_dtype, case.dtype)
            end = (with_bits, None, None if own is None else own.flatten())
            found, bits = run(x, *parameters, case.group_size, case.grid.name, *dtypes, *end)
            same &= equal_bits(found, values) and found.is_contiguous()
            if with_bits:
                same &= torch.equal(unpack_inside(bits, case.group_size, x.shape[1]), inside)
    return same


@pytest.mark.parametrize("case", EXACT, ids=lambda c: c.name)
def test_reference_is_the_maths_of_lowbit(case: Case) -> None:
    assert _agrees(reference, case, case.x())
    assert _agrees(reference, case, extreme(case))


def codes_arguments(case: Case, x: Tensor, clips: bool) -> tuple:
    dtype = case.spec.unclamped_dtype(clips)
    return (x, case.group_size, case.grid.name, case.scale_dtype, dtype, clips)


def _codes_agree(run, case: Case, x: Tensor) -> bool:
    """Codes before and after the clamp, with the scales and zero points of `lowbit.numerics.affine`."""
    padded = case.spec.pad(x)
    same = True
    for clips in (True, False):
        scale, zero_point = case.spec.choose_qparams(padded, case.scale_dtype)
        unclamped = unclamped_codes(
            padded, (1, case.group_size), scale, zero_point, case.spec.format.dtype, *_ends(case)
        )
        wanted = crop(case.spec.narrowed(unclamped, clips), x.shape)
        codes, own_scale, own_zero = run(*codes_arguments(case, x, clips))
        same &= codes.dtype is wanted.dtype and torch.equal(codes, wanted)
        same &= own_scale.dtype is scale.dtype and _equal(own_scale, scale)
        if zero_point is None:
            same &= own_zero.numel() == 0
        else:
            same &= own_zero.dtype is zero_point.dtype and _equal(own_zero, zero_point)
    return same


def _equal(a: Tensor, b: Tensor) -> bool:
    """Equal numbers, and NaN in the same places."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@each_kind
@pytest.mark.parametrize("case", INTEGERS, ids=lambda c: c.name)
def test_codes_are_those_of_lowbit(case: Case) -> None:
    assert _codes_agree(fake_quantize.fake_quantize_codes.reference, case, case.x())
    assert _codes_agree(CODES, case, extreme(case))
    if case in INTEGERS[:2]:
        torch.library.opcheck(CODES.default, codes_arguments(case, case.x(), True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({2: "symmetric e4m3 -448 448"}, ValueError, "e4m3"),
        ({3: torch.float64}, TypeError, "float64"),
        ({4: torch.int32}, TypeError, "int32"),
        ({2: "symmetric int8 -128 7"}, ValueError, "one step beyond, do not fit into torch.int8"),
        ({4: torch.uint8}, ValueError, "-8 to 7.*uint8"),
        ({0: torch.ones(4)}, ValueError, "flatten"),
    ],
)
def test_errors_of_codes_name_what_is_wrong(change: dict, error: type, message: str) -> None:
    arguments: list = [torch.ones(4, 4), 4, "symmetric int8 -8 7"]
    arguments += [torch.float32, torch.int8, True]
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(error, match=message):
        CODES(*arguments)


def results(names: list[str]) -> dict[str, bool]:
    """True for each case where the kernels agree; called in a process in which Triton is interpreted."""
    from lowbit_kernels.runtime.launches import counted

    torch.manual_seed(0)
    found = {}
    for case in (c for c in SMALL if c.name in names):
        inputs = _interpreted_inputs(case)
        with counted() as calls:
            found[case.name] = all(_agrees(OP, case, x) for x in inputs)
        if case in EXACT:
            found[case.name] &= set(calls) == {("fake_quantize", "triton")}
        if case in INTEGERS:
            with counted() as calls:
                found[case.name] &= all(_codes_agree(CODES, case, x) for x in inputs)
            found[case.name] &= set(calls) == {("fake_quantize_codes", "triton")}
        if case in EXACT:
            found[case.name] &= _gradients_agree(case) and _gradients_agree_in_place(case)
    return found


def _interpreted_inputs(case: Case) -> list[Tensor]:
    """x of the case and its extremes, in one matrix: the interpreter's time is that of a launch."""
    if case not in EXACT or case.columns >= 1000:
        return [case.x()]
    if case.row_step > 1:
        return [case.x(), extreme(case)]
    return [torch.cat([case.x(), extreme(case)])]


def _gradients_agree(case: Case, device: str = "cpu") -> bool:
    arguments = gradient_arguments(case, device)
    found, wanted = GRADIENTS(*arguments), fake_quantize_gradients.reference(*arguments)
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


def _gradients_agree_in_place(case: Case, device: str = "cpu") -> bool:
    arguments = gradient_arguments(case, device)
    held, *others, group_size, grid_name = arguments
    found = gradients_in_place(held.clone(), *others, group_size=group_size, grid_name=grid_name)
    pairs = zip(found, GRADIENTS(*arguments), strict=True)
    return all(equal_bits(a.cpu(), b.cpu()) for a, b in pairs)


def gradient_arguments(case: Case, device: str = "cpu") -> tuple:
    """Scales are smaller than the values ask for, and of either sign, so that some codes clip."""
    x = case.x(device)
    _, _, scale, zero_point = expected(x, case)
    signs = torch.ones_like(scale)
    signs.view(-1)[::2] = -1
    scale = scale * 0.75 * signs if case.grid.format not in ("e4m3", "e2m1") else scale * 0.75
    if case.spec.mapping == "half_integer":
        zero_point = scale * 0.5
    grad = torch.randn_like(x.float()).to(case.dtype)
    return (grad, x, scale, zero_point, case.group_size, case.grid.name)


@pytest.fixture(scope="module")
def under_triton(request: pytest.FixtureRequest) -> dict[str, bool]:
    return interpreted(
        "import json\nfrom tests.kernels.test_fake_quantize import results\n"
        f"print(json.dumps(results({names(request)})))"
    )


@each_kind
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_interpreted_kernels(under_triton: dict[str, bool], case: Case) -> None:
    assert under_triton[case.name]


@pytest.mark.parametrize("case", SMALL[:4] + SMALL[-9::3], ids=lambda c: c.name)
def test_operators_are_registered_well(case: Case) -> None:
    torch.library.opcheck(OP.default, case.arguments())
    if case in EXACT:
        torch.library.opcheck(GRADIENTS.default, gradient_arguments(case))


@pytest.mark.cover("values")
@pytest.mark.parametrize("case", [c for c in EXACT if "groups" in c.name], ids=lambda c: c.name)
def test_gradients_are_those_of_learned_scales(case: Case) -> None:
    grad, x, scale, zero_point, *_ = gradient_arguments(case)
    zero = None
    if learns_zero(case.spec):
        is_code = case.spec.mapping == "asymmetric"
        value = -zero_point.float() * scale.float() if is_code else zero_point.float()
        zero = (value / RATE).requires_grad_()
    rate = rate_of(case.spec)
    parameter = (scale.float() / rate).requires_grad_()
    own = x.float().requires_grad_()
    values = learned_fake_quantize(own, parameter, zero, case.spec)
    values.backward(grad.float())
    found = fake_quantize_gradients(
        grad.float(),
        x,
        scale,
        zero_point,
        grid_name=case.grid.name,
        group_size=case.group_size,
    )
    torch.testing.assert_close(found[0], own.grad, rtol=0, atol=0)
    torch.testing.assert_close(found[1] * rate, parameter.grad, rtol=1e-4, atol=1e-4)
    if zero is not None:
        torch.testing.assert_close(found[2] * RATE, zero.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", range(2, 9))
def test_no_code_clips_where_the_spec_says_so(bits: int, dtype: torch.dtype) -> None:
    """Every bfloat16 number as the end of a block, at either side, and with a larger other end."""
    ends = torch.arange(2**15 - 2**7, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    fine = ends.float() * torch.linspace(1, 2, len(ends))
    for signed in (True, False):
        spec = Spec(Int(bits, signed), PerRow(), "symmetric_no_clipping_err")
        assert not spec.may_clip(dtype) and spec.may_clip(torch.float16)
        for low, high in ((-1.0, 0.0), (0.0, 1.0), (-1.0, 0.9), (-0.9, 1.0)):
            for own in (ends.float(), fine):
                x = torch.stack([own * low, own * high], 1)
                x = x[x.isfinite().all(1)]
                scale, zero_point = spec.choose_qparams(x, dtype)
                limits = (spec.format.quant_min, spec.format.quant_max)
                codes = unclamped_codes(x, (1, 2), scale, zero_point, spec.format.dtype, *limits)
                assert within_range(codes, spec.format.dtype, *limits).all()


def stack_arguments(kind: str, turned: bool, device: str = "cpu") -> tuple:
    """The op's arguments for experts [E, N, K], stored so, or as [E, K, N]."""
    case = next(c for c in SMALL if c.name == f"{kind}-padded-fp16")
    x = torch.randn(3, 11, 45, device=device).half()
    x = x.mT.contiguous().mT if turned else x
    joint = case.spec.joint_part([x], torch.float32).flatten() if kind == "nvfp4" else None
    dtypes = torch.float32, torch.float16
    return (x, None, None, case.group_size, case.grid.name, *dtypes, True, None, joint)


def _stacks_agree(kind: str, turned: bool, device: str = "cpu") -> bool:
    """A stack has the results of its matrices, and lies as it was given."""
    x, *others, joint = stack_arguments(kind, turned, device)
    values, inside = OP(x, *others, joint)
    grad = torch.randn_like(values)
    kept = zero_outside(grad, inside, others[2])
    same = values.stride() == x.stride()
    for i, part in enumerate(x):
        own = None if joint is None else joint[i : i + 1]
        found, bits = reference(part.contiguous(), *others, own)
        mask, own_mask = (unpack_inside(b, others[2], x.shape[-1]) for b in (bits, inside[i]))
        same &= equal_bits(values[i], found) and torch.equal(mask, own_mask)
        same &= torch.equal(kept[i], torch.where(mask, grad[i], 0.0))
    wide = torch.randn(2, *x.shape[::-1], device=device).half().permute(0, 3, 2, 1)  # 4-D
    return same and equal_bits(
        OP(wide, *others, joint)[0], reference(wide.contiguous(), *others, joint)[0]
    )


def _turned_edges_agree(device: str = "cpu") -> bool:
    """Columns with gaps, a global scale of each row, and groups longer than a row. Bits beyond a row are 0."""
    same = True
    for kind, group_size in (("nvfp4", 16), ("int4", 64), ("mx-e2m1-symmetric", 7)):
        case = next(c for c in SMALL if c.name == f"{kind}-groups")
        x = torch.randn(45, 13, device=device).bfloat16()[:, :11].mT
        joint = None
        if kind == "nvfp4":
            joint = case.spec.joint_part([x.unsqueeze(1)], torch.float32).flatten()
        how = (group_size, case.grid.name, torch.float32, torch.bfloat16, True, None, joint)
        found, wanted = OP(x, None, None, *how), reference(x.contiguous(), None, None, *how)
        same &= found[0].mT.is_contiguous() and equal_bits(found[0], wanted[0])
        bits, mask = (unpack_inside(b, group_size, 8 * b[0].numel()) for b in (found[1], wanted[1]))
        same &= torch.equal(bits[:, :45], mask[:, :45]) and not bits[:, 45:].any()
    return same


KINDS_OF_STACKS = [(k, t) for k in ("int4", "mx-e2m1-symmetric", "nvfp4") for t in (False, True)]


@pytest.mark.parametrize(("kind", "turned"), KINDS_OF_STACKS)
def test_stacks(kind: str, turned: bool) -> None:
    assert _stacks_agree(kind, turned)
    torch.library.opcheck(OP.default, stack_arguments(kind, turned))


def test_interpreted_stacks() -> None:
    code = (
        "import json\nfrom tests.kernels import test_fake_quantize as own\n"
        "stacks = [own._stacks_agree(*kind) for kind in own.KINDS_OF_STACKS]\n"
        "print(json.dumps([*stacks, own._turned_edges_agree()]))"
    )
    assert all(interpreted(code))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "turned"), KINDS_OF_STACKS)
def test_cuda_stacks(kind: str, turned: bool) -> None:
    for _ in range(3):  # then by the launcher's plan
        assert _stacks_agree(kind, turned, "cuda")
    torch.library.opcheck(OP.default, stack_arguments(kind, turned, "cuda"))


@pytest.mark.gpu
def test_cuda_edges_of_transposed_matrices() -> None:
    assert _turned_edges_agree("cuda")


def test_output_dtype_is_rounded_once() -> None:
    case = Case("", 5, 96, SMALL[0].spec, torch.float32)
    arguments = case.arguments()
    narrow = OP(*arguments[:6], torch.bfloat16, False)[0]
    assert equal_bits(narrow, OP(*arguments)[0].to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({0: torch.ones(4)}, ValueError, "unsqueeze"),
        ({0: torch.ones(4, 4, dtype=torch.float64)}, TypeError, "float64"),
        ({3: 0}, ValueError, "group_size"),
        ({4: "absmax int8 -8 7"}, ValueError, "mapping"),
        ({4: "symmetric int3 -8 7"}, ValueError, "format"),
        ({4: "symmetric"}, ValueError, "a grid is named by mapping, format"),
        ({4: "symmetric int8 least most"}, ValueError, "a grid is named by mapping, format"),
        ({1: torch.ones(1, 1)}, ValueError, "scale"),
        ({4: "asymmetric int8 -8 7", 1: torch.ones(4, 1)}, ValueError, "zero_point"),
        ({5: torch.float64}, TypeError, "float64"),
        ({4: "asymmetric e4m3 -448 448"}, ValueError, "e4m3 with float scales takes"),
        ({4: "symmetric_no_clipping_err e2m1 -6 6"}, ValueError, "e2m1 with float scales takes"),
        ({4: "asymmetric e2m1 -6 6 e8m0"}, ValueError, "symmetric or symmetric_no_clipping_err"),
        ({4: "symmetric e2m1 -6 6 e5m3"}, ValueError, "scales must be one of float, e8m0, e4m3"),
        ({4: "symmetric e2m1 -6 6 e8m0 e8m0"}, ValueError, "a grid is named by"),
        ({4: "symmetric e2m1 -4 4 e8m0"}, ValueError, "e2m1 are -6 to 6, got -4 to 4"),
        ({4: "symmetric int8 -8 7 e8m0"}, ValueError, "int8 takes float scales"),
        ({4: "symmetric e2m1 -6 6 e4m3"}, ValueError, "need a global_scale"),
        ({9: torch.ones(1)}, ValueError, "take no global_scale"),
        ({4: "symmetric e2m1 -6 6 e4m3", 9: torch.ones(3)}, ValueError, "R / M rows, got 3 for 4"),
        ({4: "symmetric e2m1 -6 6 e4m3", 9: torch.ones(0)}, ValueError, "R / M rows, got 0 for 4"),
        ({4: "symmetric e2m1 -6 6 e4m3", 9: torch.ones(1, 1)}, ValueError, "global_scale"),
    ],
)
def test_errors_name_what_is_wrong(change: dict, error: type, message: str) -> None:
    arguments: list = [torch.ones(4, 4), None, None, 4, "symmetric int8 -8 7"]
    arguments += [torch.float32, torch.float32, True, None, None]
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(error, match=message):
        OP(*arguments)


def test_a_traced_gradient_reaches_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces the backward pass of a Function with tensors that have no data."""
    monkeypatch.setattr(fake_quantize, "runs_on", lambda device: True)
    with FakeTensorMode():
        grad, inside = torch.empty(4, 64), torch.empty(4, 2, 4, dtype=torch.uint8)
        assert zero_outside(grad, inside, 32).shape == (4, 64)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.gpu
@pytest.mark.parametrize("case", EXACT, ids=lambda c: c.name)
def test_cuda_equals_the_maths_of_lowbit(case: Case) -> None:
    """Equal to PyTorch on the GPU and on the CPU, for given parameters and computed ones, extremes included."""
    for x in (case.x("cuda"), extreme(case, "cuda")):
        assert _agrees(OP, case, x)
        _, *others, global_scale = case.arguments("cuda")
        both = [OP(t, *others, s)[0].cpu() for t, s in _on_both(x, global_scale)]
        assert equal_bits(*both)


def _on_both(x: Tensor, global_scale: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    return [(x, global_scale), (x.cpu(), None if global_scale is None else global_scale.cpu())]


@each_kind
@pytest.mark.gpu
@pytest.mark.parametrize("case", INTEGERS, ids=lambda c: c.name)
def test_cuda_codes(case: Case) -> None:
    assert _codes_agree(CODES, case, case.x("cuda"))
    assert _codes_agree(CODES, case, extreme(case, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.large], ids=lambda c: c.name)
def test_cuda_equals_the_maths_of_lowbit_on_large_shapes(case: Case) -> None:
    assert _agrees(OP, case, case.x("cuda"))


@each_kind
@pytest.mark.gpu
@pytest.mark.parametrize("case", EXACT, ids=lambda c: c.name)
def test_cuda_gradients(case: Case) -> None:
    assert _gradients_agree(case, "cuda") and _gradients_agree_in_place(case, "cuda")


def test_the_name_of_a_grid_says_all_of_it() -> None:
    for case in CASES:
        assert fake_quantize.Grid.named(case.grid.name) == case.grid


@each_kind
@pytest.mark.gpu
@pytest.mark.parametrize("case", EXACT, ids=lambda c: c.name)
def test_the_launcher_runs_calls_of_known_layouts(case: Case, monkeypatch) -> None:
    """With other values than those of the call that it learned the launch from."""

    def agree() -> bool:
        found = _agrees(OP, case, case.x("cuda")) and _gradients_agree(case, "cuda")
        return found and (case not in INTEGERS or _codes_agree(CODES, case, case.x("cuda")))

    for _ in range(2):  # the first call of an op makes the launcher its kernel
        assert agree()
    for name in ("quantize", "codes", "gradients"):
        monkeypatch.setattr(fake_quantize.fake_quantize_triton, name, None)
    assert agree()


@pytest.mark.gpu
def test_cuda_gradients_are_deterministic() -> None:
    case = next(c for c in CASES if c.large)
    arguments = gradient_arguments(case, "cuda")
    first, second = GRADIENTS(*arguments), GRADIENTS(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("case", EXACT[:6], ids=lambda c: c.name)
def test_cuda_operators_are_registered_well(case: Case) -> None:
    torch.library.opcheck(OP.default, case.arguments("cuda"))
    torch.library.opcheck(GRADIENTS.default, gradient_arguments(case, "cuda"))
    torch.library.opcheck(CODES.default, codes_arguments(case, case.x("cuda"), True))


@pytest.mark.gpu
def test_cuda_offsets_of_64_bits() -> None:
    """2^31 elements and more, in bfloat16."""
    spec = SMALL[0].spec
    case = Case("", 70_001, 32_768, spec, torch.bfloat16)
    x = torch.empty(case.rows, case.columns, dtype=torch.bfloat16, device="cuda").normal_()
    values, bits = OP(x, *Case("", 1, 32_768, spec).arguments("cuda")[1:])
    for rows in (slice(0, 3), slice(65_530, 65_540), slice(-3, None)):
        wanted, inside, *_ = expected(x[rows], case)
        assert equal_bits(values[rows], wanted)
        assert torch.equal(unpack_inside(bits[rows], case.group_size, case.columns), inside)

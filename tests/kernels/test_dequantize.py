"""dequantize: the reference against the formula, every implementation against the reference, to the bit."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.cases.dequantize import CASES, Case
from benchmarks.cases.formats import FORMATS
from lowbit_kernels.runtime.launches import counted
from lowbit_kernels.weight_only.codes_format import dequantized
from lowbit_kernels.weight_only.dequantize import dequantize, reference
from tests.kernels.interpreted import interpreted

SMALL = [case for case in CASES if not case.large]
OP = torch.ops.lowbit.dequantize


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


each_shape = pytest.mark.cover("values", case=lambda c: (c.bits, c.name.removeprefix("int8-")))


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same dtype, shape and bits. NaNs must be in the same places; their payload may differ."""
    if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    return torch.equal(bits(a)[~a.isnan()], bits(b)[~b.isnan()])


def formula(codes, scale, zero_point, group_size, size, dtype) -> torch.Tensor:
    """Element by element, in numpy's float32."""
    rows, is_packed = codes.shape[0], codes.dtype == torch.uint8
    x = np.zeros((rows, size), dtype=np.float32)
    codes = codes.numpy()
    scale = scale.float().numpy()
    for n in range(rows):
        for k in range(size):
            byte = int(codes[n, k // 2 if is_packed else k])
            code = (byte >> (4 * (k % 2))) % 16 - 8 if is_packed else byte
            zero = 0 if zero_point is None else int(zero_point[n, k // group_size])
            with np.errstate(all="ignore"):
                x[n, k] = np.float32(code - zero) * scale[n, k // group_size]
    return torch.from_numpy(x).to(dtype)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_reference_is_the_formula(case: Case) -> None:
    arguments = case.arguments()
    assert equal_bits(reference(*arguments), formula(*arguments))


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_cpu(case: Case) -> None:
    codes, scale, zero_point, group_size, size, dtype = arguments = case.arguments()
    out = dequantize(codes, scale, zero_point, group_size=group_size, size=size, dtype=dtype)
    assert out.is_contiguous() and equal_bits(out, reference(*arguments))


INTERPRETED = """
import json, torch
from lowbit_kernels.runtime.launches import counted
from tests.kernels.test_dequantize import OP, SMALL, equal_bits, reference

torch.manual_seed(0)
results = {}
for case in SMALL:
    arguments = case.arguments()
    with counted() as calls:
        results[case.name] = equal_bits(OP(*arguments), reference(*arguments))
    results[case.name] &= calls == {("dequantize", f"int{case.bits} triton"): 1}
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def under_triton() -> dict[str, bool]:
    return interpreted(INTERPRETED)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_interpreted_kernel(under_triton: dict[str, bool], case: Case) -> None:
    assert under_triton[case.name]


FORMAT_SHAPES = ((64, None), (45, 9), (37, 16), (21, 40))
"""K and the group size (None: that of the format)."""


def of_formats(
    dtype: torch.dtype,
    device: str = "cpu",
    shapes: tuple[tuple[int, int | None], ...] = FORMAT_SHAPES,
) -> dict[str, bool]:
    """True for each format and shape whose kernel, which must run, gives the bits of the reference. Rows are those of a
    larger weight, and codes begin at odd addresses too."""
    found = {}
    for format in FORMATS:
        for k, group in shapes:
            weight = format.weight(9, k, group, device)
            for name in ("codes", "scale", "zero_point"):
                weight[name] = None if weight[name] is None else weight[name][1::3]
            arguments = {**weight, "size": k, "dtype": dtype}
            expected = dequantized(**{**arguments, "dtype": torch.float32}).to(dtype)
            with counted() as calls:
                out = dequantize(**arguments)
            is_triton = [name.endswith(" triton") for _, name in calls] == [True]
            found[f"{format.name}-{k}"] = is_triton and equal_bits(out, expected)
    return found


def test_interpreted_formats() -> None:
    code = """
import json, torch
from tests.kernels.test_dequantize import FORMAT_SHAPES, of_formats
torch.manual_seed(0)
shapes = {torch.float32: FORMAT_SHAPES[:2], torch.float16: FORMAT_SHAPES[2:]}
print(json.dumps({str(dtype): of_formats(dtype, shapes=own) for dtype, own in shapes.items()}))
"""
    for found in interpreted(code).values():
        assert found and all(found.values()), [name for name, same in found.items() if not same]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (64, None)), (torch.bfloat16, (37, 16))], ids=str
)
def test_cuda_formats(dtype: torch.dtype, shape: tuple[int, int | None]) -> None:
    found = of_formats(dtype, "cuda", (shape,))
    assert all(found.values()), [name for name, same in found.items() if not same]


@pytest.mark.gpu
def test_cuda_graph_of_a_table_that_no_call_has_seen() -> None:
    """A graph cannot copy the table from the host."""
    weight = next(f for f in FORMATS if f.name == "table3").weight(8, 64, device="cuda")
    call = partial(dequantize, size=64, dtype=torch.float32)
    call(**weight)
    weight["table"] = tuple(value * 3 for value in weight["table"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(**weight)
    graph.replay()
    assert equal_bits(out, call(**weight))


@pytest.mark.cover("values", case=lambda c: (c.bits, c.has_zero_point, c.dtype))
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case) -> None:
    torch.library.opcheck(OP.default, case.arguments())


def test_compiles_for_any_shape() -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def half(packed: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
        x = dequantize(packed, scale, group_size=16, size=size, dtype=torch.float32)
        return x / 2

    for rows, size in ((3, 32), (5, 48), (8, 47)):
        packed, scale, zero_point, *_ = Case("", rows, size, 16).arguments()
        expected = reference(packed, scale, zero_point, 16, size, torch.float32) / 2
        assert torch.equal(half(packed, scale, size), expected)


EXTREME_SCALES = [0.0, -0.0, 1e-45, 1e-38, -1e-3, 1e4, 3e38, math.inf, -math.inf, math.nan]


def extreme(bits: int, dtype: torch.dtype) -> tuple:
    scale = torch.tensor(EXTREME_SCALES)[:, None].repeat(1, 4)
    rows = len(EXTREME_SCALES)
    if bits == 8:
        codes = torch.randint(-128, 128, (rows, 64), dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (rows, 32), dtype=torch.uint8)
        codes[:, :8] = torch.arange(8, dtype=torch.uint8) * 0x22 + 0x10  # all 16
    return codes, scale, None, 16, 64, dtype


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_extreme_scales(dtype: torch.dtype, bits: int) -> None:
    arguments = extreme(bits, dtype)
    assert equal_bits(OP(*arguments), formula(*arguments))


def test_zero_points_span_int8() -> None:
    packed = torch.tensor([[0xF0]], dtype=torch.uint8)
    for zero in (-128, -8, 0, 7, 127):
        zero_point = torch.tensor([[zero]], dtype=torch.int8)
        for codes, ends in ((packed, (-8, 7)), (torch.tensor([[-128, 127]]).char(), (-128, 127))):
            out = dequantize(
                codes, torch.ones(1, 1), zero_point, group_size=2, size=2, dtype=torch.float32
            )
            assert out.tolist() == [[end - zero for end in ends]]


WRONG = [
    ({"codes": torch.zeros(2, 4)}, TypeError, r"torch\.int8, .*got torch\.float32"),
    ({"scale": torch.ones(2, 2, dtype=torch.float64)}, TypeError, r"got torch\.float64"),
    ({"dtype": torch.int32}, TypeError, r"dtype of .*, got torch\.int32"),
    ({"zero_point": torch.zeros(2, 2).int()}, TypeError, r"int8, .*got torch\.int32"),
    ({"zero_point": torch.zeros(2, 1, dtype=torch.int8)}, ValueError, r"\(2, 2\), got \(2, 1\)"),
    ({"group_size": 0}, ValueError, "1 or more elements, got 0"),
    ({"size": 9}, ValueError, r"0\.\.8, .*; got 9"),
    ({"size": -1}, ValueError, "got -1"),
    ({"codes": torch.zeros(1, 2, 4, dtype=torch.uint8)}, ValueError, "flatten leading"),
]
WRONG_SIZES = {
    torch.uint8: [
        (
            {"group_size": 5},
            ValueError,
            r"takes torch\.uint8 codes of shape \(2, 5\), got \(2, 4\)",
        ),
        ({"scale": torch.ones(3, 2)}, ValueError, r"scale \[N, groups\], .*got \(3, 2\)"),
    ],
    torch.int8: [
        (
            {"group_size": 5},
            ValueError,
            r"takes torch\.int8 codes of shape \(2, 10\), got \(2, 8\)",
        ),
        ({"scale": torch.ones(3, 2)}, ValueError, r"scale \[N, groups\], .*got \(3, 2\)"),
    ],
}


@pytest.mark.parametrize("dtype", WRONG_SIZES, ids=str)
def test_wrong_arguments(dtype: torch.dtype) -> None:
    arguments = {
        "codes": torch.zeros(2, 4 if dtype == torch.uint8 else 8, dtype=dtype),
        "scale": torch.ones(2, 2),
        "zero_point": None,
        "group_size": 4,
        "size": 8,
        "dtype": torch.float32,
    }
    assert dequantize(**arguments).shape == (2, 8)
    for change, error, message in WRONG + WRONG_SIZES[dtype]:
        with pytest.raises(error, match=message):
            dequantize(**{**arguments, **change})


@each_shape
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case) -> None:
    arguments = case.arguments("cuda")
    out = OP(*arguments)
    assert out.is_contiguous() and equal_bits(out, reference(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL[:6], ids=lambda c: c.name)
def test_cuda_operator_is_registered_well(case: Case) -> None:
    torch.library.opcheck(OP.default, case.arguments("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cuda_extreme_scales(dtype: torch.dtype, bits: int) -> None:
    codes, scale, *rest = extreme(bits, dtype)
    out = OP(codes.cuda(), scale.cuda(), *rest).cpu()
    assert equal_bits(out, formula(codes, scale, *rest))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bits", "padding"), [(4, 0), (4, 1), (8, 0)], ids=["int4-one-long-row", "int4-rows", "int8"]
)
def test_cuda_offsets_of_64_bits(bits: int, padding: int) -> None:
    case = Case("", 70_001, 32_768 - padding, 128, torch.bfloat16, bits=bits)
    codes, scale, *rest = case.arguments("cuda")
    out = OP(codes, scale, *rest)
    assert out.numel() > 2**31
    for rows in (slice(0, 3), slice(65_530, 65_540), slice(-3, None)):
        assert equal_bits(out[rows], reference(codes[rows], scale[rows], *rest))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    arguments = Case("", 256, 1024, 128, has_zero_point=True).arguments("cuda")
    OP(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OP(*arguments)
    arguments[0].bitwise_not_()
    graph.replay()
    assert equal_bits(out, reference(*arguments))

"""Every format of `weight_linear` and `dequantize` against its formula, element by element."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.cases.formats import FLOAT8, FORMATS, Format
from lowbit_kernels.weight_only.codes_format import CodesFormat, format_of
from lowbit_kernels.weight_only.dequantize import dequantize
from lowbit_kernels.weight_only.weight_linear import weight_linear

ALL_TEST_UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)

formats = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
of_each_kind = pytest.mark.cover(
    "values", format=lambda f: (f.codes, f.zero_point, f.scale, bool(f.table))
)


def number(weight: dict, row: int, k: int) -> float:
    """The number of a code, counted from the middle of integers."""
    codes, table = weight["codes"], weight["table"]
    if codes.dtype != torch.uint8:
        return codes[row, k].float().item()
    bits = weight["bits"] or 4
    stream = int.from_bytes(bytes(codes[row].tolist()), "little")
    stored = stream >> (k * bits) & (2**bits - 1)
    return table[stored] if table else stored - 2 ** (bits - 1)


def scale_of(weight: dict, row: int, group: int) -> float:
    scale, shared = weight["scale"][row, group], weight["global_scale"]
    if scale.dtype == torch.uint8:
        return 2.0 ** (scale.item() - 127) if scale < 255 else math.nan
    return (scale.float() if shared is None else scale.float() / shared.flatten()[0]).item()


def values(weight: dict, k: int) -> Tensor:
    """The weight [N, k] in float64, by the formula."""
    n, size, zeros = weight["codes"].shape[0], weight["group_size"], weight["zero_point"]
    found = torch.zeros(n, k, dtype=torch.float64)
    for row in range(n):
        for column in range(k):
            group = column // size
            x, s = number(weight, row, column), scale_of(weight, row, group)
            zero = 0.0 if zeros is None else zeros[row, group].item()
            if zeros is not None and zeros.dtype == torch.uint8:
                zero -= 2 ** ((weight["bits"] or 8) - 1)
            is_value = zeros is not None and zeros.is_floating_point()
            found[row, column] = x * s + zero if is_value else (x - zero) * s
    return found


@formats
@pytest.mark.parametrize(("k", "group"), [(64, None), (45, 9), (37, 16)])
def test_dequantize_is_the_formula(format: Format, k: int, group: int | None) -> None:
    torch.manual_seed(0)
    weight = format.weight(5, k, group)
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantize(**weight, size=k, dtype=dtype)
        assert torch.equal(found, values(weight, k).float().to(dtype))


@pytest.mark.cover("values")
@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 20])
def test_weight_linear(format: Format, m: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = format.weight(24, 96), torch.randn(m, 96).to(dtype)
    bias, residual = torch.randn(24).to(dtype), torch.randn(m, 24).to(dtype)
    out = weight_linear(x, bias=bias, residual=residual, **weight)
    exact = x.double() @ values(weight, 96).T + bias.double() + residual.double()
    limit = 2.0**-20 if dtype == torch.float32 else 2.0**-7
    assert (out.double() - exact).norm() <= limit * exact.norm()
    assert torch.equal(weight_linear(x, **weight), weight_linear(x[None], **weight)[0])


@of_each_kind
@formats
def test_operators_are_registered_well(format: Format) -> None:
    weight = format.weight(8, 64)
    parts = (weight["codes"], weight["scale"], weight["zero_point"])
    last = (weight["global_scale"], weight["bits"], [*weight["table"]])
    x = torch.randn(3, 64).bfloat16()
    ops = torch.ops.lowbit
    group = weight["group_size"]
    linear = (x, *parts, None, None, group, *last)
    values = (*parts, group, 60, torch.bfloat16, *last)
    has_float8 = any(t.dtype in FLOAT8 for t in parts[:2])  # which test_schema can't compare
    utils = ALL_TEST_UTILS[1:] if has_float8 else ALL_TEST_UTILS
    torch.library.opcheck(ops.weight_linear.default, linear, test_utils=utils)
    torch.library.opcheck(ops.dequantize.default, values, test_utils=utils)


@of_each_kind
@formats
def test_compiles_without_a_break(format: Format) -> None:
    torch.compiler.reset()
    weight, x = format.weight(8, 64), torch.randn(3, 64).bfloat16()
    linear = torch.compile(partial(weight_linear, **weight), fullgraph=True, backend="aot_eager")
    assert torch.equal(linear(x), weight_linear(x, **weight))


def test_nan_scales_and_codes() -> None:
    mx = next(f for f in FORMATS if f.name == "mxfp4").weight(2, 64)
    mx["scale"][0, 1], mx["scale"][1, 0] = 255, 0
    found = dequantize(**mx, size=64, dtype=torch.float32)
    assert found[0, 32:].isnan().all() and found[0, :32].isfinite().all()
    assert found[1, :32].abs().max() <= 6 * 2.0**-127
    float8 = next(f for f in FORMATS if f.name == "float8_e4m3fn").weight(2, 64)
    float8["codes"].view(torch.uint8)[1, 3] = 0xFF
    out = weight_linear(torch.ones(1, 64), **float8)
    assert out[0, 1].isnan() and out[0, 0].isfinite()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 9}, "1 to 8; got 9"),
        ({"bits": 3}, r"codes of shape \(2, 24\), got \(2, 32\)"),
        ({"codes": torch.zeros(2, 64, dtype=torch.int8), "bits": 4}, "got 4 for torch.int8"),
        ({"table": (1.0, 2.0)}, "each code of 4 bits; got 2"),
        ({"table": (1.0,) * 16, "zero_point": torch.zeros(2, 2)}, "take no zero_point"),
        ({"global_scale": torch.ones(1)}, "goes with a scale of torch.float8_e4m3fn"),
        ({"global_scale": torch.ones(2)}, r"got \(2,\)"),
        ({"codes": torch.zeros(2, 64, dtype=torch.uint8), "bits": 8}, "begin at 0"),
        (
            {
                "codes": torch.zeros(2, 64, dtype=torch.int8),
                "zero_point": torch.zeros(2, 2, dtype=torch.uint8),
            },
            "must be int8 for int8 codes",
        ),
    ],
)
def test_wrong_formats(change: dict, message: str) -> None:
    arguments = {
        "codes": torch.zeros(2, 32, dtype=torch.uint8),
        "scale": torch.ones(2, 2),
        "group_size": 32,
    }
    for op in (partial(weight_linear, torch.ones(1, 64)), partial(dequantize, size=64)):
        rest = {} if op.func is weight_linear else {"dtype": torch.float32}
        op(**arguments, **rest)
        with pytest.raises(ValueError, match=message):
            op(**{**arguments, **change}, **rest)


def test_the_format_of_dtypes() -> None:
    bf16, uint8 = torch.bfloat16, torch.uint8
    assert format_of(uint8, bf16) == CodesFormat(4, -8)
    assert format_of(torch.int8, bf16, torch.int8) == CodesFormat(8, -128, zero_point="code")
    assert format_of(uint8, bf16, uint8, 3) == CodesFormat(3, zero_point="code")
    assert format_of(uint8, bf16, bf16, 8) == CodesFormat(8, zero_point="value", mid=128)
    assert format_of(torch.float8_e5m2, bf16) == CodesFormat(8, exponent=5)
    table = (1.0, 2.0)
    assert format_of(uint8, uint8, None, 1, table) == CodesFormat(1, table=table, scale_bytes=True)

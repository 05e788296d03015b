"""lowbit.numerics.affine at its edges: odd shapes, extreme values, float8, gradients, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.numerics.affine import (
    MAPPINGS,
    MappingName,
    choose_qparams_affine,
    dequantize_affine,
    fake_quantize_affine,
    quant_range,
    quantize_affine,
)
from lowbit.numerics.granularity import PerGroup, PerRow, PerTensor

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
mappings = pytest.mark.parametrize("mapping", MAPPINGS)
float8 = pytest.mark.parametrize("dtype", FLOAT8, ids=["e4m3fn", "e5m2"])


def round_trip(
    x: Tensor, mapping: MappingName, block: tuple[int, ...], **options: Any
) -> tuple[Tensor, Tensor]:
    """Values and scale of `x` as int4; the values come in the dtype of `x`."""
    scale, zero_point = choose_qparams_affine(x, mapping, block, torch.int8, -8, 7, **options)
    codes = quantize_affine(x, block, scale, zero_point, torch.int8, -8, 7)
    values = dequantize_affine(codes, block, scale, zero_point, -8, 7, output_dtype=x.dtype)
    fake = fake_quantize_affine(x, block, scale, zero_point, torch.int8, -8, 7)
    torch.testing.assert_close(fake, values, rtol=0, atol=0, equal_nan=True)
    return values, scale


@mappings
@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0,), (3, 0, 8)], ids=str)
@pytest.mark.parametrize("per", [PerTensor(), PerRow()], ids=["tensor", "row"])
def test_empty(mapping: MappingName, shape: tuple[int, ...], per: PerTensor | PerRow) -> None:
    block = per.block_size(shape)
    values, scale = round_trip(torch.randn(shape), mapping, block)
    assert values.shape == shape and scale.numel() == 0
    x = torch.randn(shape, requires_grad=True)
    fake_quantize_affine(x, block, scale, None, torch.int8).sum().backward()
    assert x.grad is not None and x.grad.shape == shape


@mappings
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 7), (7, 1), (13, 31), (3, 5, 7), (2, 3, 5, 7), (101,)], ids=str
)
def test_odd_shapes(mapping: MappingName, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    block = PerRow().block_size(shape)
    values, scale = round_trip(x, mapping, block)
    assert values.shape == shape and scale.numel() == x.numel() // shape[-1]
    assert ((values - x).abs().amax(-1) <= scale.reshape(shape[:-1]) * 1.001).all()


@mappings
def test_memory_layout_does_not_matter(mapping: MappingName) -> None:
    whole = torch.randn(24, 26)
    views = {
        "transposed": whole.t()[:24],
        "strided": whole[::2, :24],
        "sliced": whole[1:, 2:],
        "expanded": whole[:1, :8].expand(6, 8),
    }
    for name, view in views.items():
        block = PerGroup(8).block_size(view.shape)
        assert not view.is_contiguous()
        expected, _ = round_trip(view.contiguous(), mapping, block)
        assert torch.equal(round_trip(view, mapping, block)[0], expected), name


def test_experts_are_quantized_as_if_alone() -> None:
    x = torch.randn(3, 5, 16)
    values, _ = round_trip(x, "symmetric", (1, 1, 8))
    alone = torch.stack([round_trip(expert, "symmetric", (1, 8))[0] for expert in x])
    assert torch.equal(values, alone)


@pytest.mark.cover("pairs")
@mappings
@pytest.mark.parametrize(
    "scale_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("eps", [None, 0.0, 1e-12])
def test_zeros(mapping: MappingName, scale_dtype: torch.dtype, eps: float | None) -> None:
    """The same holds for an eps that the scale's dtype cannot represent."""
    values, scale = round_trip(
        torch.zeros(3, 16), mapping, (1, 8), scale_dtype=scale_dtype, eps=eps
    )
    assert (scale > 0).all() and (1.0 / scale.float()).isfinite().all()
    assert values.abs().max() <= 8 * scale.max()
    if mapping == "half_integer":  # has no zero
        assert values.abs().max() <= scale.max() / 2
    elif mapping != "float_zero_point":
        assert torch.equal(values, torch.zeros(3, 16))


@mappings
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nan_and_inf_stay_visible_and_in_their_block(
    mapping: MappingName, bad: float, dtype: torch.dtype
) -> None:
    x = torch.randn(4, 16, dtype=dtype)
    clean, _ = round_trip(x, mapping, (1, 8))
    x[1, 3] = bad
    values, scale = round_trip(x, mapping, (1, 8))
    assert not scale[1, 0].isfinite()
    assert not values[1, 3].isfinite()
    kept = torch.ones(4, 16, dtype=torch.bool)
    kept[1, :8] = False
    assert torch.equal(values[kept], clean[kept])


@pytest.mark.parametrize("mapping", MAPPINGS[:3])
def test_huge(mapping: MappingName) -> None:
    """Also where max − min overflows float32. The value of code −8, 3e38 · 8/7.5, is still finite."""
    x = torch.tensor([[3e38, -3e38, 1e38, 0.0], [3e38, 1e38, 2e38, 3e37]])
    values, scale = round_trip(x, mapping, (1, 4))
    assert values.isfinite().all() and scale.isfinite().all()
    assert ((values.double() - x.double()).abs() <= scale.double()[:, None] * 1.001).all()


@mappings
def test_tiny(mapping: MappingName) -> None:
    """Inputs below the smallest scale round to values as small; nothing divides by zero."""
    x = torch.tensor([[1e-40, -1e-40, 1e-45, 0.0], [1e-36, -1e-36, 5e-37, 0.0]])
    values, scale = round_trip(x, mapping, (1, 4))
    assert values.isfinite().all() and (scale > 0).all()
    assert ((values.double() - x.double()).abs() <= scale.double()[:, None] * 1.001).all()


@mappings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_arithmetic_is_float32_for_every_input(mapping: MappingName, dtype: torch.dtype) -> None:
    x = (torch.randn(8, 32) * 3).to(dtype)
    args = (mapping, (1, 16), torch.int8, -8, 7)
    for ours, expected in zip(
        choose_qparams_affine(x, *args), choose_qparams_affine(x.float(), *args), strict=True
    ):
        assert ours is not None and expected is not None and torch.equal(ours, expected)
    values, _ = round_trip(x, mapping, (1, 16))
    expected, _ = round_trip(x.float(), mapping, (1, 16))
    assert values.dtype == dtype and torch.equal(values, expected.to(dtype))


@float8
@pytest.mark.parametrize(
    "per", [PerTensor(), PerRow(), PerGroup(8)], ids=["tensor", "row", "group"]
)
def test_float8(dtype: torch.dtype, per: PerTensor | PerRow | PerGroup) -> None:
    """scale = amax / largest; the cast rounds; the error is half a unit in the last place."""
    x = torch.randn(6, 24) * torch.logspace(-1, 1, 24)
    block = per.block_size(x.shape)
    scale, zero_point = choose_qparams_affine(x, "symmetric", block, dtype, keepdim=True)
    assert zero_point is None
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    largest = torch.finfo(dtype).max
    amax = (x / spread).abs().max().item()
    assert amax == pytest.approx(largest, rel=1e-6)
    codes = quantize_affine(x, block, scale, None, dtype)
    assert codes.dtype == dtype
    assert torch.equal(
        codes.float(), (x * (1.0 / spread)).clamp(-largest, largest).to(dtype).float()
    )
    values = dequantize_affine(codes, block, scale, None)
    assert torch.equal(values, codes.float() * spread)
    assert torch.equal(values, fake_quantize_affine(x, block, scale, None, dtype))
    # half a unit in the last place: eps/2 of the value, and of the least normal below it
    unit = torch.finfo(dtype).eps / 2
    assert (
        (values - x).abs()
        <= unit * torch.maximum(x.abs(), torch.finfo(dtype).tiny * spread) * 1.001
    ).all()


@float8
def test_float8_zeros_nan_and_saturation(dtype: torch.dtype) -> None:
    zeros = torch.zeros(2, 8)
    scale, _ = choose_qparams_affine(zeros, "symmetric", (1, 8), dtype)
    assert (scale > 0).all() and torch.equal(
        fake_quantize_affine(zeros, (1, 8), scale, None, dtype), zeros
    )
    x = torch.tensor([[torch.nan, 1.0], [1e9, -1e9]])
    values = fake_quantize_affine(x, (1, 1), torch.ones(4), None, dtype)
    largest = torch.finfo(dtype).max
    assert values[0, 0].isnan() and values[1].tolist() == [largest, -largest]


@float8
@pytest.mark.parametrize("mapping", MAPPINGS[1:])
def test_float8_has_no_zero_point(dtype: torch.dtype, mapping: MappingName) -> None:
    with pytest.raises(ValueError, match=rf"no zero point.*'symmetric', got '{mapping}'"):
        choose_qparams_affine(torch.randn(2, 8), mapping, (1, 8), dtype)


@float8
def test_float8_gradient_stops_where_it_saturates(dtype: torch.dtype) -> None:
    """The gradient passes for inputs that round to the largest value, up to half a step above it, as for integers."""
    largest = torch.finfo(dtype).max
    half_step = largest / (28 if dtype == torch.float8_e4m3fn else 14)  # 16 of 448, 4096 of 57344
    inside, outside = largest + half_step * 0.99, largest + half_step * 1.01
    x = torch.tensor([0.1, largest, inside, -inside, outside, -outside], requires_grad=True)
    fake_quantize_affine(x, (6,), torch.ones(()), None, dtype).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1, 1, 1, 0, 0]


def test_gradient_is_masked_by_the_code_before_the_clamp() -> None:
    """7.5 rounds to the code 8, which the clamp brings back to 7: outside. 7.49 rounds to 7: inside."""
    x = torch.tensor([-8.51, -8.5, -8.0, 0.3, 7.0, 7.49, 7.5, 20.0], requires_grad=True)
    upstream = torch.arange(1.0, 9.0)
    y = fake_quantize_affine(
        x, (8,), torch.ones(()), torch.zeros((), dtype=torch.int32), torch.int8, -8, 7
    )
    assert y.tolist() == [-8, -8, -8, 0, 7, 7, 7, 7]
    y.backward(upstream)
    assert x.grad is not None and x.grad.tolist() == [0, 2, 3, 4, 5, 6, 0, 0]


def test_gradient_of_a_float_zero_point() -> None:
    x = torch.tensor([-1.6, -1.0, 0.5, 5.7, 5.8], requires_grad=True)
    scale, zero_point = torch.tensor(0.5), torch.tensor(2.5)  # codes 0..15 stand for −1.5 .. 6.0
    fake_quantize_affine(x, (5,), scale, zero_point, torch.uint8, 0, 15).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1, 1, 1, 1]
    x.grad = None
    fake_quantize_affine(x - 10, (5,), scale, zero_point, torch.uint8, 0, 15).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradient_keeps_dtype_shape_and_reaches_views(dtype: torch.dtype) -> None:
    x = torch.randn(16, 6, dtype=dtype, requires_grad=True)
    y = fake_quantize_affine(x.t(), (1, 8), torch.full((12,), 0.5), None, torch.int8, -8, 7)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype and x.grad.shape == x.shape
    assert torch.equal(
        x.grad, ((x.float() * 2).round().clamp(-8, 7) == (x.float() * 2).round()).to(dtype)
    )


@mappings
def test_fake_quantization_by_given_scales_keeps_nan(mapping: MappingName) -> None:
    """No integer code stands for NaN; in training a value of 0 would hide it."""
    x = torch.randn(4, 16)
    qparams = choose_qparams_affine(x, mapping, (1, 16), torch.int8, -8, 7)
    expected = fake_quantize_affine(x, (1, 16), *qparams, torch.int8, -8, 7)
    x[1, 3] = torch.nan
    found = fake_quantize_affine(x, (1, 16), *qparams, torch.int8, -8, 7)
    assert found[1, 3].isnan() and found.isnan().sum() == 1
    assert torch.equal(found[~x.isnan()], expected[~x.isnan()])


def test_compiles_without_a_graph_break() -> None:
    def f(x: Tensor) -> Tensor:
        scale, zero_point = choose_qparams_affine(
            x.detach(), "asymmetric", (1, 8), torch.int8, -8, 7
        )
        return fake_quantize_affine(x, (1, 8), scale, zero_point, torch.int8, -8, 7)

    x = torch.randn(4, 16, requires_grad=True)
    y = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, f(x))
    y.sum().backward()
    assert x.grad is not None and x.grad.sum() > 0


@pytest.mark.gpu
@mappings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gpu_gives_the_bits_of_the_cpu(mapping: MappingName, dtype: torch.dtype) -> None:
    x = (torch.randn(64, 256) * torch.logspace(-3, 3, 256)).to(dtype)
    for ours, expected in zip(
        round_trip(x.cuda(), mapping, (1, 32)), round_trip(x, mapping, (1, 32)), strict=True
    ):
        assert torch.equal(ours.cpu(), expected)


@pytest.mark.gpu
@float8
def test_gpu_gives_the_float8_of_the_cpu(dtype: torch.dtype) -> None:
    x = torch.randn(64, 256) * torch.logspace(-3, 3, 256)
    scale, _ = choose_qparams_affine(x, "symmetric", (1, 256), dtype)
    on_gpu, _ = choose_qparams_affine(x.cuda(), "symmetric", (1, 256), dtype)
    assert torch.equal(on_gpu.cpu(), scale)
    codes = quantize_affine(x, (1, 256), scale, None, dtype)
    assert torch.equal(
        quantize_affine(x.cuda(), (1, 256), on_gpu, None, dtype).cpu().float(), codes.float()
    )


X = torch.randn(4, 16)
ONE = torch.ones(4)
ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "integer input": (
        lambda: choose_qparams_affine(X.int(), "symmetric", (1, 16), torch.int8),
        r"torch\.int32.*float\(\)",
    ),
    "complex input": (
        lambda: quantize_affine(X.to(torch.complex64), (1, 16), ONE, None, torch.int8),
        "complex64",
    ),
    "bool input": (
        lambda: fake_quantize_affine(X > 0, (1, 16), ONE, None, torch.int8),
        r"torch\.bool",
    ),
    "unknown mapping": (
        lambda: choose_qparams_affine(X, "affine", (1, 16), torch.int8),
        "unknown mapping 'affine'; accepted: symmetric, .*asymmetric",
    ),
    "block does not tile": (
        lambda: choose_qparams_affine(X, "symmetric", (1, 5), torch.int8),
        r"\(1, 5\) does not tile shape \(4, 16\): 16 is not a multiple of 5",
    ),
    "block of zero": (lambda: quantize_affine(X, (1, 0), ONE, None, torch.int8), "does not tile"),
    "block of wrong rank": (
        lambda: quantize_affine(X, (16,), ONE, None, torch.int8),
        "one entry for each dimension",
    ),
    "block of wrong rank, codes": (
        lambda: dequantize_affine(X.char(), (1, 1, 16), ONE, None),
        "one entry for each",
    ),
    "scales of another block": (
        lambda: quantize_affine(X, (1, 8), ONE, None, torch.int8),
        "scale has 4 elements .* for 8 blocks",
    ),
    "zero points of another block": (
        lambda: dequantize_affine(X.char(), (1, 16), ONE, torch.zeros(3)),
        "zero_point has 3 elements .* for 4 blocks",
    ),
    **{
        f"{name} of integers": (
            lambda call=call: call(X.char()),
            r"floating-point.*got torch\.int8",
        )
        for name, call in {
            "scales": lambda x: choose_qparams_affine(x, "symmetric", (1, 16), torch.int8),
            "codes": lambda x: quantize_affine(x, (1, 16), ONE, None, torch.int8),
            "values": lambda x: fake_quantize_affine(x, (1, 16), ONE, None, torch.int8),
        }.items()
    },
    "target dtype": (
        lambda: choose_qparams_affine(X, "symmetric", (1, 16), torch.int64),
        r"torch\.int64; accepted: int8",
    ),
    "output dtype": (
        lambda: quantize_affine(X, (1, 16), ONE, None, torch.float16),
        r"torch\.float16; accepted",
    ),
    "range of nothing": (
        lambda: quant_range(torch.int8, 3, 3),
        r"quant_min=3, quant_max=3 is not a range within",
    ),
    "range upside down": (lambda: quant_range(torch.int8, 7, -8), "is not a range"),
    "range beyond the dtype": (
        lambda: quant_range(torch.int8, 0, 255),
        r"torch\.int8's -128\.\.127",
    ),
    **{
        f"eps of {eps}": (
            lambda eps=eps: choose_qparams_affine(X, "symmetric", (1, 16), torch.int8, eps=eps),
            f"eps must be a finite number of at least 0, got {eps}",
        )
        for eps in (torch.nan, torch.inf, -1e-6)
    },
    "smallest value above the largest": (
        lambda: choose_qparams_affine(
            X, "asymmetric", (1, 16), torch.int8, min_val=ONE, max_val=0.5 * ONE
        ),
        "min_val 1.0 of block 0 is above its max_val 0.5",
    ),
    "scales beyond float16": (
        lambda: choose_qparams_affine(
            1e9 * ONE.view(4, 1), "symmetric", (1, 1), torch.int8, -8, 7, scale_dtype=torch.float16
        ),
        r"4 of 4 scales are beyond 65504.*float16: a block reaches from 0 to 1e\+09; take torch.bf",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_value_and_what_is_accepted(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()

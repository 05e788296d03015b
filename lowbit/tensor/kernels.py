"""lowbit's kernels, imported at their first use: `import lowbit` imports neither them nor Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lowbit_kernels.dequantize_cpu import Dequantizer


def quantize_rowcol(
    x: Tensor, format: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`lowbit_kernels.quantize_rowcol`: codes, scales, and both of the transposed copy."""
    from lowbit_kernels.quantize_rowcol import quantize_rowcol

    return quantize_rowcol(x, format, **options)


def scaled_mm(format: str, a: Tensor, b: Tensor, *scales: Any, **options: Any) -> Tensor:
    """`lowbit_kernels.scaled_mm` of codes in a format of `quantize_rowcol`, int8 or float8."""
    from lowbit_kernels.scaled_mm import scaled_mm

    return scaled_mm(a, b, *scales, **options)


def int8_sums(a: Tensor, b: Tensor) -> Tensor:
    """`lowbit_kernels.scaled_mm.int8_sums`: a [M, K] @ b [N, K].T of int8, in int32, by PyTorch."""
    from lowbit_kernels.scaled_mm import int8_sums

    return int8_sums(a, b)


def ternary_mm(a: Tensor, packed: Tensor, *scales: Any, **options: Any) -> Tensor:
    """`lowbit_kernels.ternary_mm`: int8 rows by a matrix of 2-bit codes."""
    from lowbit_kernels.ternary_mm import ternary_mm

    return ternary_mm(a, packed, *scales, **options)


def round_rows(values: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`lowbit_kernels.round_rows`: int8 codes and a scale a row, to nearest or stochastically."""
    from lowbit_kernels.round_rows import round_rows

    return round_rows(values, **options)


def weight_linear(x: Tensor, *tensors: Tensor | None, group_size: int) -> Tensor:
    """`lowbit_kernels.weight_linear`: x [..., K] by a weight [N, K] of 4 or 8 bits."""
    from lowbit_kernels import weight_linear

    return weight_linear.weight_linear(x, *tensors, group_size=group_size)  # type: ignore[arg-type]


def grouped_linear(x: Tensor, *tensors: Tensor | None, group_size: int) -> Tensor:
    """`lowbit_kernels.grouped_linear`: x [M, K] by the weights [E, N, K] of the tokens' experts."""
    from lowbit_kernels import grouped_linear

    return grouped_linear.grouped_linear(x, *tensors, group_size=group_size)  # type: ignore[arg-type]


def dynamic_linear(x: Tensor, *tensors: Tensor | None) -> Tensor:
    """`lowbit_kernels.dynamic_linear`: x [..., K], quantized, by a weight [N, K] of int8 or float8."""
    from lowbit_kernels import dynamic_linear

    return dynamic_linear.dynamic_linear(x, *tensors)  # type: ignore[arg-type]


def dequantize(codes: Tensor, scale: Tensor, **options: Any) -> Tensor:
    """`lowbit_kernels.dequantize`: int8 or packed int4 codes to floating point."""
    from lowbit_kernels.dequantize import dequantize

    return dequantize(codes, scale, **options)


def cpu_dequantizer(format: Mapping[str, Any], *sizes: int) -> Dequantizer | None:
    """`lowbit_kernels.dequantize_cpu.dequantizer` of what makes a `Format`, and sizes."""
    from lowbit_kernels.codes_cpu import Format
    from lowbit_kernels.dequantize_cpu import dequantizer

    return dequantizer(Format(**format), *sizes)

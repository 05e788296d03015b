"""The output of a linear y = x wᵀ + b in low bits, for a weight in high precision: one op for the weight's quantization
and the product.

    y = x · ŵᵀ + bias                  ŵ: the weight rounded along its rows, as `quantize_rowcol` does

    x         int8 or float8_e4m3fn codes [M, K rounded up to a multiple of 16]
    x_scale   float32 [M] or [1]
    weight    float32, bfloat16 or float16 [N, K]
    bias      float32, bfloat16 or float16 [N], or None
    y         out_dtype [M, N]

The values are those of `quantize_rowcol` and `scaled_mm`, called one after the other. On GPUs of compute capability 9.0
one launch plan holds both, and the weight's codes are scratch memory.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit_kernels.matmul import scaled_mm
from lowbit_kernels.matmul.scaled_mm import Planned
from lowbit_kernels.quantize import quantize_rowcol as rowcol
from lowbit_kernels.quantize import quantize_rowcol_sm90
from lowbit_kernels.runtime import launch_plan, launcher, nvrtc
from lowbit_kernels.runtime.launch_plan import Buffer, Composition
from lowbit_kernels.runtime.launcher import called, planned_op
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.library import FLOATS, check_one_device
from lowbit_kernels.weight_only.weight_operands import TensorLayout, layout

X, X_SCALE, WEIGHT, BIAS, OUT = range(5)
"""The numbers of the tensors of a plan; scratch memory follows."""


def linear_output(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    format: str,
    *,
    tensorwise: bool = False,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y; shapes, dtypes and the formula are in the module's docstring.

    Args:
        format: that of the weight's codes, as of `quantize_rowcol`.
        tensorwise: the weight has one scale (float8 only).

    Raises:
        TypeError, ValueError: as `quantize_rowcol` and `scaled_mm` do.
    """
    return called(_op, x, x_scale, weight, format, tensorwise, bias, out_dtype)


def reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    format: str,
    tensorwise: bool,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The op by `quantize_rowcol` and `scaled_mm`, on any device."""
    codes, scale, _, _ = rowcol.quantize_rowcol(
        weight, format, columns=False, tensorwise=tensorwise
    )
    return scaled_mm.scaled_mm(x, codes, x_scale, scale, bias=bias, out_dtype=out_dtype)


def _launch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    format: str,
    tensorwise: bool,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    operands = x, x_scale, weight, bias
    _check(*operands, format, tensorwise, out_dtype)
    found = None
    if nvrtc.runs_on_hopper(x.device):
        found = planned(*map(layout, operands), format, tensorwise, out_dtype)
    if found is None:
        launcher.learn("linear_output", None)
        return reference(x, x_scale, weight, format, tensorwise, bias, out_dtype)
    launcher.take_over("linear_output")
    launcher.learn("linear_output", found.plan)
    ran("quantize_rowcol", "sm90")
    ran("scaled_mm", *found.products)
    return launch_plan.run(found.plan, operands)[0]


@functools.lru_cache(maxsize=4096)
def planned(
    x: TensorLayout,
    x_scale: TensorLayout,
    weight: TensorLayout,
    bias: TensorLayout | None,
    format: str,
    tensorwise: bool,
    out_dtype: torch.dtype,
) -> Planned | None:
    """The plan for operands of these layouts; None where the parts have to copy one of them, or split a sum."""
    (n, k), m = weight.shape, x.shape[0]
    as_they_are = all(one is None or one.is_contiguous for one in (x, x_scale, bias))
    too_long = format == "int8" and k > scaled_mm.MOST_TERMS
    if 0 in (m, n, k) or weight.strides[1] != 1 or not as_they_are or too_long:
        return None
    made = rowcol.results_of(n, k, format, True, False, tensorwise, False)
    how = True, False, tensorwise, False, False, False, made
    quantized = quantize_rowcol_sm90.planned(tuple(weight), format, *how)
    codes = made[0].layout(x.device)
    product = scaled_mm.planned(
        x, codes, x_scale.shape[0], made[1].shape[0], out_dtype, bias and bias.dtype
    )
    if product is None:
        return None
    whole = Composition(4, (Buffer((m, n), out_dtype),))
    own = whole.scratch(made)
    whole.add(quantized, (WEIGHT, None, None), own)
    operands = X, own[0], X_SCALE, own[1], None if bias is None else BIAS
    whole.add(product.plan, operands, (OUT,))
    return Planned(whole.plan(), product.products)


def _fake(x, x_scale, weight, format, tensorwise, bias, out_dtype) -> Tensor:
    _check(x, x_scale, weight, bias, format, tensorwise, out_dtype)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def _check(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    format: str,
    tensorwise: bool,
    out_dtype: torch.dtype,
) -> None:
    if weight.dtype not in FLOATS:
        raise TypeError(
            f"linear_output takes a weight of {', '.join(map(str, FLOATS))}, got {weight.dtype}; codes go to scaled_mm"
        )
    rowcol.check_format(format, tensorwise)
    width = weight.shape[-1] + -weight.shape[-1] % 16
    if weight.dim() != 2 or x.dim() != 2 or x.shape[1] != width:
        raise ValueError(
            f"linear_output takes a weight [N, K] and codes of x [M, {width}], got {tuple(weight.shape)} and "
            f"{tuple(x.shape)}"
        )
    if (x.dtype, rowcol.FORMATS[format][0]) not in scaled_mm.OPERANDS:
        raise TypeError(f"codes of x in {x.dtype} can't be multiplied by a weight in {format}")
    if x_scale.dtype != torch.float32 or tuple(x_scale.shape) not in ((x.shape[0],), (1,)):
        raise ValueError(
            f"scales of x are float32 [{x.shape[0]}] or [1], got {x_scale.dtype} {tuple(x_scale.shape)}"
        )
    check_one_device(x=x, x_scale=x_scale, weight=weight, bias=bias)
    scaled_mm.check_result(weight.shape[0], bias, out_dtype)


_op = planned_op("linear_output", _launch, _fake)

"""The output of a linear y = x wᵀ + b in low bits, for a weight in high precision: one op for the weight's quantization
and the product.

    y = x · ŵᵀ + bias                  ŵ: the weight rounded along its rows, as `quantize_rowcol` does for this
                                       `format` and, with one scale, `tensorwise`

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
from lowbit_kernels.runtime import launcher, nvrtc
from lowbit_kernels.runtime.launch_plan import Buffer, Composition
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.weight_only.weight_operands import TensorLayout, layout

X, X_SCALE, WEIGHT, BIAS, OUT = range(5)
"""The numbers of the tensors of a plan; scratch memory follows."""


@op(
    "empty(out_dtype, M, N)",
    planned=True,
    flops="2 * M * N * K",
    x="codes [M, W]",
    x_scale="float32 [M] or [1]",
    weight="float [N, K]; codes go to scaled_mm",
    bias="float [N]",
    out_dtype="float",
    rules={
        "rowcol.check_format(format, tensorwise)": "",
        "W == K + -K % 16": "x has codes [M, {K + -K % 16}] for this weight, got {tuple(x.shape)}",
    },
    types={
        "(x.dtype, rowcol.FORMATS[format][0]) in scaled_mm.OPERANDS": (
            "codes of x in {x.dtype} can't be multiplied by a weight in {format}"
        )
    },
)
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
    """y; see the module's docstring."""
    codes, scale, _, _ = rowcol.quantize_rowcol(
        weight, format, columns=False, tensorwise=tensorwise
    )
    return scaled_mm.scaled_mm(x, codes, x_scale, scale, bias=bias, out_dtype=out_dtype)


reference = linear_output.reference


@linear_output.kernel
def _launch(x, x_scale, weight, format, tensorwise, bias, out_dtype) -> Tensor:
    operands = x, x_scale, weight, bias
    found = None
    if nvrtc.runs_on_hopper(x.device):
        found = planned(*map(layout, operands), format, tensorwise, out_dtype)
    if found is None:
        launcher.learn("linear_output", None)
        return reference(x, x_scale, weight, format, tensorwise, bias, out_dtype)
    ran("quantize_rowcol", "sm90")
    ran("scaled_mm", *found.products)
    return launcher.carried_out("linear_output", found.plan, operands)[0]


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
    """The plan for operands of these layouts; None where the parts have to copy one of them, or split a sum.

    Args:
        x, x_scale, weight, bias: of the op's operands.
        format, tensorwise, out_dtype: as the op takes them.
    """
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

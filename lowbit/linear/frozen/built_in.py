"""The built-in products of a frozen weight: one literal list, in the order in which its rows are tried."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lowbit.linear.frozen.dequantized import (
    cpu_half_linear,
    cpu_linear,
    exact_cpu_linear,
    is_any,
    is_float32_on_cpu,
    is_half_on_cpu,
    plain_linear,
)
from lowbit.linear.frozen.eight_bits import (
    block_linear,
    can_int_mm,
    can_static_int_mm,
    dynamic_linear,
    e2m1_dynamic_linear,
    has_block_kernel,
    has_dynamic_kernel,
    has_e2m1_kernel,
    has_int4_kernel,
    has_static_kernel,
    int4_dynamic_linear,
    int8_dynamic_linear,
    int8_static_linear,
    static_linear,
)
from lowbit.linear.frozen.registered import registered_row
from lowbit.linear.frozen.row import Row, Weight
from lowbit.linear.frozen.ternary import is_ternary, ternary_linear
from lowbit.linear.frozen.weight_only import (
    has_int_kernel,
    has_matrix_kernel,
    linear_by_op,
    matrix_linear,
    weight_linear,
)


def choose_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Row:
    """The first row whose condition holds for this product."""
    return registered_row(x, weight, bias) or built_in_row(x, weight, bias)


def built_in_row(x: Tensor, weight: Weight, bias: Tensor | None) -> Row:
    return next(row for row in BUILT_IN if row.condition(x, weight, bias))


# ---- weights that another weight stands for --------------------------------------------------------------------


def _stood_for(
    name: str, stored_as: str, operands: Callable[[Tensor, Weight], tuple[Tensor, Weight]]
) -> Row:
    """The row of weights that are `stored_as` this: `operands` gives the input and the weight that the product takes,
    and the row for that weight multiplies them."""

    def condition(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
        return weight.stored_as == stored_as and not weight.transposed

    def implementation(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        x, matrix = operands(x, weight)
        return choose_linear(x, matrix, bias).implementation(x, matrix, bias)

    def recorded(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        x, matrix = operands(x, weight)
        row = choose_linear(x, matrix, bias)
        return (row.recorded or row.implementation)(x, matrix, bias)

    implementation.__name__ = name
    return Row(name, condition, implementation, recorded=recorded)


# ---- the list ------------------------------------------------------------------------------------------------

BUILT_IN = (
    # int4 weights and int8 activations in 16 bits on a GPU
    Row("int4_dynamic_linear", has_int4_kernel, int4_dynamic_linear, takes_residual=True),
    # int4 weights, and int8 weights without a quantized activation, in bfloat16 or float16: kernels for GPU and CPU
    Row(
        "weight_linear",
        has_int_kernel,
        weight_linear,
        takes_residual=True,
        recorded=linear_by_op,
    ),
    # MXFP4 and NVFP4 weights and float8 activations in 16 bits on a GPU that has float8 units
    Row("e2m1_dynamic_linear", has_e2m1_kernel, e2m1_dynamic_linear, takes_residual=True),
    # any other matrix in these dtypes on a GPU, but for 8 bits by 8 bits: the same kernels
    Row("matrix_linear", has_matrix_kernel, matrix_linear, takes_residual=True),
    # int8 weights and activations in 16 bits on a GPU, and float8 ones in bfloat16 on a GPU that has float8 units
    Row("dynamic_linear", has_dynamic_kernel, dynamic_linear, takes_residual=True),
    # float8 weights and activations in blocks of 128, on a GPU that multiplies them
    Row("block_linear", has_block_kernel, block_linear),
    # int8 weights and activations elsewhere: torch._int_mm
    Row("int8_dynamic_linear", can_int_mm, int8_dynamic_linear),
    # the same two for static activations
    Row("static_linear", has_static_kernel, static_linear),
    Row("int8_static_linear", can_static_int_mm, int8_static_linear),
    # ternary weights: int8 tokens by 2-bit codes
    Row("ternary_linear", is_ternary, ternary_linear),
    # columns in the order of GPTQ's act-order: a gather of the input, then the row for a weight of such codes
    _stood_for("ordered_linear", "ordered", lambda x, w: (w.in_order(x), w.sorted_matrix)),
    # a rotation of the input in blocks, then the row for a weight of such codes
    _stood_for("rotated_linear", "rotated", lambda x, w: w.for_product(x)),
    # two of each four inputs are stored: the ordinary weight, then the row for it
    _stood_for("sparse_linear", "sparse24", lambda x, w: (x, w.dense)),
    # any other weight in float32 on a CPU: a kernel multiplies what it decodes. While gradients are enabled, outputs
    # are those of the model prepared for QAT, to the bit: codes read by one kernel, then PyTorch's product
    Row("cpu_linear", is_float32_on_cpu, cpu_linear, recorded=exact_cpu_linear),
    # any other weight in bfloat16 or float16 on a CPU: a kernel that multiplies what it decodes
    Row("cpu_half_linear", is_half_on_cpu, cpu_half_linear),
    # everything else: PyTorch operations
    Row("plain_linear", is_any, plain_linear),
)

"""The aten operations of an AffineTensor: products below autograd and arithmetic.

Arithmetic, which tools that merge adapters into a model do:

    weight + delta, weight.norm(), ...     reads the dequantized values and gives a plain tensor
    weight += delta, weight.data = values  quantizes the result again, in the weight's own scheme
    weight *= factor, weight /= factor     multiplies the scales by a positive factor, where their format holds them

Other writes quantize again, so a change smaller than half a quantization step is mostly lost. Each block keeps its
scale unless a new one has the smaller error, so values that do not change keep their bits. A write to a part that
shares scales with other values, such as columns of int8 rows, raises NotImplementedError, unless these scales give the
new values exactly, as they give zeros. `lowbit.dequantize_(model)` before merging loses nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lowbit.linear.frozen import quantized_linear
from lowbit.linear.frozen.experts import stacked_product
from lowbit.tensor.core import (
    LowbitTensor,
    aten,
    check_not_flat,
    check_part,
    count_on_lists,
    experts_in_high_precision,
    looked_up,
    product_below_autograd,
)
from lowbit.tensor.frozen.affine_tensor import AffineTensor

AffineTensor.implements(aten.embedding.default)(looked_up)


@AffineTensor.implements(aten.mm.default, aten.addmm.default, aten.linear.default)
def _matmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    return product_below_autograd(quantized_linear, func, args, kwargs)


def _by_kernel(
    x: Any, weight: Any, offs: Tensor | None = None, *others: Any, **named: Any
) -> Tensor | None:
    """The product by a kernel; None where it has none."""
    rest = any(one is not None for one in (*others, *named.values()))
    if isinstance(weight, AffineTensor) and weight.ndim == 3 and not rest:
        with torch.no_grad():  # autograd is above, and x may still ask for a gradient
            return stacked_product(x, weight, offs)
    return None


@AffineTensor.implements(aten.bmm.default, aten._grouped_mm.default)
def products_of_experts(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Products of all experts at once: in 16 bits by a kernel, else in high precision. The weight may be either
    operand."""
    for weight in (x for x in args[:2] if isinstance(x, AffineTensor)):
        if weight.activation is not None:  # inputs cannot be told from gradients here
            raise weight._unsupported(
                f"{func} with it as the first operand, as its scheme quantizes inputs (accepted: input @ weight, or a "
                "weight-only scheme)"
            )
    if all(isinstance(x, LowbitTensor) for x in args[:2]):
        raise args[0]._unsupported(f"{func} of two low-bit tensors (accepted: one of them plain)")
    y = _by_kernel(*args, **kwargs)
    return experts_in_high_precision(func, args, kwargs) if y is None else y


@AffineTensor.implements(
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.where.self),
    *(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar),
    *(aten.lerp.Scalar, aten.lerp.Tensor),
    *(aten.neg.default, aten.abs.default, aten.isfinite.default, aten.isnan.default),
    *(aten.eq.Tensor, aten.ne.Tensor, aten.eq.Scalar, aten.ne.Scalar),
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
    *(aten.amax.default, aten.amin.default, aten.std.correction),
    *(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim),
    *(
        aten.ones_like.default,
        aten.full_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
    ),
    *(aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default),
)
def _read(func: Any, args: Any, kwargs: Any) -> Tensor:
    return func(*tree_map(_values, args), **tree_map(_values, kwargs))


def _values(x: Any) -> Any:
    return x.dequantize() if isinstance(x, AffineTensor) else x


@AffineTensor.implements(
    *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor),
    *(aten.add_.Scalar, aten.mul_.Scalar, aten.div_.Scalar),
    *(aten.lerp_.Scalar, aten.lerp_.Tensor, aten.addcdiv_.default),
    *(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.index_put_.default),
    *(aten.masked_fill_.Scalar, aten.masked_fill_.Tensor),
    *(aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor),
)
def _change(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Computes in float32, or in float64 for float64 weights."""
    target, *others = args
    others = tree_map(_values, others)
    if not isinstance(target, AffineTensor):
        return func(target, *others, **kwargs)
    check_not_flat(target, "a change")
    wide = torch.promote_types(target.dtype, torch.float32)
    if func is aten.index_put_.default:  # torch takes values of one dtype alone
        others[1] = others[1].to(wide)
    values = func(target._with(dtype=wide).dequantize(), *others, **kwargs)
    if not (target.shares and target._write_exactly(values)):
        check_part(target)
        target.requantize_(values)
    return target


@AffineTensor.implements(
    *(aten._foreach_lerp_.Scalar, aten._foreach_lerp_.List, aten._foreach_addcdiv_.Scalar),
    *(aten._foreach_mul_.Scalar, aten._foreach_add_.List, aten._foreach_add_.Scalar),
    *(aten._foreach_sub_.List, aten._foreach_sub.List, aten._foreach_mul.Scalar),
    *(aten._foreach_copy_.default, aten._foreach_div_.Scalar),
)
def _on_lists(func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """One tensor at a time: averages of whole models have their frozen weights beside others on their lists."""
    name = func.overloadpacket.__name__.removeprefix("_foreach_")
    lists = [a if isinstance(a, list | tuple) else [a] * len(args[0]) for a in args]
    results = [getattr(own[0], name)(*own[1:], **kwargs) for own in zip(*lists, strict=True)]
    if not func._schema.is_mutable:
        return results
    count_on_lists(func, args)
    return None

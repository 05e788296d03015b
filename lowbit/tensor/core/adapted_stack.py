"""Frozen experts with a low-rank adapter, W + s · A · B, as PEFT adds one to a parameter, before it is added.

PEFT's `target_parameters` gives a module the sum in place of its parameter, by a parametrization that makes the sum at
least twice in each forward pass: torch checks its shape and dtype first. In 16 bits the sum takes four times the bytes
of packed experts. A grouped product needs no sum (`lowbit.linear.frozen.adapted_experts`). All other operations get it:
`values()` makes it, and keeps it as long as this tensor lives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lowbit.linear.frozen.adapted_experts import adapted_product

GROUPED = (torch._grouped_mm, getattr(F, "grouped_mm", torch._grouped_mm))
"""torch's products of experts."""
_Own = torch._C.DisableTorchFunctionSubclass
_TRANSPOSES = {torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes}
_MT = Tensor.mT.__get__  # type: ignore[attr-defined]
_DESCRIBES = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta")),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.__len__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.element_size),
}
"""Functions whose result is known without the sum."""


def adapted_stack(weight: Any, a: Any, b: Any, scale: float) -> AdaptedStack | None:
    """weight + scale · bmm(a, b), not added yet; None where grouped products could not take it: other than stacked
    weights, factors of other dtypes or shapes, weights whose products round their inputs, and in graphs.

    Args:
        weight: frozen experts [E, P, Q].
        a, b: [E, P, R] and [E, R, Q].
        scale: a number.
    """
    if torch.compiler.is_compiling():
        return None
    if weight.ndim != 3 or weight.rounds_inputs or weight.flat_from is not None:
        return None
    if not (type(a) is type(b) is Tensor and a.ndim == b.ndim == 3):
        return None
    if not a.dtype == b.dtype == weight.dtype or not a.device == b.device == weight.device:
        return None
    experts, rows, columns = weight.shape
    if (*a.shape[:2], a.shape[2], b.shape[2]) != (experts, rows, b.shape[1], columns):
        return None
    return AdaptedStack(weight, a, b, scale) if b.shape[0] == experts else None


class AdaptedStack(Tensor):
    """See the module. Made by `adapted_stack`."""

    parts: tuple[Any, Tensor, Tensor, float]
    """W [E, P, Q], A [E, P, R], B [E, R, Q] and s."""
    _sum: Tensor | None

    def __new__(cls, weight: Any, a: Tensor, b: Tensor, scale: float) -> AdaptedStack:
        with _Own():
            self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, weight.shape, dtype=weight.dtype, device=weight.device
            )
        self.parts, self._sum = (weight, a, b, scale), None
        return self

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """True if a factor learns."""
        return any(t.requires_grad for t in self.parts[1:3])

    def values(self) -> Tensor:
        """The sum, a plain tensor, differentiable in A and B."""
        weight, a, b, scale = self.parts
        learns = torch.is_grad_enabled() and self.requires_grad
        if self._sum is None or (learns and not self._sum.requires_grad):
            self._sum = weight.dequantize().baddbmm_(a, b, alpha=scale)
        return self._sum

    def turned(self) -> AdaptedStack:
        """This with its last two dimensions swapped."""
        weight, a, b, scale = self.parts
        return AdaptedStack(weight.transpose(-2, -1), b.mT, a.mT, scale)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBES:
            with _Own():
                return func(*args, **kwargs)
        if func in GROUPED and (y := _product(*args, **kwargs)) is not None:
            return y
        if func is _MT or (func in _TRANSPOSES and not kwargs and _are_last(*args[1:])):
            return args[0].turned()
        args, kwargs = tree_map(_values, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(
            f"{func} of frozen experts with an adapter that is not added yet, below autograd; call .values() for the "
            "sum first"
        )


def _values(x: Any) -> Any:
    return x.values() if isinstance(x, AdaptedStack) else x


def _are_last(first: int, second: int) -> bool:
    return sorted((first % 3, second % 3)) == [1, 2]


def _product(
    x: Any, stack: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    """x · stack by rows that are sorted by expert; None where it takes the sum."""
    if not isinstance(stack, AdaptedStack) or type(x) is not Tensor or x.ndim != 2:
        return None
    if type(offs) is not Tensor or bias is not None or x.dtype is not stack.dtype:
        return None
    if out_dtype not in (None, x.dtype):
        return None
    weight, a, b, scale = stack.parts
    return adapted_product(x, weight, a, b, scale, offs)

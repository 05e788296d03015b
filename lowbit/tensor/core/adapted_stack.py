"""Frozen experts with a low-rank adapter, W + s · A · B, as PEFT adds one to a parameter, before it is added.

PEFT's `target_parameters` gives a module the sum in place of its parameter, by a parametrization that makes the sum at
least twice in each forward pass: torch checks its shape and dtype first. In 16 bits the sum takes four times the bytes
of packed experts. A grouped product needs no sum (`lowbit.linear.frozen.adapted_experts`). All other operations get it:
`values()` makes it once, from then on products read it too, so that changes in place reach them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lowbit.linear.frozen.adapted_experts import MULTIPLE, adapted_product
from lowbit.linear.frozen.checks import refuse_transforms

GROUPED = (torch._grouped_mm, F.grouped_mm)
"""torch's products of experts."""
_Own = torch._C.DisableTorchFunctionSubclass
_TRANSPOSES = {torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes}
_MT = Tensor.mT.__get__  # type: ignore[attr-defined]
ATTRIBUTES = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "requires_grad")),
}
"""How torch reads the attributes of a tensor that describe it."""
_DESCRIBES = {
    *ATTRIBUTES,
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.__len__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.element_size),
}
"""Functions whose result is known without the sum."""


def adapted_stack(weight: Any, a: Any, b: Any, scale: float) -> Tensor | None:
    """weight + scale · bmm(a, b): not added yet where grouped products can take it so. In graphs, and for weights whose
    products round their inputs, a plain tensor. None where factors have other dtypes or shapes.

    Args:
        weight: frozen experts [E, P, Q].
        a, b: [E, P, R] and [E, R, Q].
        scale: a number.

    Raises NotImplementedError inside of a transform of torch.func.
    """
    if not (type(a) is type(b) is Tensor and a.ndim == b.ndim == 3):
        return None
    if not a.dtype == b.dtype == weight.dtype or not a.device == b.device == weight.device:
        return None
    if weight.shape != (*a.shape[:2], b.shape[2]) or b.shape[:2] != (a.shape[0], a.shape[2]):
        return None
    refuse_transforms(weight)
    if torch.compiler.is_compiling() or weight.rounds_inputs or weight.flat_from is not None:
        return _added(weight, a, b, scale)
    return _not_added(weight, a, b, scale)


def _added(weight: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return weight.dequantize().baddbmm_(a, b, alpha=scale)


def _not_added(weight: Any, a: Tensor, b: Tensor, scale: float) -> AdaptedStack:
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Sum.apply(weight, a, b, scale)
    return AdaptedStack(weight, a.detach(), b.detach(), scale)


class _Sum(torch.autograd.Function):
    """Tells autograd that the stack is a function of its factors, for what looks below torch's functions, such as
    other autograd Functions."""

    @staticmethod
    def forward(ctx: Any, weight: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return AdaptedStack(weight, a, b, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), (grad,) = ctx.saved_tensors, grads
        return None, ctx.scale * (grad @ b.mT), ctx.scale * (a.mT @ grad), None


class AdaptedStack(Tensor):
    """See the module. Made by `adapted_stack`.

    parts: W [E, P, Q], A [E, P, R], B [E, R, Q] and s.
    """

    parts: tuple[Any, Tensor, Tensor, float]
    _whole: AdaptedStack | None
    """The stack whose transpose this is."""
    _sum: Tensor | None
    _versions: list[int]

    def __new__(cls, weight: Any, a: Tensor, b: Tensor, scale: float) -> AdaptedStack:
        with _Own():
            self = Tensor._make_wrapper_subclass(
                cls, weight.shape, dtype=weight.dtype, device=weight.device
            )
            self.parts, self._whole, self._sum = (weight, a, b, scale), None, None
            self._versions = _versions(self.parts)
        return self

    def values(self) -> Tensor:
        """The sum, a plain tensor, differentiable in A and B where this was made with gradients enabled.

        Raises RuntimeError if W, A or B has changed since.
        """
        if self._whole is not None:
            return self._whole.values().transpose(-2, -1)
        if self._sum is None:
            self.check_unchanged()
            with torch.set_grad_enabled(self.requires_grad):
                self._sum = _added(*self.parts)
        return self._sum

    def check_unchanged(self) -> None:
        """RuntimeError if a product or sum would differ from those at the time when this was made."""
        if not self.is_added and _versions(self.parts) != self._versions:
            raise RuntimeError(
                "the experts or their adapter changed in place after they were added, and before the sum was read; "
                "compute the sum again, or call .values() on it before the change"
            )

    @property
    def is_added(self) -> bool:
        """True once something has read the sum."""
        return (self if self._whole is None else self._whole)._sum is not None

    def turned(self) -> AdaptedStack:
        """This with its last two dimensions swapped."""
        if self._whole is not None:
            return self._whole
        self.check_unchanged()
        weight, a, b, scale = self.parts
        turned = _not_added(weight.transpose(-2, -1), b.mT, a.mT, scale)
        turned._whole = self
        return turned

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBES:
            with _Own():
                return func(*args, **kwargs)
        if func in GROUPED and (y := _product(*args, **kwargs)) is not None:
            return y
        if func == _MT or (func in _TRANSPOSES and not kwargs and _are_last(*args[1:])):
            return args[0].turned()
        args, kwargs = tree_map(_values, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(
            f"{func} of frozen experts with an adapter that is not added yet, below autograd; call .values() for the "
            "sum first"
        )


def _versions(parts: tuple[Any, Tensor, Tensor, float]) -> list[int]:
    """How often the memory of each has changed; none for inference tensors, which autograd does not watch."""
    weight, a, b, _ = parts
    return [t._version for t in (a, b, *weight.inner_tensors().values()) if not t.is_inference()]


def _values(x: Any) -> Any:
    return x.values() if isinstance(x, AdaptedStack) else x


def _are_last(first: int, second: int) -> bool:
    return {d + 3 if d < 0 else d for d in (first, second)} == {1, 2}


def _product(
    x: Any, stack: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    """x · stack by rows that are sorted by expert; None where torch multiplies by the sum."""
    if not isinstance(stack, AdaptedStack) or not type(x) is type(offs) is Tensor or x.ndim != 2:
        return None
    weight, a, b, scale = stack.parts
    if x.dtype is not a.dtype or out_dtype not in (None, x.dtype) or bias is not None:
        return None
    more_k, more_n = (-size % MULTIPLE for size in weight.shape[1:])
    if more_k or more_n:  # torch refuses these sizes, or their gradients
        x, values = F.pad(x, (0, more_k)), F.pad(stack.values(), (0, more_n, 0, more_k))
        return torch._grouped_mm(x, values, offs=offs)[:, : weight.shape[2]]
    if stack.is_added:
        return None
    stack.check_unchanged()
    return adapted_product(x, weight, a, b, scale, offs)

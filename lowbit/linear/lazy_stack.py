"""A stack of matrices [E, P, Q] whose values are made when something reads them.

torch's grouped products take the sources of the stack and need no values. All other operations read `values()`, which
are made once. From then on grouped products read them too, so that changes in place reach the products.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lowbit.linear.frozen.adapted_experts import MULTIPLE

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
"""Functions whose result is known without the values."""


class LazyStack(Tensor):
    """See the module. A subclass gives `_made`, `_swapped` and `_product`, and sets `sources`."""

    what: ClassVar[str]
    """What it is, for messages."""
    sources: tuple[Tensor, ...]
    """The tensors that it is made of, which may not change before it is read."""
    _whole: LazyStack | None
    """The stack whose transpose this is."""
    _held: Tensor | None
    _versions: list[int]

    @classmethod
    def of(cls, shape: torch.Size, like: Tensor, sources: tuple[Tensor, ...]) -> Self:
        """A stack of this shape with the dtype and device of `like`."""
        with _Own():
            self = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
            self.sources, self._whole, self._held = sources, None, None
            self._versions = _versions(sources)
        return self

    def values(self) -> Tensor:
        """A plain tensor, differentiable where this was made with gradients enabled.

        Raises RuntimeError if one of its sources has changed since.
        """
        if self._whole is not None:
            return self._whole.values().transpose(-2, -1)
        if self._held is None:
            self.check_unchanged()
            with torch.set_grad_enabled(self.requires_grad):
                self._held = self._made()
        return self._held

    def check_unchanged(self) -> None:
        """RuntimeError if a product or the values would differ from those at the time when this was made."""
        if not self.is_read and _versions(self.sources) != self._versions:
            raise RuntimeError(
                f"{self.what} changed in place before it was read or multiplied; make it again, or call .values() on "
                "it before the change"
            )

    @property
    def is_read(self) -> bool:
        """True once something has read the values."""
        return (self if self._whole is None else self._whole)._held is not None

    def turned(self) -> LazyStack:
        """This with its last two dimensions swapped."""
        if self._whole is not None:
            return self._whole
        self.check_unchanged()
        turned = self._swapped()
        turned._whole = self
        return turned

    def _made(self) -> Tensor:
        """The values."""
        raise NotImplementedError

    def _swapped(self) -> LazyStack:
        """One of the same sources with the last two dimensions swapped."""
        raise NotImplementedError

    def _product(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [M, P], in this dtype, times the matrices of its rows' experts."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBES:
            with _Own():
                return func(*args, **kwargs)
        if func in GROUPED and (y := _multiplied(*args, **kwargs)) is not None:
            return y
        if func == _MT or (func in _TRANSPOSES and not kwargs and _are_last(*args[1:])):
            return args[0].turned()
        args, kwargs = tree_map(_read, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(
            f"{func} of {cls.what} that nothing has read yet, below autograd; call .values() for plain values first"
        )


def _versions(sources: tuple[Tensor, ...]) -> list[int]:
    """How often the memory of each has changed; none for inference tensors, which autograd does not watch."""
    return [t._version for t in sources if not t.is_inference()]


def _read(x: Any) -> Any:
    return x.values() if isinstance(x, LazyStack) else x


def _are_last(first: int, second: int) -> bool:
    return {d + 3 if d < 0 else d for d in (first, second)} == {1, 2}


def _multiplied(
    x: Any, stack: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    """x · stack by rows that are sorted by expert; None where torch multiplies by the values."""
    if not isinstance(stack, LazyStack) or not type(x) is type(offs) is Tensor or x.ndim != 2:
        return None
    if x.dtype is not stack.dtype or out_dtype not in (None, x.dtype) or bias is not None:
        return None
    more_k, more_n = (-size % MULTIPLE for size in stack.shape[1:])
    if more_k or more_n:  # torch refuses these sizes, or their gradients
        x, values = F.pad(x, (0, more_k)), F.pad(stack.values(), (0, more_n, 0, more_k))
        return torch._grouped_mm(x, values, offs=offs)[:, : stack.shape[2]]
    if stack.is_read:
        return None
    stack.check_unchanged()
    return stack._product(x, offs)

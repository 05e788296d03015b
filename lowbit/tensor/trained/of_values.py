"""Which operations of torch compute with the values of a weight alone, so that a trained weight without an
implementation of its own may lend them its values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.tensor.core import LowbitTensor, aten, is_advanced, written

_REFUSED = (aten.stack, aten.convolution, aten.record_stream, aten._resize_output_)
"""`torch.func.functional_call` would multiply by a stack of weights without rounding, and a convolution would, too."""


def is_of_values(func: Any) -> bool:
    """True if an operation reads or writes elements alone: it returns no view, and moves or resizes nothing."""
    aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    gives_view = torch.Tag.inplace_view in func.tags or not all(a.is_write for a in aliases)
    own = func.namespace == "aten" and func.overloadpacket not in _REFUSED
    return own and not gives_view


def is_view(func: Any) -> bool:
    """True if an operation returns memory of an argument that it does not change."""
    aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    return bool(aliases) and not any(a.is_write for a in aliases)


def may_set(weight: Any, index: Any, value: Any) -> bool:
    """True if `weight[index] = value` writes to elements that an index of torch's advanced kind chooses."""
    is_free = not (torch.is_grad_enabled() and weight.requires_grad)
    return is_free and is_advanced(index) and not isinstance(value, LowbitTensor)


def memory(tensor: Tensor) -> int:
    """The address of the memory that a tensor shares with its views."""
    return tensor.untyped_storage().data_ptr()


def changed(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation changes, `out` among them."""
    named = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return [*written(func, args), *(kwargs[name] for name in named if name in kwargs)]

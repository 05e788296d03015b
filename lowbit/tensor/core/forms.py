"""The form of a weight: all that makes it beside its inner tensors, under a name that graphs hold as a constant.

torch.compile takes a tensor subclass apart in Python at each call of a graph, and no guard of a module that holds one
can be skipped. So a graph of a frozen layer (`lowbit.layers.frozen`) has the inner tensors as inputs, which cost what
plain parameters cost, and makes the weight from them and its form (`lowbit.tensor.core.in_graph`).

Weights of one class, shape, dtype and metadata have one form in every process, so that torch's caches of compiled
graphs find it again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lowbit.files import digests
from lowbit.linear.frozen.experts import has_expert_kernel as _has_expert_kernel
from lowbit.tensor.core.base import LowbitTensor


class Form(NamedTuple):
    """What `LowbitTensor.__tensor_unflatten__` takes beside the inner tensors, which have these names."""

    kind: type[LowbitTensor]
    parts: tuple[str, ...]
    context: tuple[Any, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_FORMS: dict[str, Form] = {}
_NAMES: dict[Form, str] = {}


def name_of_form(weight: LowbitTensor) -> str:
    """The name of the form of `weight`: its class and a digest. `form` finds it again."""
    parts, context = weight.__tensor_flatten__()
    with torch._C.DisableTorchFunctionSubclass():
        form = Form(type(weight), tuple(parts), context, tuple(weight.shape), weight.stride())
    name = _NAMES.get(form)
    if name is None:
        kind = f"{form.kind.__module__}.{form.kind.__qualname__}"
        name = f"{form.kind.__name__} {digests.of_pieces([repr((kind, *form[1:])).encode()])[:16]}"
        while name in _FORMS:  # of another class of the same name, as a notebook defines it again
            name += "'"
        _FORMS[name], _NAMES[form] = form, name
    return name


def form(name: str) -> Form:
    """The form that `name_of_form` gave this name."""
    return _FORMS[name]


def parts_of_form(name: str) -> tuple[str, ...]:
    """The names of the inner tensors, a constant in graphs."""
    return _FORMS[name].parts


def has_expert_kernel(
    name: str, dtype: torch.dtype, device: torch.device, transposed: bool
) -> bool:
    """`lowbit.linear.frozen.experts.has_expert_kernel` of weights of this form, and True only for weights of this dtype
    that are transposed or not; a constant in graphs."""
    own = _FORMS[name]
    meta = dict(zip(own.kind.meta_attrs, own.context[0], strict=True))
    stored_as = getattr(own.kind, "stored_as", None)
    if "spec" not in meta or (own.context[1], meta.get("transposed")) != (dtype, transposed):
        return False
    k = own.shape[-2 if transposed else -1]
    return _has_expert_kernel(stored_as, meta["spec"], meta.get("activation"), k, device)


def sources_of_form(name: str) -> str:
    """A digest of the code that dispatches weights of this form, a constant in graphs: torch's caches on disk must not
    find a graph that older code made."""
    return _FORMS[name].kind.digest_of_code(_FORMS[name].context[0])


# What torch.compiler.assume_constant_result does, which would import the compiler along with lowbit.
parts_of_form._dynamo_marked_constant = True  # type: ignore[attr-defined]
sources_of_form._dynamo_marked_constant = True  # type: ignore[attr-defined]
has_expert_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]

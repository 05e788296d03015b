"""Layers with frozen low-bit weights, which cost a compiled graph what plain weights cost.

A graph of torch.compile takes a weight that is a tensor subclass apart at each call, in Python. Its guards are checked
at each call too, and with them those of every module above it, while torch skips the guards of unchanged modules with
plain parameters. Measured in torch 2.11 for a call with 224 int4 weights: 2.5 ms of the host, and 0.04 ms with plain
weights.

So a module with frozen weights gets a subclass of its class, of the same name, in place. Its parameters, its state dict
and its eager code stay as they are. Beside the parameter the module holds the inner tensors as plain attributes. Code
that torch.compile traces makes the weight from them inside the graph, which takes 0.06 ms in that measurement.

The attributes follow the parameter through `to`, `load_state_dict`, `weight.data = …`, an assignment, FSDP2, copies and
pickles. They do not see what is done behind the module's back: a write to `module._parameters`, as by
`torch.func.functional_call` and accelerate's `set_module_tensor_to_device`; `torch.utils.swap_tensors`; another inner
tensor for the weight (`weight.scale = …`). Eager code follows these, and compiled code after
`lowbit.inference.freeze_(model)`. Modules with a hook of accelerate are compiled as before. So are weights that are
DTensors. `torch.export` sees the parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.layers.routed_experts import routed_forward
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.forms import (
    has_expert_kernel,
    name_of_form,
    parts_of_form,
    sources_of_form,
)
from lowbit.tensor.trained.trainable import TrainableTensor

_is_compiling = torch.compiler.is_dynamo_compiling


def is_frozen(weight: Any) -> bool:
    """True for a low-bit weight that no optimizer trains."""
    return (
        isinstance(weight, LowbitTensor)
        and not isinstance(weight, TrainableTensor)
        and not weight.requires_grad
    )


def show_frozen(modules: Iterable[nn.Module]) -> None:
    """Give each of `modules` with frozen weights the subclass of its class that shows compiled graphs their inner
    tensors, in place. Calling it again brings the attributes up to date. Where Python makes no such subclass, a module
    stays as it is: its graphs are right, and slower."""
    for module in modules:
        names = tuple(name for name, p in module._parameters.items() if is_frozen(p))
        if isinstance(module, Frozen) and _names_of(module) == names:
            _show_all(module)
            continue
        hide_frozen([module])
        if not names or isinstance(module, Frozen | torch.jit.ScriptModule):
            continue
        kind = _frozen_class(type(module), names)
        if kind is not None:
            object.__setattr__(module, "__class__", kind)
            _show_all(module)


def hide_frozen(modules: Iterable[nn.Module]) -> None:
    """Give each of `modules` its plain class again, if `show_frozen` gave it another. Where somebody has put a class on
    top, as FSDP2 and parametrizations do, the classes stay."""
    for module in modules:
        if isinstance(module, Frozen):
            for name in _names_of(module):
                _replace_shown(module, name, {})
            if type(module) in _PLAIN:
                object.__setattr__(module, "__class__", shown_class(module))


def shown_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before `show_frozen`."""
    kind = type(module)
    return _PLAIN[kind][0] if kind in _PLAIN else kind


_PLAIN: dict[type, tuple[type[nn.Module], tuple[str, ...]]] = {}
"""Each subclass that stands for a class, and the names of the parameters that it shows. Here and not in the subclass,
whose modules have attributes of their own."""
_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[Frozen] | None] = {}
_PREFIX = "_lowbit_"
"""How the attributes begin that hold inner tensors."""


def _names_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters that a frozen module shows."""
    return next(_PLAIN[kind][1] for kind in type(module).__mro__ if kind in _PLAIN)


def _show_all(module: nn.Module) -> None:
    """Let the attributes beside each frozen parameter follow it."""
    for name in _names_of(module):
        _show(module, name)


def _show(module: Any, name: str) -> None:
    weight: Any = module._parameters.get(name)
    shown: dict[str, Any] = {}
    if is_frozen(weight) and not hasattr(module, "_hf_hook"):
        shown = {_key(name, part): t for part, t in weight.inner_tensors().items()}
        shown[_key(name, "form")] = name_of_form(weight)
        known = [(ref, show) for ref, show in weight.shown_in if ref() not in (None, module)]
        weight.shown_in = (*known, (weakref.ref(module), _show_all))
    _replace_shown(module, name, shown)


def _replace_shown(module: nn.Module, name: str, shown: dict[str, Any]) -> None:
    """Have these attributes beside the parameter of this name, and no others. A compiled graph may run meanwhile."""
    own = module.__dict__
    form = own.get(_key(name, "form"))
    before = () if form is None else [_key(name, part) for part in ("form", *parts_of_form(form))]
    own.update(shown)
    for key in before:
        if key not in shown:
            own.pop(key, None)


def _key(name: str, part: str) -> str:
    return f"{_PREFIX}{name}_{part}"


class Frozen(nn.Module):
    """What the subclasses have that `show_frozen` makes: all that replaces a parameter replaces the attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        _changed(self, name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _changed(self, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        _changed(self, name)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        _show_all(self)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        _show_all(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the plain class, since the subclass exists in this process alone."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *others = reduced
        plain, names = next(_PLAIN[kind] for kind in type(self).__mro__ if kind in _PLAIN)
        args = tuple(plain if arg is type(self) else arg for arg in args)
        if others and isinstance(others[0], dict):
            others[0] = {k: v for k, v in others[0].items() if not k.startswith(_PREFIX)}
        return _shown_again, (make, args, names), *others

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        _show_all(self)


def _changed(module: nn.Module, name: str) -> None:
    if not isinstance(module, Frozen):  # its class has changed
        return
    if name in _names_of(module):
        _show(module, name)
    elif name == "_hf_hook":  # accelerate moves the weights in and out, behind the module's back
        _show_all(module)


def _shown_again(make: Any, args: tuple[Any, ...], names: tuple[str, ...]) -> nn.Module:
    module: nn.Module = make(*args)
    kind = _frozen_class(type(module), names)
    if kind is not None:
        object.__setattr__(module, "__class__", kind)
    return module


class _StandsFor(type):
    """The class of the subclasses. accelerate and PEFT find the class of a name, "Linear", by the first module that has
    it, and then ask which modules are instances. These are all modules of the plain class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        plain = _PLAIN.get(cls)
        return (
            super().__instancecheck__(instance) if plain is None else isinstance(instance, plain[0])
        )


def _frozen_class(plain: type[nn.Module], names: tuple[str, ...]) -> type[Frozen] | None:
    """The subclass of `plain` that shows these parameters, always the same one; None where Python makes none."""
    if (plain, names) not in _CLASSES:
        members: dict[str, Any] = {name: _weight(name) for name in names}
        if plain.forward is nn.Linear.forward:
            members["forward"] = _linear
        elif (forward := routed_forward(plain, names, _has_expert_kernel)) is not None:
            members["forward"] = forward
        members |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
        own = type(plain)
        kind: Any = None
        try:
            meta = _StandsFor if own is type else type(own.__name__, (_StandsFor, own), {})
            kind = meta(plain.__name__, (Frozen, plain), members)
        except TypeError:  # a metaclass or an __init_subclass__ that wants more
            pass
        else:
            _PLAIN[kind] = plain, names
        _CLASSES[plain, names] = kind
    return _CLASSES[plain, names]


# ---- what torch.compile traces --------------------------------------------------------------------------------------


def _is_exported() -> bool:
    """True while torch.export traces. Not traced itself: in torch 2.11, `torch.compiler.is_exporting` is always True in
    code that torch.compile traces."""
    return torch.compiler.is_exporting()


_is_exported._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _in_graph(module: Any, name: str) -> Tensor | None:
    """The weight, made from the module's attributes, in code that torch.compile traces; else None."""
    if not _is_compiling() or _is_exported():
        return None
    form = getattr(module, _key(name, "form"), None)
    if form is None:
        return None
    from lowbit.tensor.core.in_graph import made

    parts = [getattr(module, _key(name, part)) for part in parts_of_form(form)]
    return made(form, sources_of_form(form), *parts)


def _has_expert_kernel(module: Any, name: str, dtype: torch.dtype) -> bool:
    """`has_expert_kernel` of the weight that `_in_graph` makes; False where it makes none."""
    form = None if _is_exported() else getattr(module, _key(name, "form"), None)
    return form is not None and has_expert_kernel(form, dtype, module.is_transposed)


def _linear(self: Any, input: Tensor) -> Tensor:
    """The forward of nn.Linear, which does not read the property: torch 2.11 checks it at each call."""
    weight = _in_graph(self, "weight")
    return F.linear(input, self.weight if weight is None else weight, self.bias)


def _weight(name: str) -> property:
    """The parameter of this name, as an attribute."""

    def read(self: Any) -> Any:
        weight = _in_graph(self, name)
        if weight is not None:
            return weight
        if name in self._parameters:
            return self._parameters[name]
        if name in self.__dict__:  # a plain attribute that took its place
            return self.__dict__[name]
        raise AttributeError(name)

    def write(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    def delete(self: Any) -> None:
        del self.__dict__[name]

    return property(read, write, delete, f"The parameter {name}.")

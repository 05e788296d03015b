"""Layers with frozen low-bit weights, which cost a compiled graph what plain weights cost.

A graph of torch.compile takes a weight that is a tensor subclass apart at each call, in Python. Its guards are checked
at each call too, and with them those of every module above it, while torch skips the guards of unchanged modules with
plain parameters. Measured in torch 2.11 for a call with 224 int4 weights: 2.5 ms of the host, and 0.04 ms with plain
weights.

So a module with frozen weights gets a subclass of its class, of the same name, in place. Its parameters, its state dict
and its eager code stay as they are. Beside the parameter the module holds the inner tensors as plain attributes
(`_weight_codes`, `_weight_scale`). Code that torch.compile traces makes the weight from them inside the graph, which
takes 0.06 ms in that measurement.

The attributes follow the parameter through `to`, `load_state_dict`, `weight.data = …`, an assignment, FSDP2, copies and
pickles. Only eager code sees what is written to `module._parameters` directly. accelerate's hooks write there, so
modules that have one are compiled as before. So are weights that are DTensors. `torch.export` sees the parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.forms import name_of_form, parts_of_form, sources_of_form
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
    tensors, in place. Calling it again does nothing."""
    for module in modules:
        names = tuple(name for name, p in module._parameters.items() if is_frozen(p))
        if isinstance(module, Frozen) and module.frozen == names:
            module.show_parts()
            continue
        hide_frozen([module])
        if names and not isinstance(module, torch.jit.ScriptModule):
            module.__class__ = _frozen_class(type(module), names)
            module.show_parts()  # type: ignore[operator]


def hide_frozen(modules: Iterable[nn.Module]) -> None:
    """Give each of `modules` its plain class again, if `show_frozen` gave it another."""
    for module in modules:
        if isinstance(module, Frozen):
            for name in module.frozen:
                _forget(module, name)
            module.__class__ = module.plain  # type: ignore[assignment]


def shown_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before `show_frozen`."""
    return module.plain if isinstance(module, Frozen) else type(module)


class Frozen(nn.Module):
    """What the subclasses have that `show_frozen` makes."""

    plain: ClassVar[type[nn.Module]]
    """The class that the subclass stands for."""
    frozen: ClassVar[tuple[str, ...]]
    """The names of the parameters that are shown as their inner tensors."""

    def show_parts(self) -> None:
        """Let the attributes beside each frozen parameter follow it."""
        for name in self.frozen:
            self._show(name)

    def _show(self, name: str) -> None:
        _forget(self, name)
        weight: Any = self._parameters.get(name)
        if not is_frozen(weight) or hasattr(self, "_hf_hook"):
            return
        own = self.__dict__
        own[_key(name, "form")] = name_of_form(weight)
        for part, t in weight.inner_tensors().items():
            own[_key(name, part)] = t
        known = [ref for ref in weight.shown_in if ref() not in (None, self)]
        weight.shown_in = (*known, weakref.ref(self))

    # ---- what replaces parameters -----------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        frozen = self.frozen  # before a change of the class
        super().__setattr__(name, value)
        if name in frozen:
            self._show(name)
        elif (
            name == "_hf_hook"
        ):  # accelerate moves the weights in and out, behind the module's back
            self.show_parts()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in self.frozen:
            self._show(name)
        elif name == "_hf_hook":
            self.show_parts()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if name in self.frozen:
            self._show(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.show_parts()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.show_parts()

    # ---- copies and pickles -----------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the plain class, since the subclass exists in this process alone."""
        shown = tuple(f"_{name}_" for name in self.frozen)
        state: Any = self.__getstate__()
        kept = {name: value for name, value in state.items() if not name.startswith(shown)}
        return _restored, (self.plain, self.frozen), kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.show_parts()


def _restored(plain: type[nn.Module], frozen: tuple[str, ...]) -> nn.Module:
    kind = _frozen_class(plain, frozen)
    return kind.__new__(kind)


def _key(name: str, part: str) -> str:
    return f"_{name}_{part}"


def _forget(module: nn.Module, name: str) -> None:
    form = module.__dict__.pop(_key(name, "form"), None)
    if form is not None:
        for part in parts_of_form(form):
            module.__dict__.pop(_key(name, part), None)


class _StandsFor(type):
    """The class of the subclasses. accelerate and PEFT find the class of a name, "Linear", by the first module that has
    it, and then ask which modules are instances. These are all modules of the plain class."""

    def __instancecheck__(cls: Any, instance: Any) -> bool:
        return isinstance(instance, cls.plain)


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[Frozen]] = {}


def _frozen_class(plain: type[nn.Module], frozen: tuple[str, ...]) -> type[Frozen]:
    """The subclass of `plain` that shows these parameters, always the same one."""
    if (plain, frozen) not in _CLASSES:
        members: dict[str, Any] = {name: _weight(name) for name in frozen}
        if plain.forward is nn.Linear.forward:
            members["forward"] = _linear
        members |= {"plain": plain, "frozen": frozen}
        members |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
        kind: Any = _StandsFor(plain.__name__, (Frozen, plain), members)
        _CLASSES[plain, frozen] = kind
    return _CLASSES[plain, frozen]


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

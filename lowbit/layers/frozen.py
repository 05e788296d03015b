"""Layers with frozen low-bit weights, which cost a compiled graph what plain weights cost.

A graph of torch.compile takes a weight that is a tensor subclass apart at each call, in Python. Its guards are checked
at each call too, and with them those of every module above it, while torch skips the guards of unchanged modules with
plain parameters. Measured in torch 2.11 for a call with 224 int4 weights: 2.5 ms of the host, and 0.04 ms with plain
weights.

So a module with frozen weights gets a subclass of its class, of the same name, in place. Its parameters, its state dict
and its eager code stay as they are. Beside the parameter the module holds the inner tensors and the bias in one tuple,
and all else that a graph needs in one string. Code that torch.compile traces makes the weight from the two inside the
graph. Each attribute that it reads costs guards at each call, and each tensor bytecode that fetches it. So it reads no
others: `python -m benchmarks compiled_call` shows what they cost.

The tuples follow the parameter through `to`, `load_state_dict`, `weight.data = …`, an assignment, FSDP2, copies and
pickles. They do not see what is done behind the module's back: a write to `module._parameters`, as by
`torch.func.functional_call` and accelerate's `set_module_tensor_to_device`; `torch.utils.swap_tensors`; another inner
tensor for the weight (`weight.scale = …`). The same holds for a bias. Eager code follows these, and compiled code after
`lowbit.inference.freeze_(model)`. Modules with a hook of accelerate are compiled as before. So are weights that are
DTensors. `torch.export` sees the parameters.

Siblings such as q, k and v whose weights lie side by side in memory have one product in a graph without gradients. The
first of them shows the joint weight, and the others their places in it: a graph that calls the first one before them
takes no tensor of theirs. They do not see `bias.data = …`, nor a write to a weight or bias between their calls in one
graph. Guards compare what siblings share, so that no graph takes a module that has another's place for its sibling:
an object in the first layers alike of a graph, and a name in the others (`lowbit.linear.frozen.in_graph.is_named`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.layers import fused_lora
from lowbit.layers.routed_experts import routed_forward
from lowbit.layers.stand_in import StandIn, give, names_given, take, without
from lowbit.linear.frozen import registered
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.forms import (
    has_expert_kernel,
    name_of_form,
    parts_of_form,
    sources_of_form,
)
from lowbit.tensor.frozen.cpu_values import ReadOnCpu, rows_of_embedding
from lowbit.tensor.trained.trainable import TrainableTensor
from lowbit.tracing import tracer

_is_compiling = torch.compiler.is_dynamo_compiling
_function_modes = torch._C._len_torch_function_stack


def is_frozen(weight: Any) -> bool:
    """True for a low-bit weight that no optimizer trains."""
    return (
        isinstance(weight, LowbitTensor)
        and not isinstance(weight, TrainableTensor)
        and not weight.requires_grad
    )


def show_frozen(modules: Iterable[nn.Module]) -> None:
    """Give each of `modules` with frozen weights the subclass of its class that shows compiled graphs their inner
    tensors, in place. Calling it again brings the tuples up to date. Where Python makes no such subclass, a module
    stays as it is: its graphs are right, and slower."""
    for module in modules:
        names = tuple(name for name, p in module._parameters.items() if is_frozen(p))
        if isinstance(module, Frozen) and names_given(module, Frozen) == names:
            _show_all(module)
            continue
        hide_frozen([module])
        if not names or isinstance(module, Frozen | torch.jit.ScriptModule):
            continue
        try:
            give(module, Frozen, names)
        except TypeError:
            continue
        _show_all(module)
        fused_lora.watch()


def hide_frozen(modules: Iterable[nn.Module]) -> None:
    """Undo `show_frozen`. Where somebody has put a class on top, the module keeps its classes."""
    for module in modules:
        if isinstance(module, Frozen):
            _check_shared(module, False)
            for name in names_given(module, Frozen):
                _hide(module, name)
            take(module, Frozen)


def shown_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before `show_frozen`."""
    return without(type(module), Frozen)


_PREFIX = "_lowbit_"
"""How the attributes begin that hold inner tensors."""
_SHARED, _NAME = f"{_PREFIX}shared", f"{_PREFIX}name"
_NAMES = itertools.count()
_FORWARD = nn.Linear.forward


def _parts(name: str) -> str:
    """The attribute that holds the inner tensors of the weight of this name, in the order of its form, and the bias."""
    return f"{_PREFIX}parts_{name}"


def _about(name: str) -> str:
    """The attribute that says the rest, a line each: form, where the bias is (`_shown`), place among siblings."""
    return f"{_PREFIX}about_{name}"


def _shown(name: str, weight: LowbitTensor, bias: Any, place: str = "") -> dict[str, Any]:
    """The attributes that show graphs a weight, and a bias that is a tensor or None. Another bias stays where it is."""
    form, tensors = name_of_form(weight), weight.inner_tensors()
    parts = tuple(tensors[part] for part in parts_of_form(form))
    is_part = isinstance(bias, Tensor)
    where = "part" if is_part else "" if bias is None else "attribute"
    return {
        _parts(name): (*parts, bias) if is_part else parts,
        _about(name): f"{form}\n{where}\n{place}",
    }


def _hide(module: nn.Module, name: str) -> None:
    for key in (_parts(name), _about(name)):
        module.__dict__.pop(key, None)


def _show_all(module: nn.Module) -> None:
    """Let the tuple beside each frozen parameter follow it."""
    for name in names_given(module, Frozen):
        _show(module, name)


def _show(module: Any, name: str) -> None:
    weight: Any = module._parameters.get(name)
    is_shown = is_frozen(weight) and not hasattr(module, "_hf_hook")
    _check_shared(module, is_shown)
    if not is_shown:
        _hide(module, name)
        return
    known = [(ref, show) for ref, show in weight.shown_in if ref() not in (None, module)]
    weight.shown_in = (*known, (weakref.ref(module), _show_all))
    shared = module.__dict__.get(_SHARED)
    place = "" if shared is None else shared.place_of(module)
    bias = module._parameters.get("bias", "another attribute") if name == "weight" else None
    module.__dict__.update(_shown(name, weight, bias, place))


class _Shared:
    """Sibling linears that have one product in graphs, as long as `is_whole`."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        places: Sequence[str],
        is_whole: Callable[[], bool],
        before: _Shared | None,
    ) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.places, self.is_whole = places, is_whole
        same = before is not None and before.places == places and before.are(modules)
        self.name: str = before.name if before is not None and same else str(next(_NAMES))
        """No other siblings have it in this process. They keep it when they are shared again."""

    def are(self, modules: Sequence[nn.Module]) -> bool:
        """True if these modules share a product now, in this order."""
        return len(modules) == len(self.modules) and all(
            ref() is module and module.__dict__.get(_SHARED) is self
            for ref, module in zip(self.modules, modules, strict=True)
        )

    def place_of(self, module: nn.Module) -> str:
        return next(
            place for ref, place in zip(self.modules, self.places, strict=True) if ref() is module
        )

    def number(self, index: int) -> int:
        """`lowbit.linear.frozen.in_graph.number_of` for one of the siblings, a constant in graphs. Guards see that
        siblings have the same object, and not which, so that one graph serves all layers alike."""
        from lowbit.linear.frozen.in_graph import number_of

        return number_of(self, index)

    number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def share_product(
    modules: Sequence[Any],
    joint: LowbitTensor,
    bias: Tensor | None,
    path: str,
    is_whole: Callable[[], bool],
) -> None:
    """Let frozen linears that graphs call with one input have one product in them.

    Args:
        modules: linears with frozen weights, in the order in which models call them.
        joint: their weights as one, [sum of N, K], over the same memory.
        bias: their biases as one, or None where they have none.
        path: what layers alike share, and others do not.
        is_whole: False as soon as a weight or bias stops being a part of the joint one.
    """
    if not all(isinstance(m, Frozen) and shown_class(m).forward is _FORWARD for m in modules):
        return
    sizes = ",".join(str(module.weight.shape[0]) for module in modules)
    places = [f"{index} {sizes} {path}" for index in range(len(modules))]
    shared = _Shared(modules, places, is_whole, modules[0].__dict__.get(_SHARED))
    modules[0].__dict__.update(_shown("joint", joint, bias))
    for module in modules:
        module.__dict__.update({_SHARED: shared, _NAME: shared.name})
        _show(module, "weight")


def _check_shared(module: nn.Module, is_shown: bool = True) -> None:
    """Part the siblings of this module if it is not shown or they do not lie side by side any more."""
    shared = module.__dict__.get(_SHARED)
    if shared is None or (is_shown and shared.is_whole()):
        return
    found = [one for ref in shared.modules if (one := ref()) is not None]
    parted = [one for one in found if one.__dict__.get(_SHARED) is shared]
    for one in parted:
        _hide(one, "joint")
        for key in (_SHARED, _NAME):
            one.__dict__.pop(key, None)
    for one in parted:
        _show(one, "weight")


class Frozen(StandIn):
    """What modules with frozen weights have: all that replaces a parameter replaces its tuple."""

    @classmethod
    def members(cls, plain: type[nn.Module], names: tuple[str, ...]) -> dict[str, Any]:
        own: dict[str, Any] = {name: _weight(name) for name in names}
        if plain.forward is nn.Linear.forward:
            return own | {"forward": _linear}
        if plain.forward is nn.Embedding.forward:
            return own | {"forward": _embedding}
        forward = routed_forward(plain, names, _has_expert_kernel)
        return own if forward is None else own | {"forward": forward}

    def _lowbit_is_named(self, index: int) -> bool:
        """`lowbit.linear.frozen.in_graph.is_named` for the siblings of this module, a constant that nothing guards."""
        from lowbit.linear.frozen.in_graph import is_named

        return is_named(self.__dict__[_SHARED], index)

    def _lowbit_number(self, index: int, name: str) -> int:
        """`_Shared.number`, where guards see the `name` of the siblings."""
        found: int = self.__dict__[_SHARED].number(index)
        return found

    _lowbit_is_named._dynamo_marked_constant = True  # type: ignore[attr-defined]
    _lowbit_number._dynamo_marked_constant = True  # type: ignore[attr-defined]

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

    def __getstate__(self) -> Any:
        """Without the tuples, which `__setstate__` makes again."""
        state: Any = super().__getstate__()
        return {k: v for k, v in state.items() if not k.startswith(_PREFIX)}

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        _show_all(self)


def _changed(module: nn.Module, name: str) -> None:
    if not isinstance(module, Frozen):  # its class has changed
        return
    if name in names_given(module, Frozen):
        _show(module, name)
    elif name in ("bias", "_hf_hook"):  # with a hook, accelerate moves weights in and out, unseen
        _show_all(module)


# ---- what torch.compile traces --------------------------------------------------------------------------------------


def _is_exported() -> bool:
    """True while torch.export traces. Not traced itself: in torch 2.11, `torch.compiler.is_exporting` is always True in
    code that torch.compile traces."""
    return torch.compiler.is_exporting()


_is_exported._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _in_graph(module: Any, name: str) -> Tensor | None:
    """The weight, made from what the module shows, in code that torch.compile traces; else None."""
    if not _is_compiling() or _is_exported():
        return None
    about = getattr(module, _about(name), None)
    if about is None:
        return None
    form, where, _ = about.split("\n")
    parts = getattr(module, _parts(name))
    return _made(form, parts[:-1] if where == "part" else parts)


def _made(form: str, parts: tuple[Tensor, ...]) -> Tensor:
    from lowbit.tensor.core.in_graph import made

    return made(form, sources_of_form(form), *parts)


def _operands(module: Any, about: str, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """The weight that `_shown` describes, made of its parts, and the bias. Guards on a bias that is None cost as well,
    so where there is none this reads none."""
    form, where, _ = about.split("\n")
    if where == "part":
        return _made(form, parts[:-1]), parts[-1]
    return _made(form, parts), module.bias if where else None


def _has_expert_kernel(module: Any, name: str, dtype: torch.dtype, device: torch.device) -> bool:
    """`has_expert_kernel` of the weight that `_in_graph` makes; False where it makes none."""
    about = None if _is_exported() else getattr(module, _about(name), None)
    return about is not None and has_expert_kernel(
        about.split("\n")[0], dtype, device, module.is_transposed
    )


def _linear_in_graph(self: Any, input: Tensor) -> Tensor:
    """The forward of nn.Linear in code that torch.compile traces."""
    about = None if _is_exported() else getattr(self, "_lowbit_about_weight", None)
    if about is None:
        return F.linear(input, self.weight, self.bias)
    place = about.split("\n")[2]
    number = -1
    if place and not torch.is_grad_enabled():
        index = int(place.split(" ")[0])
        if self._lowbit_is_named(index):
            number = self._lowbit_number(index, self._lowbit_name)
        else:
            number = self._lowbit_shared.number(index)
    if number < 0:
        weight, bias = _operands(self, about, self._lowbit_parts_weight)
        return F.linear(input, weight, bias)
    from lowbit.linear.frozen.in_graph import sibling_linear

    if place[:1] != "0":
        return sibling_linear(input, None, None, place, number)
    weight, bias = _operands(self, self._lowbit_about_joint, self._lowbit_parts_joint)
    return sibling_linear(input, weight, bias, place, number)


def _linear(self: Any, input: Tensor) -> Tensor:
    """The forward of nn.Linear, which does not read the property: torch 2.11 checks it at each call."""
    if _is_compiling():
        return _linear_in_graph(self, input)
    own = self._parameters
    weight = own.get("weight")
    if (
        isinstance(weight, ReadOnCpu)
        and own.get("bias", self) is None
        and tracer.active is None
        and not registered.rows
    ):
        y = weight.quick_product(input)
        if y is not None:
            return y
    return F.linear(input, self.weight, self.bias)


_linear.stands_for = nn.Linear.forward  # type: ignore[attr-defined]


def _embedding(self: Any, input: Tensor) -> Tensor:
    """The forward of nn.Embedding."""
    if _is_compiling():  # a guard on the parameter would keep it from being replaced
        return nn.Embedding.forward(self, input)
    weight, rows = self._parameters.get("weight"), None
    if isinstance(weight, ReadOnCpu) and not (_function_modes() or tracer.active):
        rows = rows_of_embedding(input, weight, self.padding_idx, self.max_norm)
    return nn.Embedding.forward(self, input) if rows is None else rows


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

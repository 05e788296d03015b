"""Give a module a subclass of its class in place, and take it back.

Layers with low-bit weights multiply or read their weights in ways of their own. Each such way is a mixin, a subclass of
`StandIn`. `give` makes a subclass of the mixin and of the module's class, always the same one, and gives it to the
module. Several may be on top of each other, and `take` takes back any of them:

    frozen weights, for compiled graphs     `lowbit.layers.frozen`
    a prepared layer                        `lowbit.layers.prepared`
    experts with learned scales             `lowbit.layers.learned_experts`
    layers with the same bits everywhere    `lowbit.layers.invariant`
    LoRA in QAT                             `lowbit.qat.lora`
    LoRA in fewer passes                    `lowbit.layers.fused_lora`
    scales of cached keys and values        `lowbit.layers.cache_scales`
    a static scale of the input             `lowbit.layers.static_input`

The subclass has the name and the module of the class that it stands for. accelerate and PEFT find the class of a name,
"Linear", by the first module that has it, and then ask which modules are instances: these are all modules of the plain
class. Copies and pickles name the plain class and the mixins, since the subclass exists in this process alone.

`torch.nn.utils.parametrize` puts a class of its own on top of that of a module, and later takes the top one away. So
`give` and `take` work below it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize


class StandIn(nn.Module):
    """The base of the mixins."""

    @classmethod
    def members(cls, plain: type[nn.Module], names: tuple[str, ...]) -> dict[str, Any]:
        """What the subclass of `plain` defines besides. Args: those of `give`."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *others = reduced
        kind = next(kind for kind in type(self).__mro__ if kind in _GIVEN)
        given: list[tuple[type[StandIn], tuple[str, ...]]] = []
        while kind in _GIVEN:
            mixin, kind, names = _GIVEN[kind]
            given.insert(0, (mixin, names))
        args = tuple(kind if arg is type(self) else arg for arg in args)
        return _made_again, (make, args, given), *others


class _Given(NamedTuple):
    mixin: type[StandIn]
    plain: type[nn.Module]
    names: tuple[str, ...]


_GIVEN: dict[type, _Given] = {}
"""What each subclass was made of. Here and not in the subclass, whose modules have attributes of their own."""
_SUBCLASSES: dict[_Given, type[nn.Module]] = {}


def give(module: nn.Module, mixin: type[StandIn], names: tuple[str, ...] = ()) -> None:
    """Give `module` the subclass of its class that `mixin` makes.

    Args:
        module: changed in place, its class alone.
        mixin: the first base of the subclass.
        names: the parameters that the mixin serves, where it asks.

    Raises TypeError where Python makes no such subclass: a metaclass or an `__init_subclass__` wants more.
    """
    _set(module, _subclass(mixin, class_of(module), names))


def take(module: nn.Module, mixin: type[StandIn] = StandIn) -> None:
    """Take back what `give` gave for `mixin` and its subclasses. Where somebody else has put a class on top, as FSDP2
    does, the classes stay."""
    _set(module, without(class_of(module), mixin))


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module, below that of its parametrizations."""
    kind = type(module)
    is_on_top = kind.__module__ == parametrize.__name__ and parametrize.is_parametrized(module)
    return kind.__bases__[0] if is_on_top else kind


def without(kind: type[nn.Module], mixin: type[StandIn] = StandIn) -> type[nn.Module]:
    """The class that a module of class `kind` has after `take`."""
    if kind not in _GIVEN:
        return kind
    own, plain, names = _GIVEN[kind]
    below = without(plain, mixin)
    if issubclass(own, mixin):
        return below
    return kind if below is plain else _subclass(own, below, names)


def names_given(module: nn.Module, mixin: type[StandIn]) -> tuple[str, ...]:
    """The `names` that the module was given for `mixin`; none without it."""
    given = (_GIVEN[kind] for kind in type(module).__mro__ if kind in _GIVEN)
    return next((names for own, _, names in given if issubclass(own, mixin)), ())


def _set(module: nn.Module, kind: type[nn.Module]) -> None:
    below, top = class_of(module), type(module)
    if kind is below:
        return
    if below is not top:
        own = {k: v for k, v in vars(top).items() if k not in ("__dict__", "__weakref__")}
        meta: Any = type(kind)
        kind = meta(top.__name__, (kind,), own)
    object.__setattr__(module, "__class__", kind)


def _subclass(
    mixin: type[StandIn], plain: type[nn.Module], names: tuple[str, ...]
) -> type[nn.Module]:
    given = _Given(mixin, plain, names)
    if given not in _SUBCLASSES:
        members = mixin.members(plain, names)
        members |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
        members["__doc__"] = plain.__doc__
        meta: Any = type(plain)
        if not issubclass(meta, _StandsFor):
            meta = _StandsFor if meta is type else type(meta.__name__, (_StandsFor, meta), {})
        kind = meta(plain.__name__, (mixin, plain), members)
        _GIVEN[kind] = given
        _SUBCLASSES[given] = kind
    return _SUBCLASSES[given]


class _StandsFor(type):
    """The class of the subclasses."""

    def __instancecheck__(cls, instance: Any) -> bool:
        given = _GIVEN.get(cls)
        return (
            super().__instancecheck__(instance)
            if given is None
            else isinstance(instance, given.plain)
        )


def _made_again(
    make: Any, args: tuple[Any, ...], given: list[tuple[type[StandIn], tuple[str, ...]]]
) -> nn.Module:
    module: nn.Module = make(*args)
    for mixin, names in given:
        give(module, mixin, names)
    return module

"""The entries of `module.state_dict()` for low-bit parameters, and how a state dict is loaded into them again.

| parameter `weight`                                    | in the state dict                                   |
|-------------------------------------------------------|-----------------------------------------------------|
| kept in high precision (QAT, mixed precision, BitNet) | `weight`, the plain high-precision tensor           |
| any other (int4, float8, int8 in training, …)         | its inner tensors: `weight.codes`, `weight.scale` … |
| a DTensor over one of these                           | the same names, DTensors                            |

All are plain tensors that share the parameter's memory. safetensors, torch.save and torch.distributed.checkpoint write
them, and a reader needs no lowbit. Tied parameters give tied tensors. The state dict's `_metadata` describes each one
(kind, shape, dtype, scheme) in JSON types. By this description loading refuses another scheme, and `joined` and
`lowbit.save` restore low-bit tensors. Views, and DTensors that their parts do not describe completely, stay whole.
`state_dict(keep_vars=True)` gives the parameters themselves.

A DTensor over a low-bit tensor is split into DTensors of its inner tensors. Each is placed so that this rank's part is
exactly the inner tensor of this rank's shard. An inner tensor that runs along the sharded dimension is sharded as the
parameter is. One that belongs to the whole dimension (one scale for all rows) is replicated.

torch's `get_model_state_dict` and `set_model_state_dict` give and take the same entries. They know parameters by their
own names, so torch itself fails in three cases:

- `StateDictOptions(ignore_frozen_params=True)` removes the entry `weight` of every frozen parameter. For a frozen
  low-bit weight torch raises KeyError. Instead drop the entries that begin with the names of frozen parameters.
- `broadcast_from_rank0=True` sends the entry `weight`, so it takes plain values: `value.dequantize().contiguous()`. The
  model quantizes them again. Parts, and whole low-bit tensors, need `full_state_dict=True` alone and the state dict on
  every rank. Whole low-bit tensors on rank 0 alone hang or abort: the other ranks receive them into plain memory.
- Strict loading into a module that `torch.compile` or DistributedDataParallel wraps raises "Missing key: ….weight".
  Load into the wrapped module, or with `strict=False`.

Two hooks on each module with a low-bit parameter do all this. torch's global hook on parameter registration adds them,
also where other code replaces the parameter, and removes them with the last low-bit parameter. A third hook, on every
wrapper of a module, puts the name of the wrapped module into the keys of parts.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local, placed_as
from lowbit.tensor.core.parts import (
    encoded,
    gathered,
    holds,
    is_plain_for,
    join,
    share_over_ranks,
    split,
)
from lowbit.tensor.core.torchscript import PREPARE, refuse_script

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TRANSPOSED = ".mT"
"""The end of the kind of a tensor whose parts are those of its transpose. Older releases refuse such a kind."""
METADATA = "lowbit"
"""The key of a module's descriptions in its entry of a state dict's `_metadata`."""
_LOAD = nn.Module.load_state_dict.__code__
_NO_PARTS = (
    "some low-bit weights keep their values: this rank's state dict has no parts of them. broadcast_from_rank0=True "
    "sends parameters by their own names only; accepted: full_state_dict=True without it and the parts on every rank, "
    "or plain values, value.dequantize().contiguous()"
)


def describe(value: Tensor) -> dict[str, Any]:
    """The description of a low-bit tensor, or of a DTensor over one, in JSON types."""
    own = local(value)
    is_transposed = own.transposed and not own.is_stored_plain
    return {
        "kind": type(own).__name__ + (_TRANSPOSED if is_transposed else ""),
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        **own._with(shape=tuple(value.shape)).meta_to_json(),
    }


# ---- state_dict() ------------------------------------------------------------------------------------------------


def hand_out(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """The hook after `state_dict`: replaces low-bit parameters by plain tensors, and describes them in `metadata`."""
    for name, param in module._parameters.items():
        if is_dtensor(param):
            _let_parts_be_found(param)
        value = state_dict.get(prefix + name)
        own = local(value)
        # keep_vars=True asks for the parameters themselves
        if not isinstance(own, LowbitTensor) or isinstance(value, nn.Parameter):
            continue
        assert isinstance(value, Tensor)
        with torch.no_grad():
            plain = own.updated_in_place()
            parts = None if plain is not None else split(value)
            if plain is not None:
                state_dict[prefix + name] = placed_as(value, plain.detach())
            elif parts is not None:
                _replace(state_dict, prefix + name, parts)
                for follow in readers:
                    follow()
        if own.is_describable and (plain is not None or parts is not None):
            metadata.setdefault(METADATA, {})[name] = describe(value)


def _let_parts_be_found(param: DTensor) -> None:
    """Give a DTensor an attribute for each part of the low-bit tensor that it holds.

    `get_model_state_dict` follows each key of the state dict by getattr, `weight` and then `codes`, and ignores the
    value. None keeps no memory alive, and code that asks for such attributes sees none.
    """
    own = held_locally(param)
    if isinstance(own, LowbitTensor) and not own.is_stored_plain:
        for part in own.tensor_attrs:
            if not hasattr(param, part):
                setattr(param, part, None)


def _replace(state_dict: dict[str, Any], key: str, parts: Mapping[str, Tensor]) -> None:
    """Replace `key`, one of the last, by `key.codes` … at its position."""
    after = []
    while (last := state_dict.popitem())[0] != key:
        after.append(last)
    state_dict.update({f"{key}.{part}": t for part, t in parts.items()})
    state_dict.update(reversed(after))


# ---- loading ----------------------------------------------------------------------------------------------------


def take(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """The hook before loading: joins parts to one low-bit tensor, finds the learned scales that a plain model's state
    dict lacks, and converts plain values that are to be assigned.

    Args: those of `nn.Module.register_load_state_dict_pre_hook`'s hooks.
    """
    assign = bool(metadata.get("assign_to_params_buffers"))
    with torch.no_grad():
        for name, param in module._parameters.items():
            key = prefix + name
            if param is None or not isinstance(local(param), LowbitTensor):
                continue
            if not local(param).is_stored_plain:
                take_parts(param, key, state_dict, described(metadata, name), assign, errors)
                if key not in state_dict:
                    missing += [f"{key}.{part}" for part in local(param).inner_tensors()]
                    state_dict[key] = _itself(param)  # else torch reports this name too
                elif (
                    not assign
                    and is_plain_for(param, value := state_dict[key])
                    and share_over_ranks(param)
                    and not holds(param, value)
                ):
                    take_values(param, key, state_dict, gathered(value), errors)
            else:
                own = local(param)
                entry = described(metadata, name)
                try:
                    beside = own.entries_beside(module, name, state_dict, prefix, entry, assign)
                    state_dict.update(beside)
                except ValueError as error:
                    errors.append(str(error))
            if assign:
                _take_plain(param, key, state_dict)


def described(metadata: Mapping[str, Any], name: str) -> Any:
    """The description of parameter `name` in a module's entry of `_metadata`, or None."""
    return (metadata.get(METADATA) or {}).get(name)


def take_parts(
    param: Tensor, key: str, state_dict: dict[str, Any], entry: Any, assign: bool, errors: list[str]
) -> None:
    """Replace the parts of `param` in the state dict, if there are any, by `state_dict[key]`, a tensor like `param`.

    Args:
        param: the low-bit parameter of the model, whole or a DTensor.
        key: its name in the state dict; its parts are `key.codes` and so on.
        state_dict: changed in place.
        entry: the description that was saved with the parts, or None.
        assign: True if the model gets the tensor itself, which then keeps the dtypes of its parts.
        errors: gets each misfit. `param` then stays unchanged.
    """
    own, shape = local(param), tuple(param.shape)
    given = {
        part: state_dict.pop(f"{key}.{part}")
        for part in own.tensor_attrs
        if f"{key}.{part}" in state_dict
    }
    value = state_dict.get(key)
    try:
        is_whole = isinstance(local(value), LowbitTensor) and not _is_plain_kind(key, entry)
        if entry is not None and (given or is_whole):
            check_described(param, key, entry)
        if not given:
            # set_model_state_dict filled in param itself; rank 0 sends in a broadcast, and has the parts
            if value is param and dist.is_initialized() and dist.get_rank() > 0:
                warnings.warn(_NO_PARTS, stacklevel=2)
            return
        if entry is not None and read_description(key, entry)[2] != shape:
            raise ValueError(
                f"size mismatch for {key}: it has shape {read_description(key, entry)[2]}, the model has one of {shape}"
            )
        if value is not None and not isinstance(value, nn.Parameter):  # those are the model's own
            raise ValueError(f"{key} is given whole and in parts, {key}.{next(iter(given))}")
        joined = join(param, given, key, keep_dtypes=not assign)
        state_dict[key] = _in_dtype_of(joined, entry) if assign else joined
    except ValueError as error:
        errors.append(str(error))
        state_dict[key] = _itself(param)


def take_values(
    param: Tensor,
    key: str,
    state_dict: dict[str, Any],
    whole: Tensor,
    errors: list[str],
    joint: Tensor | None = None,
) -> None:
    """Make plain values the entry of `param` in the state dict.

    Args:
        param: the low-bit parameter of the model.
        key: its name in the state dict.
        state_dict: changed in place.
        whole, joint: as for `encoded`.
        errors: gets a misfit. `param` then stays unchanged.
    """
    try:
        state_dict[key] = encoded(param, whole, key, joint)
    except ValueError as error:
        errors.append(f"{key}: {error}")
        state_dict[key] = _itself(param)


def take_into_wrapped(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """The hook before a wrapper loads: parts get the name of the wrapped module into their keys.

    `set_model_state_dict` adds this name to the keys of parameters, and so not to those of their parts. A state dict in
    which no key has this name is left alone, unless it holds nothing but parts.
    """
    ((name, wrapped),) = wrapper._modules.items()
    if wrapped is None:
        return
    inner = f"{prefix}{name}."
    parts = [key for key in _keys_of_parts(wrapped, prefix) if key in state_dict]
    keys = [key for key in state_dict if key.startswith(prefix)]
    if len(parts) == len(keys) or any(key.startswith(inner) for key in keys):
        for key in parts:
            state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)


def _keys_of_parts(module: nn.Module, prefix: str) -> Iterator[str]:
    """The keys of the parts of all low-bit parameters, without the names that wrappers add."""
    for name, param in module._parameters.items():
        own = None if param is None else held_locally(param)
        if isinstance(own, LowbitTensor) and not own.is_stored_plain:
            yield from (f"{prefix}{name}.{part}" for part in own.tensor_attrs)
    for name, child in module._modules.items():
        if child is not None:
            yield from _keys_of_parts(child, prefix if _is_wrapper(module) else f"{prefix}{name}.")


def _is_wrapper(module: nn.Module) -> bool:
    """True if `torch.compile` or DistributedDataParallel made the module around another."""
    # the name of OptimizedModule's child: importing the class would import the compiler
    return "_orig_mod" in module._modules or isinstance(module, DistributedDataParallel)


def _itself(param: Tensor) -> Tensor:
    """The value of `param` that loads without a change: the very object, so that assigning keeps it. torch refuses to
    swap an object for itself, so then an alias."""
    return param.detach() if torch.__future__.get_swap_module_params_on_conversion() else param


def _in_dtype_of(value: Tensor, entry: Any) -> Tensor:
    if entry is None:
        return value
    return placed_as(value, local(value)._with(dtype=read_description("", entry)[3]))


def read_description(
    key: str, entry: Any
) -> tuple[type[LowbitTensor], dict[str, Any], tuple[int, ...], torch.dtype]:
    """Kind, metadata, shape and dtype of what `describe` gave. Raises ValueError for anything else."""
    kinds = LowbitTensor.kinds
    name = str(entry.get("kind")) if isinstance(entry, dict) else ""
    if name.removesuffix(_TRANSPOSED) not in kinds:
        raise ValueError(
            f"{key} is described as {entry!r}, of unknown kind, which this lowbit cannot read; known: "
            f"{', '.join(kinds)}; it may come from a newer one"
        )
    try:
        kind, dtype = kinds[name.removesuffix(_TRANSPOSED)], getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype {dtype}")
        meta = kind.meta_from_json(entry)
        if name.endswith(_TRANSPOSED):
            if "transposed" not in kind.meta_attrs or kind.is_stored_plain:
                raise ValueError(f"a {kind.__name__} is not stored transposed")
            meta["transposed"] = True
        return kind, meta, tuple(map(int, entry["shape"])), dtype
    except (ArithmeticError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{key} is described as {entry!r}, which this lowbit cannot read: {error!r}"
        ) from error


def _is_plain_kind(key: str, entry: Any) -> bool:
    """True for a description of plain values, of which a hook before this one may have made a low-bit weight."""
    return entry is not None and read_description(key, entry)[0].is_stored_plain


def check_described(param: Tensor, key: str, entry: Any) -> None:
    """Raise ValueError unless a tensor of this description is stored as `param` is."""
    own = local(param)
    like = own._with(shape=tuple(param.shape))
    kind, meta, shape, dtype = read_description(key, entry)
    found = kind.from_inner(own.inner_tensors(), meta, shape, dtype)
    if not like._is_stored_like(found):
        raise ValueError(
            f"{key} is {found!r} in the state dict and {like!r} in the model: they are stored differently; prepare the "
            "model by the same scheme, or replace its tensors: load_state_dict(lowbit.tensor.joined(state_dict), "
            "assign=True)"
        )


def _take_plain(param: nn.Parameter, key: str, state_dict: dict[str, Any]) -> None:
    """With assign=True a plain tensor would replace a weight that trains; the weight takes its values instead."""
    value, own = state_dict.get(key), local(param)
    given = local(value)
    if not isinstance(value, Tensor) or isinstance(given, LowbitTensor):
        return
    if value.shape != param.shape:  # load_state_dict reports it
        return
    made = own.over(given)
    if made is not None:
        state_dict[key] = placed_as(value, made)
    else:
        warnings.warn(
            f"load_state_dict(assign=True) puts plain tensors in place of low-bit weights, such as {key}, which are in "
            "high precision from now on. To quantize the values load them without assign=True",
            stacklevel=2,
        )


# ---- from a state dict back to low-bit tensors ------------------------------------------------------------------


def joined(state_dict: Mapping[str, Any], model: nn.Module | None = None) -> dict[str, Any]:
    """A module's state dict with low-bit tensors in place of the plain ones that its `_metadata` describes.

    A model that was not prepared takes it by `load_state_dict(joined(state_dict), assign=True)`. Entries that were
    renamed or removed since are left alone. torch's `get_model_state_dict` drops the descriptions; give the `model`
    then, sharded or not, which has them.

    Raises TypeError for anything but a state dict, and ValueError for parts that are missing or misshapen, or a
    description that cannot be read.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"joined takes a module's state dict, got {type(state_dict).__name__}")
    described = state_dict if model is None else model.state_dict()
    entries = {
        f"{prefix}.{name}" if prefix else name: entry
        for prefix, metadata in getattr(described, "_metadata", {}).items()
        for name, entry in metadata.get(METADATA, {}).items()
    }
    made: dict[str, Tensor] = {}
    owners: dict[str, str] = {}
    for key, entry in entries.items():
        kind, meta, shape, dtype = read_description(key, entry)
        names = {part: f"{key}.{part}" for part in kind.tensor_attrs}
        if kind.is_stored_plain:
            names = {"weight": key}
        given = {part: state_dict[name] for part, name in names.items() if name in state_dict}
        if not given or any(isinstance(local(t), LowbitTensor) for t in given.values()):
            continue
        if any(is_dtensor(t) for t in given.values()):
            raise ValueError(
                f"{key} is sharded: save it with torch.distributed.checkpoint, or gather its parts first, by "
                "full_tensor()"
            )
        like = kind.from_inner(given, meta, shape, dtype)
        made[key] = join(like, given, key, keep_dtypes=False)
        owners.update(dict.fromkeys(names.values(), key))
    found: dict[str, Any] = {}
    for name, value in state_dict.items():
        key = owners.get(name, name)
        found[key] = made.get(key, value)
    return found


# ---- registration of the hooks -----------------------------------------------------------------------------------


followers: list[Callable[[nn.Module], None]] = []
"""Called with the model at the end of a `load_state_dict` that put a low-bit parameter in the place of a plain one, and
of each later one."""
readers: list[Callable[[], None]] = []
"""Called while a module hands out the parts of a low-bit parameter."""


def register(module: nn.Module) -> None:
    """Add the hooks, once a module, however many of its parameters are low-bit."""
    if hand_out not in module._state_dict_hooks.values():
        _follow_load()
        module.register_state_dict_post_hook(hand_out)
        module.register_load_state_dict_pre_hook(take)
        module.__dict__[PREPARE] = refuse_script


def _follow_load() -> None:
    """Have `followers` called with the model that is being loaded, if one is. `load_state_dict(…, assign=True)` puts
    low-bit weights in the place of plain ones, and torch tells only each module, not the model."""
    model: Any = None
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code is _LOAD:
            model = frame.f_locals["self"]
    if model is not None and _loaded not in model._load_state_dict_post_hooks.values():
        model.register_load_state_dict_post_hook(_loaded)


def _loaded(model: nn.Module, keys: Any) -> None:
    for follow in followers:
        follow(model)


def unregister(module: nn.Module) -> None:
    module.__dict__.pop(PREPARE, None)
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for number, hook in list(hooks.items()):
            if is_ours(hook):
                del hooks[number]


def is_ours(hook: Any) -> bool:
    """True if `hook` is one of the two hooks of every module with a low-bit parameter."""
    return getattr(hook, "hook", hook) in (hand_out, take)


def _follow(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """torch calls this for every parameter that any module is given, so it must be fast."""
    if isinstance(held_locally(param), LowbitTensor):
        register(module)
    elif hand_out in module._state_dict_hooks.values():
        others = (p for other, p in module._parameters.items() if other != name)
        if not any(isinstance(held_locally(p), LowbitTensor) for p in others):
            unregister(module)


def _follow_wrapper(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """torch calls this for every module that any module is given. A wrapper gets the hook `take_into_wrapped`, once:
    parameters may become low-bit later."""
    if submodule is None or not (
        name == "_orig_mod" or isinstance(module, DistributedDataParallel)
    ):
        return
    hooks = module._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", hook) is take_into_wrapped for hook in hooks):
        module.register_load_state_dict_pre_hook(take_into_wrapped)


register_module_parameter_registration_hook(_follow)
register_module_module_registration_hook(_follow_wrapper)

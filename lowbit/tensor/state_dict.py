"""What `module.state_dict()` hands out for low-bit parameters, and how a state dict is loaded into them again.

| parameter `weight`                                    | in the state dict                                   |
|-------------------------------------------------------|-----------------------------------------------------|
| kept in high precision (QAT, mixed precision, BitNet) | `weight`, the plain high-precision tensor           |
| any other (int4, float8, `Int8Weight`, …)             | its inner tensors: `weight.codes`, `weight.scale` … |
| a DTensor over one of these                           | the same names, DTensors (`lowbit.tensor.parts`)    |

All are plain tensors that share the parameter's memory. safetensors, torch.save and torch.distributed.checkpoint write
them, and a reader needs no lowbit. Tied parameters give tied tensors. The state dict's `_metadata` describes each one
(kind, shape, dtype, scheme) in JSON types. By this description loading refuses another scheme, and `joined` and
`lowbit.save` make low-bit tensors again. Views and DTensors whose parts would not say all are handed out whole, and
`state_dict(keep_vars=True)` gives the parameters themselves.

`get_model_state_dict` and `set_model_state_dict` of torch address a parameter by its own name only. They look up every
key among the parameters, and skip frozen ones by their names. So low-bit tensors are handed to them whole.

Two hooks on each module that has a low-bit parameter do this. torch's global hook on parameter registration adds them,
so that it does not matter who replaces the parameter, and removes them when the last low-bit parameter has gone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from lowbit.tensor.affine_tensor import AffineTensor
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.codebook_tensor import CodebookTensor
from lowbit.tensor.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.float8_tensor import Float8Tensor
from lowbit.tensor.int8_weight import Int8WeightTensor
from lowbit.tensor.parts import join, local, placed_as, split
from lowbit.tensor.plain_destination import caller_of
from lowbit.tensor.ternary import TernaryTensor
from lowbit.tensor.trainable import TrainableTensor

KINDS: dict[str, type[LowbitTensor]] = {
    c.__name__: c
    for c in (
        *(AffineTensor, Float8Tensor, FakeQuantizedTensor, CodebookTensor),
        *(Int8WeightTensor, TernaryTensor),
    )
}
"""The classes that a description may name. The state of mixed precision and BitNet weights is that of a plain model."""

METADATA = "lowbit"
"""The key of a module's descriptions in its entry of a state dict's `_metadata`."""


def describe(value: Tensor) -> dict[str, Any]:
    """A low-bit tensor, or a DTensor over one, in JSON types."""
    own = local(value)
    return {
        "kind": type(own).__name__,
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        **own._with(shape=tuple(value.shape)).meta_to_json(),
    }


# ---- handing out ------------------------------------------------------------------------------------------------


def hand_out(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """The hook after `state_dict`."""
    hand_out_names(module._parameters, state_dict, prefix, metadata)


def hand_out_names(
    names: Iterable[str], state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Replace the low-bit tensors of these names by plain ones, and describe them in `metadata`."""
    whole = _caller("_get_model_state_dict") is not None
    for name in names:
        value = state_dict.get(prefix + name)
        own = local(value)
        # parameters themselves, as keep_vars=True gives them, stay
        if not isinstance(own, LowbitTensor) or isinstance(value, nn.Parameter):
            continue
        assert isinstance(value, Tensor)
        with torch.no_grad():
            plain = own.updated_in_place()
            parts = None if whole or plain is not None else split(value)
            if plain is not None:
                state_dict[prefix + name] = placed_as(value, plain.detach())
            elif parts is not None:
                _replace(state_dict, prefix + name, parts)
        if type(own).__name__ in KINDS and (plain is not None or parts is not None):
            metadata.setdefault(METADATA, {})[name] = describe(value)


def _replace(state_dict: dict[str, Any], key: str, parts: Mapping[str, Tensor]) -> None:
    """`key` by `key.codes` … at its place, which is among the last ones."""
    after = []
    while (last := state_dict.popitem())[0] != key:
        after.append(last)
    state_dict.update({f"{key}.{part}": t for part, t in parts.items()})
    state_dict.update(reversed(after))


def _caller(function: str) -> FrameType | None:
    """The frame of this function of torch.distributed.checkpoint.state_dict, where it calls."""
    name = "torch.distributed.checkpoint.state_dict"
    return caller_of(sys._getframe(1), name, function) if name in sys.modules else None


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
    """The hook before loading: parts become one low-bit tensor; plain values that are to be assigned take its form."""
    assign = bool(metadata.get("assign_to_params_buffers"))
    with torch.no_grad():
        for name, param in module._parameters.items():
            key = prefix + name
            if param is None or not isinstance(local(param), LowbitTensor):
                continue
            if not isinstance(local(param), TrainableTensor):
                take_parts(param, key, state_dict, described(metadata, name), assign, errors)
                if key not in state_dict:
                    missing += [f"{key}.{part}" for part in local(param).inner_tensors()]
                    state_dict[key] = _itself(param)  # so that it is missing by these names alone
            if assign:
                _take_plain(param, key, state_dict)


def described(metadata: Mapping[str, Any], name: str) -> Any:
    """What a module's entry of `_metadata` says of its parameter `name`, or None."""
    return (metadata.get(METADATA) or {}).get(name)


def take_parts(
    param: Tensor,
    key: str,
    state_dict: dict[str, Any],
    entry: Any,
    assign: bool,
    errors: list[str],
) -> None:
    """Put `state_dict[key]`, a tensor like `param`, in place of its parts, if they are given. `entry` describes it.

    What does not fit is told in `errors`, and `param` stays as it is.
    """
    own, shape = local(param), tuple(param.shape)
    given = {
        part: state_dict.pop(f"{key}.{part}")
        for part in own.tensor_attrs
        if f"{key}.{part}" in state_dict
    }
    value = state_dict.get(key)
    try:
        if entry is not None and (given or isinstance(local(value), LowbitTensor)):
            check_described(param, key, entry)
        if not given:
            return
        if entry is not None and _read(key, entry)[2] != shape:
            raise ValueError(
                f"size mismatch for {key}: it has shape {_read(key, entry)[2]}, the model has one of {shape}"
            )
        if value is not None and value is not param:  # set_model_state_dict gives param beside them
            raise ValueError(f"{key} is given whole and in parts, {key}.{next(iter(given))}")
        caller = _caller("_load_model_state_dict")
        info = None if caller is None else caller.f_locals.get("info")
        if getattr(info, "broadcast_from_rank0", False):
            raise ValueError(
                f"{key}.{next(iter(given))} with broadcast_from_rank0=True, which sends parameters by their own names "
                "only; accepted: the parts on every rank, without it, or what get_model_state_dict gives"
            )
        joined = join(param, given, key, keep_dtypes=not assign)
        state_dict[key] = _in_dtype_of(joined, entry) if assign else joined
    except ValueError as error:
        errors.append(str(error))
        state_dict[key] = _itself(param)


def _itself(param: Tensor) -> Tensor:
    """What loads as no change: an assigned parameter stays the same object. Swapping takes no object for itself."""
    return param.detach() if torch.__future__.get_swap_module_params_on_conversion() else param


def _in_dtype_of(value: Tensor, entry: Any) -> Tensor:
    if entry is None:
        return value
    return placed_as(value, local(value)._with(dtype=_read("", entry)[3]))


def _read(
    key: str, entry: Any
) -> tuple[type[LowbitTensor], dict[str, Any], tuple[int, ...], torch.dtype]:
    """Kind, metadata, shape and dtype of a description. Raises ValueError."""
    try:
        kind, dtype = KINDS[entry["kind"]], getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype {dtype}")
        return kind, kind.meta_from_json(entry), tuple(map(int, entry["shape"])), dtype
    except (ArithmeticError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{key} is described as {entry!r}, which this lowbit cannot read: {error!r}; kinds: {', '.join(KINDS)}"
        ) from error


def check_described(param: Tensor, key: str, entry: Any) -> None:
    """Raise ValueError unless a tensor of this description is stored as `param` is."""
    own = local(param)
    like = own._with(shape=tuple(param.shape))
    kind, meta, shape, dtype = _read(key, entry)
    found = kind.from_inner(own.inner_tensors(), meta, shape, dtype)
    if not like._is_stored_like(found):
        raise ValueError(
            f"{key} is {found!r} in the state dict and {like!r} in the model: they are stored differently; prepare the "
            "model by the same scheme, or replace its tensors: load_state_dict(lowbit.tensor.joined(state_dict), "
            "assign=True)"
        )


def _take_plain(param: nn.Parameter, key: str, state_dict: dict[str, Any]) -> None:
    """With assign=True plain tensors would take the place of weights that train; these take their values."""
    value, own = state_dict.get(key), local(param)
    given = local(value)
    if not isinstance(value, Tensor) or isinstance(given, LowbitTensor):
        return
    if value.shape != param.shape:  # load_state_dict tells of it
        return
    if isinstance(own, TrainableTensor):
        state_dict[key] = placed_as(value, own.over(given))
    elif isinstance(own, Int8WeightTensor):
        made = torch.empty_like(own, device=given.device if own.is_meta else None)
        state_dict[key] = placed_as(value, made.copy_(given))
    else:
        warnings.warn(
            f"load_state_dict(assign=True) puts plain tensors in place of low-bit weights, such as {key}, which are in "
            "high precision from now on. To quantize the values load them without assign=True",
            stacklevel=2,
        )


# ---- low-bit tensors of what was handed out ------------------------------------------------------------------------


def joined(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A module's state dict with low-bit tensors in place of the plain ones that its `_metadata` describes.

    It can be assigned to a model that was not prepared: `load_state_dict(joined(state_dict), assign=True)`. Entries
    that were renamed or taken out since are left as they are.

    Raises ValueError for parts that are missing or misshapen, or a description that cannot be read.
    """
    entries = {
        f"{prefix}.{name}" if prefix else name: entry
        for prefix, metadata in getattr(state_dict, "_metadata", {}).items()
        for name, entry in metadata.get(METADATA, {}).items()
    }
    made: dict[str, Tensor] = {}
    owners: dict[str, str] = {}
    for key, entry in entries.items():
        kind, meta, shape, dtype = _read(key, entry)
        names = {part: f"{key}.{part}" for part in kind.tensor_attrs}
        if issubclass(kind, TrainableTensor):
            names = {"weight": key}
        given = {part: state_dict[name] for part, name in names.items() if name in state_dict}
        if not given or any(isinstance(local(t), LowbitTensor) for t in given.values()):
            continue
        if any(isinstance(t, DTensor) for t in given.values()):
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


# ---- where the hooks come from -----------------------------------------------------------------------------------


def register(module: nn.Module) -> None:
    """Once a module, whichever of its parameters are low-bit, and since when."""
    if hand_out not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(hand_out)
        module.register_load_state_dict_pre_hook(take)


def unregister(module: nn.Module) -> None:
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for number, hook in list(hooks.items()):
            if is_ours(hook):
                del hooks[number]


def is_ours(hook: Any) -> bool:
    """Whether it is one of the two hooks that every module with a low-bit parameter has."""
    return getattr(hook, "hook", hook) in (hand_out, take)


def _follow(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """torch calls it for every parameter that any module is given."""
    own = getattr(
        param, "_local_tensor", param
    )  # itself, no alias: this runs for all modules of the process
    if isinstance(own, LowbitTensor):
        register(module)
    elif hand_out in module._state_dict_hooks.values():
        others = (p for other, p in module._parameters.items() if other != name)
        if not any(isinstance(local(p), LowbitTensor) for p in others):
            unregister(module)


register_module_parameter_registration_hook(_follow)

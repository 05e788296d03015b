"""Checkpoints in plain tensors: readable without lowbit, loadable by every later version.

A quantized tensor `layer.weight` is stored as `layer.weight.codes`, `layer.weight.scale` and, where it has one,
`layer.weight.zero_point`; plain tensors are stored unchanged. A small JSON text beside them describes them:

    {"format_version": 1,
     "tensors": {"layer.weight": {"kind": "AffineTensor", "shape": [N, K], "dtype": "bfloat16", …}},
     "ties": {"lm_head.weight": "embedding.weight"},      tensors that share memory, stored once
     "values": {…}, "metadata": {…},                      entries that are not tensors; the user's own
     "stored": {"layer.weight.codes": {"dtype": "uint8", "shape": [N, K / 2], "sha256": "…"}, …}}

A `*.safetensors` file keeps that text in its own metadata under "lowbit", and the text's SHA-256 under "lowbit_sha256".
`lowbit.tensor.frozen.affine_tensor` describes the layout of codes. The kind "AffineTensor.mT" has the parts of the
transpose, as of experts that a model stores as [experts, inputs, outputs].

The digests are those of the bytes in the file, even if another thread changes a tensor while it is saved. Loading a
damaged file raises an error that names the damaged tensors. Hashing takes 0.6 s a GB and core.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.files import container
from lowbit.files.container import CheckpointError
from lowbit.files.memory import is_short_memory
from lowbit.numerics.settings import check_flag
from lowbit.numerics.sharded import is_dtensor
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.state_dict import describe, joined, read_description

FORMAT_VERSION = 1
_NESTED_STATES = (
    "An optimizer's state_dict has ints: save it with torch.save, or flattened by torch.distributed.checkpoint's "
    "get_optimizer_state_dict"
)
Plain = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors by name, and the JSON beside them."""


def identity(t: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that view the same memory in the same way."""
    if isinstance(t, LowbitTensor):
        inner = tuple(identity(part) for part in t.inner_tensors().values())
        return (type(t), inner, tuple(t.shape), t.dtype, *t.meta().values())
    return (t.data_ptr(), t.dtype, tuple(t.shape), t.stride(), t.device) if t.numel() else (id(t),)


def to_plain(state_dict: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> Plain:
    """Plain contiguous tensors by name, and the JSON-able description, of a flat state dict.

    Different views of one memory are stored separately, so a slice takes only its own size. Tuples become lists.

    Raises CheckpointError for a DTensor, a sparse or meta tensor, a flattened view, a name that is taken, or a
    value that is neither a tensor nor plain JSON.
    """
    tensors: dict[str, Tensor] = {}
    info: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "tensors": {},
        "ties": {},
        "values": {},
    }
    seen: dict[tuple[Any, ...], str] = {}
    try:
        state_dict = joined(state_dict)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    for name, value in state_dict.items():
        if not isinstance(name, str):
            raise CheckpointError(f"names must be str, got {name!r}; flatten the state dict first")
        if not isinstance(value, Tensor):
            info["values"][name] = _plain_json(name, value, _NESTED_STATES)
            continue
        _check_dense(name, value)
        first = seen.setdefault(identity(value), name)
        if first != name:
            info["ties"][name] = first
        elif isinstance(value, LowbitTensor):
            info["tensors"][name] = _describe(name, value)
            # Absent parts count too: a reader would take a tensor of that name for the part.
            for part in value.tensor_attrs:
                if f"{name}.{part}" in state_dict:
                    raise CheckpointError(
                        f"{name}.{part} would be taken for a part of {name}; rename it"
                    )
            for part, inner in value.inner_tensors().items():
                _put(tensors, f"{name}.{part}", inner)
        else:
            _put(tensors, name, value)
    if not isinstance(metadata, Mapping | None):
        raise CheckpointError(f"metadata must be a dict, got {metadata!r}")
    info["metadata"] = _plain_json("metadata", metadata or {}, "Use str(key)")
    return unshared(tensors), info


def _check_dense(name: str, value: Tensor) -> None:
    if is_dtensor(value):
        raise CheckpointError(
            f"{name} is a DTensor: save shards with torch.distributed.checkpoint, or gather the state dict first "
            "(get_model_state_dict with full_state_dict=True)"
        )
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise CheckpointError(
            f"{name} is a {value.layout} tensor of {value.dtype} on {value.device}; only dense tensors with data can "
            "be saved: convert it with .to_dense() or .dequantize(), or load the values of a tensor on meta; "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True) loads those that accelerate offloads"
        )


def _put(tensors: dict[str, Tensor], name: str, t: Tensor) -> None:
    if name in tensors:
        raise CheckpointError(f"two tensors would be stored as {name}; rename one")
    tensors[name] = t.detach().resolve_conj().resolve_neg().contiguous()


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each in separate memory of its own size; copies only where necessary."""
    found, taken = {}, set()
    for name, t in tensors.items():
        storage = t.untyped_storage()
        if storage.nbytes() != t.nbytes or storage.data_ptr() in taken:
            t = t.clone()
        elif t.numel():
            taken.add(storage.data_ptr())
        found[name] = t
    return found


_MOST_LEVELS = 100
_MOST_BITS = 14_000
"""Bits of the largest int: Python's JSON writes and reads up to 4,300 digits."""


def _plain_json(name: str, value: Any, way_out: str, levels: int = 0) -> Any:
    """`value` as dicts, lists and scalars. Raises CheckpointError with the path of a value that JSON cannot hold."""
    if levels > _MOST_LEVELS:
        raise CheckpointError(
            f"{name[:40]}… is nested more than {_MOST_LEVELS} levels deep, or holds itself; accepted: fewer levels"
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(
                    f"{name} has the key {key!r}, of type {type(key).__name__}; JSON has only str keys. {way_out}"
                )
        return {
            key: _plain_json(f"{name}.{key}", item, way_out, levels + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _plain_json(f"{name}[{i}]", item, way_out, levels + 1) for i, item in enumerate(value)
        ]
    if isinstance(value, Tensor):
        raise CheckpointError(
            f"{name} is a tensor, where only plain JSON is stored: flatten a nested dict of tensors, or store numbers, "
            "value.tolist()"
        )
    if not isinstance(value, str | int | float | None):
        raise CheckpointError(
            f"{name} is a {type(value).__name__}, which is neither a tensor nor plain JSON; "
            "use torch.save for such objects, and flatten a nested dict of tensors"
        )
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise CheckpointError(
            f"{name} is an int of {value.bit_length()} bits; accepted: up to {_MOST_BITS} bits. Write it as text, "
            "hex(value)"
        )
    return value


def _describe(name: str, t: LowbitTensor) -> dict[str, Any]:
    if not t.is_describable:
        raise CheckpointError(
            f"{name} is a {type(t).__name__}; the format knows {', '.join(LowbitTensor.kinds)}"
        )
    if t.flat_from is not None or (t.transposed and t.is_stored_plain):
        raise CheckpointError(
            f"{name} is a transposed or flattened view of a quantized tensor; save the original"
        )
    return describe(t)


def from_plain(tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict that `to_plain` stored, from its tensors and its description.

    Raises CheckpointError for another version, an unknown kind, or a missing or misshapen part.
    """
    _check_version(info)
    tensors = dict(tensors)
    for section in ("tensors", "ties", "values"):
        if not isinstance(info.get(section), dict):
            raise CheckpointError(f"its description has no {section!r}, or a damaged one")
    state_dict: dict[str, Any] = {
        name: _assemble(name, entry, tensors) for name, entry in info["tensors"].items()
    }
    state_dict.update(tensors)
    state_dict.update(info["values"])
    for name, first in info["ties"].items():
        if str(first) not in state_dict:
            raise CheckpointError(f"{name} is tied to {first}, which is missing")
        state_dict[name] = state_dict[first]
    return state_dict


def _assemble(name: str, entry: Any, tensors: dict[str, Tensor]) -> LowbitTensor:
    """The tensor that `entry` describes. Removes its parts from `tensors`."""
    try:
        kind, meta, shape, dtype = read_description(name, entry)
        inner = {part: tensors.pop(f"{name}.{part}", None) for part in kind.tensor_attrs}
        if all(part is None for part in inner.values()):
            raise ValueError(f"{name} has none of its parts {', '.join(kind.tensor_attrs)}")
        t = kind.from_inner(inner, meta, shape, dtype)
        t.check_parts()
    except (
        *(ArithmeticError, LookupError, ValueError),
        *(TypeError, AttributeError, RuntimeError),
    ) as error:
        if is_short_memory(error):
            raise
        why = error if isinstance(error, ValueError) else repr(error)
        raise CheckpointError(f"{name} cannot be put together again: {why}") from error
    return t


def _check_version(info: Mapping[str, Any]) -> None:
    version = info.get("format_version")
    if version != FORMAT_VERSION or type(version) is not int:
        way_out = ": upgrade it" if type(version) is int and version > FORMAT_VERSION else ""
        raise CheckpointError(
            f"the checkpoint has format version {version!r}; this lowbit reads version {FORMAT_VERSION}{way_out}"
        )


def save(
    model: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a state dict to a file, which appears whole or not at all, once its bytes are on the disk.

    Args:
        model: a module, or a flat state dict.
        path: ends in .safetensors.
        metadata: any JSON (str keys; NaN and infinities as Python writes them); `load_metadata` returns it.

    Raises:
        CheckpointError: an entry that the file cannot hold; see `to_plain`.
        OSError: the system refuses to write, for example because the disk is full. The message names `path`.
    """
    path = Path(path)
    container.check_suffix(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a folder; make it first")
    state_dict = model.state_dict() if isinstance(model, nn.Module) else model
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"save takes an nn.Module or a state dict, got {type(model).__name__}")
    tensors, info = to_plain(state_dict, metadata)
    container.write(path, tensors, info)


def load(
    path: str | os.PathLike[str], *, device: str | torch.device | None = "cpu", verify: bool = True
) -> dict[str, Any]:
    """The state dict that was saved; for a module, `model.load_state_dict(lowbit.load(path), assign=True)`.

    Args:
        path: a file that `lowbit.save` wrote.
        device: where the tensors go; None: to the CPU.
        verify: compare tensors with the digests that were saved. False takes milliseconds: values are read when they
            are used.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError, a ValueError: it is truncated, damaged (the error names the tensors), not lowbit's, or of a
            newer format version.
    """
    check_flag("verify", verify)
    tensors, info = container.read(Path(path), device, verify=verify)
    try:
        return from_plain(tensors, info)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def load_metadata(path: str | os.PathLike[str], *, verify: bool = True) -> dict[str, Any]:
    """The `metadata` that `save` was given. Reads no tensor. `path`, `verify` and errors are those of `load`."""
    check_flag("verify", verify)
    _, info = container.read(Path(path), "meta", with_tensors=False, verify=verify)
    _check_version(info)
    metadata = info.get("metadata")
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: its metadata is {metadata!r}, not a dict of names")
    return metadata

"""Lay the frozen weights of sibling linears side by side in memory, so that one product may read them all.

q, k and v multiply the same input. Where their codes and scales are slices of one tensor, `lowbit.hf.generate` and
graphs of torch.compile compute them in one launch. The modules, their parameters and state dicts stay as they are.

Each slice has a storage of its own. Tools that save models, such as safetensors and accelerate, take tensors of one
storage for tied ones, and would leave some out.

Memory that is moved, as by `model.to`, lies apart again until `lowbit.inference.freeze_`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.owners import find_owners, joined_name
from lowbit.convert.siblings import siblings
from lowbit.layers.frozen import is_frozen, share_product
from lowbit.tensor.core.base import LowbitTensor

DEVICES = ("cuda",)
"""Kinds of devices whose memory is laid out."""
ALIGNMENT = 16
"""Bytes: kernels read rows that begin at multiples of it."""


class Joint:
    """The inner tensors of several weights, joined along their rows. It lives as long as one of the weights."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors


_JOINTS: weakref.WeakValueDictionary[int, Joint] = weakref.WeakValueDictionary()
"""By the address of each slice."""


def lay_side_by_side(model: nn.Module) -> None:
    """Give the frozen weights of siblings on a GPU memory side by side, in place. One group is held twice meanwhile.

    Weights that are tied, that share scales among rows, or that are stored in different ways stay where they are.
    """
    owners = find_owners(model)
    for path, parent in model.named_modules():
        for names in siblings():
            parts = [getattr(parent, name, None) for name in names]
            weights: list[Any] = [getattr(m, "weight", None) for m in parts]
            weights = [w for w in weights if w is not None]
            if len(weights) < len(names) or not all(map(is_frozen, weights)):
                continue
            if weights[0].device.type not in DEVICES or any(
                len(owners[id(w)]) > 1 for w in weights
            ):
                continue
            biases: list[Any] = [getattr(m, "bias", None) for m in parts]
            if join_rows(weights) and all(type(b) is nn.Parameter for b in biases):
                _join_biases(biases)
            _share_product(parts, weights, biases, joined_name(_alike(path), "|".join(names)))


def _alike(path: str) -> str:
    """What the paths of layers alike have in common."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _share_product(parts: list[Any], weights: list[Any], biases: list[Any], path: str) -> None:
    """Let graphs of torch.compile have one product of these linears, where their weights and biases are joint."""
    first = weights[0]
    if not (hasattr(first, "joint") and all(map(first._has_input_of, weights))):
        return
    rows = _joint_rows(parts)
    if rows is None:
        return
    tensors, bias = rows
    joint = _joined(weights, tensors)
    modules = [weakref.ref(m) for m in parts]

    def is_whole() -> bool:
        now = [m for ref in modules if (m := ref()) is not None]
        found = _joint_rows(now) if len(now) == len(modules) else None
        if found is None or found[0].keys() != tensors.keys():
            return False
        pairs = [(t, tensors[name]) for name, t in found[0].items()]
        return found[1] is bias and all(a is b for a, b in pairs)

    share_product(parts, joint, bias, path, is_whole)


def _joined(weights: list[Any], tensors: dict[str, Tensor]) -> Any:
    """The weights as one, whose inner tensors with rows are `tensors`."""
    first = weights[0]
    shape = (sum(len(w) for w in weights), *first.shape[1:])
    return first._with({**first.inner_tensors(), **tensors}, shape)


def joint_weight(parts: list[nn.Module]) -> LowbitTensor | None:
    """The frozen weights of these linears as one, [sum of N, K], over the same memory; None where they do not lie side
    by side, in this order, or a linear has a bias."""
    rows = _joint_rows(parts) if all("weight" in m._parameters for m in parts) else None
    if rows is None or any(m._parameters.get("bias") is not None for m in parts):
        return None
    return _joined([m._parameters["weight"] for m in parts], rows[0])


def _joint_rows(parts: list[Any]) -> tuple[dict[str, Tensor], Tensor | None] | None:
    """The joint inner tensors of the weights of these linears, and their joint bias; None where a tensor has none."""
    weights = [m._parameters.get("weight") for m in parts]
    if not all(map(is_frozen, weights)) or len({(type(w), w._row_attrs()) for w in weights}) > 1:
        return None
    names = [name for name in weights[0]._row_attrs() if getattr(weights[0], name) is not None]
    found = {name: joint_of([getattr(w, name) for w in weights]) for name in names}
    biases = [m._parameters.get("bias") for m in parts]
    bias = None if biases[0] is None else joint_of(biases) if None not in biases else None
    if any(t is None for t in found.values()) or (bias is None) != all(b is None for b in biases):
        return None
    return {name: t for name, t in found.items() if t is not None}, bias


@torch.no_grad()
def join_rows(weights: list[Any]) -> bool:
    """Give these weights inner tensors that are slices of joint ones. False where they can't be, or are already."""
    first = weights[0]
    for w in weights:
        alike = w.dim() == 2 and w.shape[1] == first.shape[1] and w.device == first.device
        alike = alike and w.dtype == first.dtype and first._is_stored_like(w)
        if not alike or w.transposed or not has_scales_of_rows(w):
            return False
    rows = [name for name in first._row_attrs() if getattr(first, name) is not None]
    parts = {name: [getattr(w, name) for w in weights] for name in rows}
    if any(t.is_inference() or not t.is_contiguous() for each in parts.values() for t in each):
        return False
    if any(t.nbytes % ALIGNMENT for each in parts.values() for t in each[:-1]):
        return False
    if all(joint_of(each) is not None for each in parts.values()):
        return False
    joint = Joint({name: torch.cat(each) for name, each in parts.items()})
    slices = {
        name: _split(joint.tensors[name], [len(t) for t in each]) for name, each in parts.items()
    }
    for i, w in enumerate(weights):
        own = {name: slices[name][i] for name in rows}
        w._take_over(w._with({**w.inner_tensors(), **own}))
        _keep(joint, w, own.values())
    return True


def _join_biases(biases: list[Any]) -> None:
    alike = {(b.dtype, b.device, b.requires_grad) for b in biases}
    if alike != {(biases[0].dtype, biases[0].device, False)}:
        return
    if any(b.nbytes % ALIGNMENT for b in biases[:-1]):
        return
    joint = Joint({"bias": torch.cat(biases)})
    for b, own in zip(biases, _split(joint.tensors["bias"], [len(b) for b in biases]), strict=True):
        b.data = own
        _keep(joint, b, [own])


def _keep(joint: Joint, owner: Any, slices: Any) -> None:
    owner.joint = joint
    for t in slices:
        _JOINTS[t.data_ptr()] = joint


def _split(t: Tensor, rows: list[int]) -> list[Tensor]:
    """Slices along dimension 0, over the same memory, each with a storage of its own."""
    return [torch.from_dlpack(part.view(torch.uint8)).view(part.dtype) for part in t.split(rows)]


def holder_of(part: Tensor) -> Joint | None:
    """What a slice belongs to."""
    return _JOINTS.get(part.data_ptr())


def joint_of(parts: list[Tensor]) -> Tensor | None:
    """The tensor of which these are the slices, all of them and in order, or None."""
    holder = holder_of(parts[0])
    if holder is None:
        return None
    for t in holder.tensors.values():
        at = t.data_ptr()
        for part in parts:
            is_next = part.data_ptr() == at and part.dtype == t.dtype and part.is_contiguous()
            if not is_next or part.shape[1:] != t.shape[1:]:
                break
            at += part.nbytes
        else:
            if at == t.data_ptr() + t.nbytes:
                return t
    return None


def has_scales_of_rows(weight: LowbitTensor) -> bool:
    """True if no two rows share a scale, so that the rows of several weights can be joined and split anywhere."""
    own = getattr(weight, "spec", None)
    if own is not None and own.shares_rows:
        return False
    of_input = weight._of_input() if hasattr(weight, "_of_input") else {}
    return weight._row_attrs() == tuple(n for n in weight.inner_tensors() if n not in of_input)

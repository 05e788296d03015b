"""Lay the frozen weights of sibling linears side by side in memory, so that one product may read them all.

q, k and v multiply the same input. Where their codes and scales are slices of one tensor, `lowbit.hf.generate` computes
them in one launch. The modules, their parameters and state dicts stay as they are. `lowbit.inference.fuse_linears_`
does more: it joins the modules, so that eager code and torch.compile have one product too.

Memory that is moved, as by `model.to`, lies apart again until `lowbit.inference.freeze_`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowbit.convert.owners import find_owners
from lowbit.convert.siblings import siblings
from lowbit.layers.frozen import is_frozen
from lowbit.tensor.core.base import LowbitTensor

DEVICES = ("cuda",)
"""Kinds of devices whose memory is laid out."""
ALIGNMENT = 16
"""Bytes: kernels read rows that begin at multiples of it."""


def lay_side_by_side(model: nn.Module) -> None:
    """Give the frozen weights of siblings on a GPU memory side by side, in place. One group is held twice meanwhile.

    Weights that are tied, that share scales among rows, or that are stored in different ways stay where they are.
    """
    owners = find_owners(model)
    for parent in model.modules():
        for names in siblings():
            parts = [parent._modules.get(name) for name in names]
            weights: list[Any] = [m._parameters.get("weight") for m in parts if m is not None]
            if len(weights) < len(names) or not all(map(is_frozen, weights)):
                continue
            if weights[0].device.type not in DEVICES or any(
                len(owners[id(w)]) > 1 for w in weights
            ):
                continue
            biases: list[Any] = [m._parameters.get("bias") for m in parts if m is not None]
            if join_rows(weights) and all(type(b) is nn.Parameter for b in biases):
                _join_biases(biases)


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
    if all(are_joined(each) for each in parts.values()):
        return False
    joint = {name: torch.cat(each) for name, each in parts.items()}
    at = dict.fromkeys(rows, 0)
    for i, w in enumerate(weights):
        own = {name: joint[name].narrow(0, at[name], parts[name][i].shape[0]) for name in rows}
        at = {name: at[name] + own[name].shape[0] for name in rows}
        w._take_over(w._with({**w.inner_tensors(), **own}))
    return True


def _join_biases(biases: list[Any]) -> None:
    alike = {(b.dtype, b.device, b.requires_grad) for b in biases}
    if alike != {(biases[0].dtype, biases[0].device, False)}:
        return
    if any(b.nbytes % ALIGNMENT for b in biases[:-1]):
        return
    for b, own in zip(biases, torch.cat(biases).split([len(b) for b in biases]), strict=True):
        b.data = own


def are_joined(tensors: list[Any]) -> bool:
    """True if these are slices along dimension 0, one after the other, of a contiguous tensor."""
    end = tensors[0].data_ptr()
    for t in tensors:
        is_next = t.data_ptr() == end and t.is_contiguous()
        if not is_next or t.untyped_storage().data_ptr() != tensors[0].untyped_storage().data_ptr():
            return False
        end += t.nbytes
    return True


def has_scales_of_rows(weight: LowbitTensor) -> bool:
    """True if no two rows share a scale, so that the rows of several weights can be joined and split anywhere."""
    own = getattr(weight, "spec", None)
    if own is not None and own.shares_rows:
        return False
    of_input = weight._of_input() if hasattr(weight, "_of_input") else {}
    return weight._row_attrs() == tuple(n for n in weight.inner_tensors() if n not in of_input)

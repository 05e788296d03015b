"""fuse_linears_: linears that read the same input become one product over their weights side by side.

    q, k, v = q_proj(x), k_proj(x), v_proj(x)     one product with the rows of all three, computed by the first

The first module of a group holds the joint weight. The module that is called first computes the outputs of all. Each
other module takes its slice, once, when it is called with the same input in the same state. The model's code and state
dicts stay as they are: the joint weight is saved and loaded under the names of its parts, so checkpoints pass between
fused and plain models in both directions. Where memory is short, load first and fuse afterwards: fusing holds one group
twice, loading into a fused model holds the whole state dict besides the joint weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.convert import find_owners, joined_name
from lowbit.convert.siblings import siblings
from lowbit.convert.side_by_side import has_scales_of_rows
from lowbit.layers.frozen import show_frozen, shown_class
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.state_dict import (
    check_described,
    described,
    hand_out_names,
    is_ours,
    take_parts,
)
from lowbit.tensor.frozen.affine_tensor import AffineTensor

HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def fuse_linears_(
    model: nn.Module, groups: Sequence[Sequence[str]] | None = None
) -> list[tuple[str, ...]]:
    """Compute sibling linears that read the same input by one product, in place.

        lowbit.quantize_(model, Int4WeightOnly())
        lowbit.inference.fuse_linears_(model)

    A decoded token then takes one launch for q, k and v, and one for gate and up. Do not write to the input between the
    calls in a way that its version counter misses (in compiled code, or to an inference tensor). Only one thread at a
    time may call the model. Where the parts read different inputs, as in cross attention, each computes all outputs.

    Args:
        model: a module with quantized or plain weights.
        groups: names of siblings. Every module that has all names of a group is fused. Default: the table of
            `lowbit.convert.siblings`, with q_proj, k_proj and v_proj, gate_proj and up_proj, and the names of other
            families of models.

    Returns:
        The fully qualified names of each fused group. The first module of each holds the joint weight.

    Raises:
        TypeError: a group is a single name.
        ValueError: the members of a group differ in K, scheme, dtype, device or bias, are tied or have hooks; or no
            module has any of the groups. The message names the obstacle; the model then stays unchanged.
    """
    wanted = siblings() if groups is None else groups
    if isinstance(wanted, str) or any(isinstance(names, str) for names in wanted):
        raise TypeError(f"groups must be tuples of names, e.g. [('gate', 'up')], got {groups!r}")
    uses = {key: len(owners) for key, owners in find_owners(model).items()}
    found: list[tuple[nn.Module, str, tuple[str, ...]]] = []
    obstacles = []
    for prefix, parent in model.named_modules():
        for names in wanted:
            parts = [parent._modules.get(name) for name in names]
            if any(part is None or isinstance(part, FusedLinear | FusedPart) for part in parts):
                continue
            path = f"{prefix}." if prefix else ""
            why = _obstacle([path + n for n in names], parts, uses)
            if why:
                obstacles.append(why)
            else:
                found.append((parent, path, tuple(names)))
    if obstacles or not found:
        reasons = "; ".join(obstacles[:4]) or (
            f"no module has {' or '.join(map(str, wanted))}, or all are fused already"
        )
        raise ValueError(
            f"cannot fuse linears of {type(model).__name__}: {reasons}; choose with groups, e.g. [('gate', 'up')]"
        )
    for parent, _, names in found:
        lead = FusedLinear(names, [parent._modules[n] for n in names])  # type: ignore[misc]
        show_frozen([lead])
        setattr(parent, names[0], lead)
        for index, name in enumerate(names[1:], 1):
            setattr(parent, name, FusedPart(lead, index))
        if not hasattr(parent, "_lowbit_join"):
            parent._lowbit_join = parent.register_load_state_dict_pre_hook(_join_on_load)
    return [tuple(path + n for n in names) for _, path, names in found]


def unfuse_linears_(model: nn.Module) -> list[tuple[str, ...]]:
    """Undo `fuse_linears_` on `model`, in place: every linear has its own weight again. Returns the names that
    `fuse_linears_` returned.

    Raises ValueError if no layer is fused.
    """
    undone = []
    for prefix, parent in list(model.named_modules()):
        for lead in [m for m in parent._modules.values() if isinstance(m, FusedLinear)]:
            for index, name in enumerate(lead.names):
                setattr(parent, name, lead.plain_linear(index))
            undone.append(tuple(joined_name(prefix, n) for n in lead.names))
        hook = parent.__dict__.pop("_lowbit_join", None)
        if hook is not None:
            hook.remove()
    if not undone:
        raise ValueError(f"nothing is fused in {type(model).__name__}")
    return undone


# ---- the modules -------------------------------------------------------------------------------------------


class FusedLinear(nn.Module):
    """The first linear of a group: it holds the joint `weight` [sum of N, K] and `bias`, and returns its own output."""

    converted_as = (
        "fused with its neighbours: convert first, or after lowbit.inference.unfuse_linears_"
    )
    """How reports of conversions describe this module."""

    def __init__(self, names: Sequence[str], parts: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.sizes = tuple(part.out_features for part in parts)
        self.in_features, self.out_features = parts[0].in_features, self.sizes[0]
        first = parts[0].weight
        self.weight = nn.Parameter(
            torch.cat([p.weight.detach() for p in parts]), requires_grad=first.requires_grad
        )
        self.bias: nn.Parameter | None = None
        if parts[0].bias is not None:
            joint = torch.cat([p.bias.detach() for p in parts])
            self.bias = nn.Parameter(joint, requires_grad=parts[0].bias.requires_grad)
        self._held: tuple[Tensor, Any, tuple[Tensor | None, ...]] | None = None
        self.train(parts[0].training)

    def forward(self, x: Tensor) -> Tensor:
        return self.take(0, x)

    def take(self, index: int, x: Tensor) -> Tensor:
        """The output of part `index`. One product gives each part's output once."""
        held, state = self._held, self._state(x)
        outputs: tuple[Tensor | None, ...]
        if held is not None and held[0] is x and held[1] == state and held[2][index] is not None:
            outputs = held[2]
        else:
            outputs = F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)
        y = outputs[index]
        assert y is not None
        left = tuple(None if i == index else t for i, t in enumerate(outputs))
        self._held = (x, state, left) if any(t is not None for t in left) else None
        return y

    def _state(self, x: Tensor) -> Any:
        """Everything besides the identity of x that the outputs depend on."""
        if torch.compiler.is_compiling():
            return None
        tensors = [t for t in (x, self.weight, self.bias) if t is not None and not t.is_inference()]
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type)
        return [t._version for t in tensors], x.requires_grad, modes

    def part(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Views of the rows of part `index`, in the weight and in the bias."""
        start = sum(self.sizes[:index])
        end = start + self.sizes[index]
        return self.weight[start:end], None if self.bias is None else self.bias[start:end]

    def plain_linear(self, index: int) -> nn.Linear:
        """Part `index` as a separate linear, with copies of its rows."""
        weight, bias = self.part(index)
        sizes = self.in_features, self.sizes[index]
        linear = nn.Linear(*sizes, bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.detach().clone(), self.weight.requires_grad)
        if self.bias is not None and bias is not None:
            linear.bias = nn.Parameter(bias.detach().clone(), self.bias.requires_grad)
        show_frozen([linear])
        return linear.train(self.training)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}  # a copy of the model holds no outputs

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        _save_part(self, 0, destination, prefix, keep_vars)

    def extra_repr(self) -> str:
        parts = ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))
        return f"in_features={self.in_features}, {parts}, bias={self.bias is not None}"


class FusedPart(nn.Module):
    """Another linear of the group: its output is a slice of the product that the first linear holds."""

    def __init__(self, lead: FusedLinear, index: int) -> None:
        super().__init__()
        self._lead = (lead,)  # a tuple hides the module, which would become a submodule here
        self.index = index
        self.in_features, self.out_features = lead.in_features, lead.sizes[index]
        self.train(lead.training)
        self.register_state_dict_post_hook(_hand_out_part)
        self.register_load_state_dict_pre_hook(_check_part)

    def forward(self, x: Tensor) -> Tensor:
        return self._lead[0].take(self.index, x)

    @property
    def weight(self) -> Tensor:
        """A view of the joint weight's rows."""
        return self._lead[0].part(self.index)[0]

    @property
    def bias(self) -> Tensor | None:
        """A view of the joint bias's elements, or None."""
        return self._lead[0].part(self.index)[1]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        _save_part(self._lead[0], self.index, destination, prefix, keep_vars)

    def extra_repr(self) -> str:
        lead = self._lead[0]
        return f"{lead.names[self.index]} of {lead.names[0]}, out_features={self.out_features}"


# ---- state dicts, under the names of the parts -------------------------------------------------------------


def _save_part(
    lead: FusedLinear, index: int, destination: dict[str, Any], prefix: str, keep_vars: bool
) -> None:
    for kind, t in zip(("weight", "bias"), lead.part(index), strict=True):
        if t is not None and keep_vars:
            # A view that requires grad cannot be a Parameter. Others become one: state dicts hand those out whole.
            destination[prefix + kind] = t if t.requires_grad else nn.Parameter(t, False)
        elif t is not None:
            destination[prefix + kind] = t.detach()


def _hand_out_part(
    part: FusedPart, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    hand_out_names(("weight",), state_dict, prefix, metadata)


def _check_part(part: FusedPart, *args: Any) -> None:
    """Compare the metadata with the weight. (The parent, which loads the tensors, does not get the metadata.)"""
    _, prefix, metadata, _, _, _, errors = args
    entry = described(metadata, "weight")
    if entry is not None and isinstance(part.weight, LowbitTensor):
        try:
            check_described(part.weight, f"{prefix}weight", entry)
        except ValueError as error:
            errors.append(str(error))


def _join_on_load(parent: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Replace the entries of a group's parts by the joint tensors, where every part has one."""
    leads = [m for m in parent._modules.values() if isinstance(m, FusedLinear)]
    for lead in leads:
        lead._held = None
        assign = bool(args[0].get("assign_to_params_buffers"))
        for index, name in enumerate(lead.names):
            weight = lead.part(index)[0]
            if isinstance(weight, LowbitTensor):
                take_parts(weight, f"{prefix}{name}.weight", state_dict, None, assign, args[-1])
        for kind in ("weight", "bias"):
            keys = [f"{prefix}{name}.{kind}" for name in lead.names]
            found = [state_dict.pop(key) for key in keys if key in state_dict]
            if found and len(found) == len(keys):
                state_dict[keys[0]] = torch.cat(found)
            elif found:
                args[-1].append(f"{prefix}{lead.names[0]} is fused: it loads all of {keys} or none")


# ---- obstacles ---------------------------------------------------------------------------------------------


def _obstacle(names: Sequence[str], modules: Sequence[Any], uses: Mapping[int, int]) -> str:
    """Why these modules cannot be one product, or ""."""
    parts: list[nn.Linear] = []
    for name, part in zip(names, modules, strict=True):
        if shown_class(part) is not nn.Linear:
            return f"{name} is a {type(part).__name__}, not an nn.Linear"
        if "weight" not in part._parameters:
            return f"the weight of {name} is computed, not a parameter"
        if any(not is_ours(hook) for kind in HOOKS for hook in getattr(part, kind).values()):
            return f"{name} has hooks, which a fused module would not run"
        if uses[id(part.weight)] > 1:
            return f"the weight of {name} is tied to another one"
        parts.append(part)
    for name, part in zip(names, parts, strict=True):
        for (what, own), (_, expected) in zip(_facts(part), _facts(parts[0]), strict=True):
            if own != expected:
                return f"{name} has {what} {own}, {names[0]} has {expected}"
        first, w = parts[0].weight, part.weight
        same_type = type(w) is type(first)
        if not (first._is_stored_like(w) if isinstance(first, LowbitTensor) else same_type):
            return f"{name} is stored as {_stored(w)}, {names[0]} as {_stored(first)}"
        if isinstance(w, LowbitTensor) and not has_scales_of_rows(w):
            return f"rows of {name} share a scale ({_stored(w)})"
        if isinstance(first, AffineTensor) and not first._has_input_of(w):  # type: ignore[arg-type]
            return f"{name} has another static scale of its input than {names[0]}"
    return ""


def _facts(part: nn.Linear) -> list[tuple[str, Any]]:
    """The properties in which all members of a group must agree."""
    return [
        ("K", part.weight.shape[1]),
        ("dtype", part.weight.dtype),
        ("device", part.weight.device),
        ("bias", part.bias is not None),
        ("requires_grad", part.weight.requires_grad),
        ("mode (train or eval)", part.training),
    ]


def _stored(weight: Tensor) -> str:
    spec = getattr(weight, "spec", None)
    return type(weight).__name__ if spec is None else f"{spec}, activation {weight.activation}"  # type: ignore[attr-defined]

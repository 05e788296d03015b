"""Checks, while siblings are written, that they share the quantities that a server keeps once for merged layers.

vLLM makes q, k and v one layer. If their entries differ, vLLM keeps the largest, and reads the other weights wrongly
without an error. So siblings (`lowbit.convert.siblings`) wait for each other. Differing quantities raise an error, or
become equal with lossy=True.

| quantity (`Format.joint`)                | with lossy=True                                                   |
|------------------------------------------|-------------------------------------------------------------------|
| the global scale of NVFP4, the scale of  | the values are rounded again, by the joint part that              |
| a whole tensor in float8                 | `lowbit.quantize_` gives siblings                                 |
| the scale and zero point of static       | those of the joint range, as vLLM computes them                   |
| inputs                                   |                                                                   |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from lowbit.convert import alike
from lowbit.convert.siblings import family_of, group_of
from lowbit.formats.base import Format, FormatError, Parts, layer_of
from lowbit.formats.sources import Item
from lowbit.numerics.snr import snr
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.siblings import joint_part

Ready = tuple[Item, Parts]
"""A tensor in the target's format, and its parts."""


@dataclass
class _Family:
    """Siblings that are waiting. `missing`: the number that are still to come."""

    missing: int
    waiting: list[Ready] = field(default_factory=list)


class MergedLayers:
    """Holds siblings back until all of them have come, and compares them.

    Args:
        target: the format that is written.
        lossy: make differing quantities equal, instead of an error.
        names: of all tensors, as far as they are known.
    """

    def __init__(self, target: Format, lossy: bool, names: Collection[str]) -> None:
        self.target, self.lossy = target, lossy
        self._counts = Counter(family for name in names if (family := family_of(name)))
        self._families: dict[str, _Family] = {}

    def take(self, item: Item, parts: Parts | None) -> list[Ready]:
        """The tensors that can be written, now that `item` has come. `parts`: None if the target refuses the item.

        Raises FormatError for siblings that differ in a quantity that the target's readers have once.
        """
        name = family_of(item.name)
        ready = [] if parts is None else [(item, parts)]
        if name is None:
            return ready
        size = self._counts[name] or len(_group_in(name))
        family = self._families.setdefault(name, _Family(size))
        family.missing -= 1
        if parts is not None and self._joint(item):
            family.waiting += ready
            ready = []
        if family.missing <= 0:
            del self._families[name]
            ready += [] if parts is None else self._settled(family.waiting)
        return ready

    def rest(self) -> Iterator[tuple[str, Callable[[], list[Ready]]]]:
        """The siblings that still wait: for each family the name of the first, and a call that gives them all. The call
        raises FormatError as `take` does."""
        for family in self._families.values():
            if family.waiting:
                yield family.waiting[0][0].name, partial(self._settled, family.waiting)
        self._families = {}

    def _joint(self, item: Item) -> dict[str, Tensor]:
        value = item.value
        return self.target.joint(value) if isinstance(value, AffineTensor) else {}

    def _settled(self, waiting: list[Ready]) -> list[Ready]:
        by_kind: dict[object, list[Ready]] = {}
        for item, parts in waiting:
            weight = item.value
            assert isinstance(weight, AffineTensor)
            kind = alike(weight.spec, weight.shape), weight.activation
            by_kind.setdefault(kind, []).append((item, parts))
        found: list[Ready] = []
        for family in by_kind.values():
            items = [item for item, _ in family]
            if differing := self._differing(items):
                if not self.lossy:
                    raise FormatError(_refusal(items, differing))
                items = _made_equal(items, differing)
                family = [(item, self.target.encode(item.value)) for item in items]  # type: ignore[arg-type]
            found += family
        return found

    def _differing(self, items: list[Item]) -> dict[str, list[Tensor]]:
        """The quantities in which the items differ, with the value of each item."""
        own = [self._joint(item) for item in items]
        columns = {name: [joint[name].flatten().cpu() for joint in own] for name in own[0]}
        return {n: ts for n, ts in columns.items() if any(not torch.equal(t, ts[0]) for t in ts)}


def _group_in(family: str) -> tuple[str, ...]:
    first = next(part for part in family.split(".") if "|" in part)
    return group_of(first.split("|")[0])


def _refusal(items: list[Item], differing: dict[str, list[Tensor]]) -> str:
    names = [layer_of(item.name) or item.name for item in items]
    shown = "; ".join(
        f"{name} {', '.join(f'{t[0].item():.6g}' for t in ts)}" for name, ts in differing.items()
    )
    way_out = (
        "calibrate them by the same batches, in one lowbit.calibrate"
        if all(name.startswith("input_") for name in differing)
        else "quantize the model again, as lowbit.quantize_, and lowbit.qat with scales='present', share it among "
        "siblings; after layer.merge() of PEFT, merge by model.merge_adapter() or lowbit.peft.merge_(model) instead"
    )
    return (
        f"servers such as vLLM merge {', '.join(names)} into one layer, which has one {' and one '.join(differing)}, "
        f"and theirs differ ({shown}): {way_out}"
    )


def _made_equal(items: list[Item], differing: dict[str, list[Tensor]]) -> list[Item]:
    """The items with equal quantities, and notes on what changed."""
    weights: list[AffineTensor] = [item.value for item in items]  # type: ignore[misc]
    of_input = {name for name in differing if name.startswith("input_")}
    names = ", ".join(sorted({item.name.rpartition(".")[0].rpartition(".")[2] for item in items}))
    made = _with_joint_inputs(weights) if of_input else weights
    if differing.keys() == of_input:
        note = f"its inputs are rounded by the joint range of {names}"
        pairs = zip(items, made, strict=True)
        return [replace(i, value=w, note=_noted(i, w, note)) for i, w in pairs]
    spec, activation = made[0].spec, made[0].activation
    values = [w.dequantize() for w in made]
    joint = joint_part(spec, values)
    note = f"rounded again, by one scale for {names}"
    found = []
    for item, own, weight in zip(items, values, made, strict=True):
        inputs = (
            None if weight.input_scale is None else (weight.input_scale, weight.input_zero_point)
        )
        rounded = AffineTensor.from_float(
            own, Scheme(spec, activation), input_qparams=inputs, joint=joint.to(own.device)
        )
        ratio = min(r for r in (snr(own, rounded.dequantize()), item.snr) if r is not None)
        found.append(Item(item.name, rounded, item.holder, _noted(item, rounded, note), ratio))
    return found


def _noted(item: Item, weight: AffineTensor, note: str) -> str:
    return f"{item.note or weight.stored_format()}; {note}"


def _with_joint_inputs(weights: list[AffineTensor]) -> list[AffineTensor]:
    """The weights with the static scale, and zero point, of the joint range of their inputs."""
    spec, first = weights[0].activation, weights[0].input_scale
    assert spec is not None and first is not None
    found = {"input_scale": [w.input_scale for w in weights]}
    found["input_zero_point"] = [w.input_zero_point for w in weights]
    scales, zeros = (
        [t.to(first.device).float() for t in ts if t is not None] for ts in found.values()
    )
    joint = {"input_scale": torch.stack(scales).amax(0)}
    if zeros:
        low, high = float(spec.format.quant_min), float(spec.format.quant_max)
        pairs = [*zip(scales, zeros, strict=True)]
        most = torch.stack([s * (high - z) for s, z in pairs]).amax(0)
        least = torch.stack([s * (low - z) for s, z in pairs]).amin(0)
        scale = (most - least) / (high - low)
        zero = (low - least / scale).round().clamp(low, high)
        joint = {"input_scale": scale, "input_zero_point": zero}
    return [_with_parts(weight, joint) for weight in weights]


def _with_parts(weight: AffineTensor, parts: Parts) -> AffineTensor:
    own = weight.inner_tensors()
    return weight._with({**own, **{n: t.to(own[n]) for n, t in parts.items()}})

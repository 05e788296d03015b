"""A folder of plain weights as a source whose weights are quantized on the way, one after another.

A folder has no modules, so names and shapes decide which tensor is the weight of a linear. A scheme for all, and the
pattern "*", take every matrix named `….weight` except embeddings, the output head and the routers of experts. A pattern
that names one of these takes it: {"lm_head": Int8WeightOnly(), "*": Int4WeightOnly()}. A tied weight that is stored
under two names (`lowbit.formats.tied`) is one weight, which a pattern for either name takes. The stacked experts of
gpt-oss are also quantized, in groups along their inputs, if the format to write holds stacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert import (
    NEEDS_CALIBRATION,
    alike,
    check_schemes,
    first_match,
    has_static,
    of_unused,
    routers_among,
    underflow,
    unused,
)
from lowbit.convert.siblings import families, of_any_expert
from lowbit.formats.base import Format, FormatError, layer_of, weight_of
from lowbit.formats.experts import is_transposed_stack
from lowbit.formats.folder import Folder
from lowbit.formats.layer_names import (
    TRANSPOSED,
    heads_without_weights,
    is_embedding,
    why_left_alone,
)
from lowbit.formats.sources import Item
from lowbit.formats.tied import is_tied
from lowbit.numerics.search import check_scales
from lowbit.numerics.snr import snr
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.siblings import quantized_together
from lowbit.tensor.frozen.turned import spec_of_linears


class Quantizing:
    """A folder of plain weights, which are quantized when their turn comes.

    Args:
        folder: of plain weights.
        scheme: a Scheme, or a dict of patterns to a Scheme or None, as `lowbit.quantize_` takes them.
        scales: "minmax", "searched" or None, as in `lowbit.quantize_`.
        device: where weights are quantized.
        target: the format to write, which decides the scales and the treatment of stacks of experts.

    Raises FormatError for weights that are quantized already, a pattern that chooses nothing, nothing to quantize, and
    a scheme with a static activation, which needs a calibration.
    """

    def __init__(
        self,
        folder: Folder,
        scheme: Scheme | Mapping[str, Scheme | None],
        scales: str | None = None,
        device: str | torch.device = "cpu",
        target: Format | None = None,
    ) -> None:
        check_scales(scales, FormatError)
        if folder.weights:
            raise FormatError(
                f"{folder.path} is in low bits already ({folder.format.name if folder.format else ''}); scheme= "
                "takes a folder of plain weights"
            )
        if (kind := folder.config.get("model_type")) in TRANSPOSED:
            raise FormatError(
                f"a {kind} stores its weights transposed: load the model, call lowbit.quantize_, and export that with "
                "format='lowbit'"
            )
        self.config, self.nbytes = folder.config, folder.nbytes
        self._folder, self._scales, self._device = folder, scales, torch.device(device)
        patterns = scheme if isinstance(scheme, Mapping) else {"*": scheme}
        check_schemes(patterns, Scheme)
        if has_static(patterns):
            raise FormatError(NEEDS_CALIBRATION)
        if target is not None and not target.holds_stacks:  # stacks are turned here
            patterns = {p: None if s is None else target.grid(s) for p, s in patterns.items()}
        shapes = {name: folder.plain_shape(name) for name in folder.plain}
        self._stacks = {n for n, s in shapes.items() if is_transposed_stack(self.config, n, s)}
        kept = self._stacks if target is not None and target.holds_stacks else set()
        self.left_out = [*folder.left_out, *_plain_stacks(self._stacks - kept, patterns, target)]
        names = {n: [n, *(s for s, first in folder.tied.items() if first == n)] for n in shapes}
        routers = routers_among(names)
        self._plan = {
            n: _choose_tied(own, shapes[n], patterns, n in kept, routers)
            for n, own in names.items()
        }
        used = {pattern for choice in self._plan.values() for pattern in choice.patterns}
        known = [name for own in names.values() for name in own]
        if is_tied(folder.config):
            known += map(weight_of, heads_without_weights(folder.config, names))
        left = {first_match(patterns, layer_of(name), name) for name in known}
        if idle := unused(patterns, used, left.__contains__):
            some = [name for name, shape in shapes.items() if len(shape) > 1][:3]
            raise FormatError(
                f"{folder.path}: {of_unused(idle, some)}; a tied head is stored as its embedding"
            )
        specs = {n: c.scheme.weight for n, c in self._plan.items() if c.scheme is not None}
        joined = {
            n: ([n], alike(spec, shapes[n])) for n, spec in specs.items() if self._joins(n, spec)
        }
        self._siblings = {name: family for family in families(joined) for name in family}
        self._made: dict[str, LowbitTensor] = {}
        if not any(choice.scheme for choice in self._plan.values()):
            raise FormatError(f"{folder.path} has no matrix named ….weight that the scheme chooses")

    def items(self) -> Iterator[Item]:
        for item in self._folder.items():
            choice = self._plan[item.name]
            scheme = choice.scheme
            if scheme is None:
                yield Item(item.name, item.value, item.holder, choice.note)
                continue
            is_stack = item.name in self._stacks
            values = item.value.to(self._device)
            if is_stack:  # a grid may have blocks in the order of the model
                scheme = replace(scheme, weight=spec_of_linears(scheme.weight, values.shape[1]))
            own = values.mT.contiguous() if is_stack else values
            weight = self._quantized(item.name, own, scheme)
            lost = underflow(own, weight)
            weight = weight._transposed() if is_stack else weight
            ratio = snr(values, weight.dequantize())
            weight = weight._map(lambda t: t.cpu())
            note = f"{scheme.describe(weight.shape)}{choice.note}" + (f"; {lost}" if lost else "")
            yield Item(item.name, weight, item.holder, note, ratio)

    def _joins(self, name: str, spec: Spec) -> bool:
        """True for a weight that is made together with its siblings: they share scales, or a search takes their inputs
        from all of them, as it does from the stack that models have of an expert's first two weights."""
        is_expert = of_any_expert(name) != name
        return spec.joins or (self._scales == "searched" and spec.scales is not None and is_expert)

    def _quantized(self, name: str, own: Tensor, scheme: Scheme) -> LowbitTensor:
        """The weight in its scheme. Siblings are made with the first of them, and wait for their turn."""
        family = self._siblings.get(name)
        if family is None:
            return quantized(name, own, scheme, self._scales)
        if name not in self._made:
            rows = {n: self._folder.read(n).to(self._device) for n in family}
            rows |= {n: rows[n].mT.contiguous() for n in rows if n in self._stacks}
            schemes = [self._plan[n].scheme or scheme for n in family]
            try:
                self._made |= quantized_together(rows, schemes, self._scales)
            except ValueError as error:
                raise FormatError(f"{', '.join(family)}: {error}") from error
        return self._made.pop(name)

    def names(self) -> list[str]:
        return self._folder.names()

    def linears(self) -> set[str]:
        return self._folder.linears()

    def copy_files(self, folder: Path) -> None:
        self._folder.copy_files(folder)


def _plain_stacks(
    stacks: Collection[str], patterns: Mapping[str, Scheme | None], target: Format | None
) -> list[str]:
    """A line for the report about these stacks of experts, which the format cannot hold, if a pattern chooses some."""
    chosen = [n for n in stacks if patterns.get(first_match(patterns, layer_of(n), n) or "")]
    if target is None or not chosen:
        return []
    return [
        f"{len(chosen)} stacks of experts, such as {min(chosen)}, stay in high precision: {target.name} has no form "
        "for them, and the format lowbit has"
    ]


@dataclass(frozen=True)
class _TensorChoice:
    """The treatment of a tensor of the folder.

    Attributes:
        scheme: None if the tensor stays plain.
        note: why the tensor stays plain; for a quantized tensor, what follows its scheme in the report.
        patterns: those that decided.
    """

    scheme: Scheme | None
    note: str
    patterns: tuple[str, ...] = ()


def _choose_tied(
    names: Sequence[str],
    shape: tuple[int, ...],
    patterns: Mapping[str, Scheme | None],
    is_stack: bool,
    routers: Collection[str],
) -> _TensorChoice:
    """The choice for a tensor with these names, several for a tied tensor.

    Raises FormatError if patterns give the names different schemes.
    """
    first, *others = names
    if not others:
        return _choose(first, shape, patterns, is_stack, set(), first in routers)
    uses = {"embedding" if is_embedding(layer_of(name)) else "linear" for name in names}
    own = {n: _choose(n, shape, patterns, is_stack, uses, n in routers) for n in names}
    named = {n: c for n, c in own.items() if c.patterns and c.patterns != ("*",)}
    choices = named or own
    schemes = {choice.scheme for choice in choices.values()}
    if len(schemes) > 1:
        shown = ", ".join(f"{n}: {c.scheme or c.note}" for n, c in choices.items())
        raise FormatError(
            f"{' and '.join(names)} are one tied weight, but the patterns differ ({shown}); give both one scheme, or "
            "leave both alone"
        )
    chosen = next(iter(choices.values()))
    tied = f"tied to {', '.join(others)}"
    note = f"; {tied}" if chosen.scheme is not None else f"{chosen.note}; {tied}"
    return _TensorChoice(chosen.scheme, note, tuple(p for c in own.values() for p in c.patterns))


def _choose(
    name: str,
    shape: tuple[int, ...],
    patterns: Mapping[str, Scheme | None],
    is_stack: bool,
    uses: Collection[str],
    is_router: bool,
) -> _TensorChoice:
    """The choice for a tensor of this name. `uses`: those of `lowbit.convert.USES`; empty: as the name says."""
    layer, _, last = name.rpartition(".")
    if not is_stack and (last != "weight" or len(shape) != 2):
        return _TensorChoice(None, "no matrix named ….weight")
    pattern = first_match(patterns, layer_of(name), name)
    scheme = None if pattern is None else patterns[pattern]
    own = () if pattern is None else (pattern,)
    if scheme is None:
        return _TensorChoice(None, "no scheme for this name", own)
    if (why := why_left_alone(layer, pattern, router=is_router)) is not None:
        return _TensorChoice(None, why)
    uses = uses or {"embedding" if is_embedding(layer) else "linear"}
    if is_stack:
        shape, uses = (shape[0], shape[2], shape[1]), {"other"}
    obstacle = scheme.obstacle(shape, uses)
    return (
        _TensorChoice(scheme, "", own) if obstacle is None else _TensorChoice(None, obstacle, own)
    )


def quantized(name: str, values: Tensor, scheme: Scheme, scales: str | None) -> LowbitTensor:
    """`values` in `scheme`, on their device, with `scales` as `AffineTensor.quantized` takes them. Raises FormatError,
    with `name`, for values that cannot be quantized."""
    try:
        return AffineTensor.quantized(values, scheme, scales)
    except ValueError as error:
        raise FormatError(f"{name}: {error}") from error

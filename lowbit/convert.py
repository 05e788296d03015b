"""Walk a model, choose a scheme for each weight, replace it, and report what was done and what was not.

Shared by `lowbit.quantize_`, `lowbit.qat` and `lowbit.train`. Everything is checked before the first weight is
replaced, so a model that is refused is as it was. A tensor that several modules share is converted
once and stays shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.replaced import hand_over
from lowbit.scheme import Scheme
from lowbit.tensor.base import LowbitTensor, check_weight
from lowbit.train_scheme import TrainingScheme

Filter = Callable[[nn.Module, str], bool]
AnyScheme = Scheme | TrainingScheme
Schemes = Scheme | Mapping[str, Scheme | None]
TrainingSchemes = TrainingScheme | Mapping[str, TrainingScheme | None]
AnySchemes = Schemes | TrainingSchemes
Owners = Sequence[tuple[nn.Module, str, str]]
"""The modules that hold a parameter, each with the attribute and the parameter's name there."""
USES = ("linear", "embedding", "attention", "other")
"""What a module that holds a weight may be to a scheme: `attention` is the `out_proj` of nn.MultiheadAttention."""


@dataclass(frozen=True)
class Target:
    """A weight to convert: where it lives (`owners`: module, attribute, its name there) and by which scheme."""

    weight: Tensor
    scheme: Any
    """An `AnyScheme`."""
    owners: tuple[tuple[nn.Module, str, str], ...]


@dataclass(frozen=True)
class Entry:
    """One weight: its fully qualified name, shape, what became of it, and why.

    nbytes: what it takes now. Of a tied weight, only the first entry has them.
    """

    fqn: str
    shape: tuple[int, ...]
    converted: bool
    note: str
    nbytes: int = 0


@dataclass
class Report:
    """What a conversion did: `print(report)`, or read `converted` and `left`.

    Attributes:
        entries: every weight of two or more dimensions that was looked at.
        parameters: elements of all parameters of the model.
        low_bits: how many of them are now stored in low bits.
        prepared: how many are kept in high precision, with products in low bits.
        nbytes: what all parameters take now.
        vectors: how many parameters of fewer than two dimensions there are, such as biases and norms.
        vector_nbytes: what these take.
    """

    entries: list[Entry] = field(default_factory=list)
    parameters: int = 0
    low_bits: int = 0
    prepared: int = 0
    nbytes: int = 0
    vectors: int = 0
    vector_nbytes: int = 0

    @property
    def converted(self) -> list[str]:
        """Fully qualified names of the weights that were converted."""
        return [e.fqn for e in self.entries if e.converted]

    @property
    def left(self) -> dict[str, str]:
        """Fully qualified name → reason, of the weights that were left alone."""
        return {e.fqn: e.note for e in self.entries if not e.converted}

    def count(self, model: nn.Module) -> Self:
        """Fill in the numbers from `model` as it is now. Returns the report."""
        self.parameters = self.low_bits = self.prepared = 0
        self.nbytes = self.vectors = self.vector_nbytes = 0
        sizes: dict[str, int] = {}
        for name, param in model.named_parameters():  # tied ones once
            if isinstance(param, nn.UninitializedParameter):
                continue
            size = _nbytes(param)
            sizes[name] = size
            self.parameters += param.numel()
            self.nbytes += size
            local = param.to_local() if isinstance(param, DTensor) else param
            if isinstance(local, LowbitTensor):
                if local.updated_in_place() is None:
                    self.low_bits += param.numel()
                else:
                    self.prepared += param.numel()
            elif param.ndim < 2:
                self.vectors += 1
                self.vector_nbytes += size
        self.entries = [replace(e, nbytes=sizes.get(e.fqn, 0)) for e in self.entries]
        return self

    def _share(self, part: int, whole: int) -> str:
        share = 100 * part / whole if whole else 0.0
        return "<0.1%" if 0 < share < 0.05 else f"{share:.1f}%"

    def __str__(self) -> str:
        count = len(self.converted)
        head = f"{count} weights converted, {len(self.entries) - count} left alone"
        if self.parameters:
            share = self._share(self.low_bits, self.parameters)
            head += f"; {share} of {self.parameters:,} parameters are now in low bits"
        if self.prepared:
            head += f", {self._share(self.prepared, self.parameters)} have low-bit products"
        lines = [head]
        width = max((len(e.fqn) for e in self.entries), default=0)
        for e in self.entries:
            mark = "+" if e.converted else "-"
            share = f"{self._share(e.nbytes, self.nbytes):>6} of bytes" if e.nbytes else ""
            share = share or ("counted above" if self.parameters and e.shape else "")
            shape = "x".join(map(str, e.shape))
            lines.append(f"  {mark} {e.fqn:<{width}}  {shape:<14}  {share:>15}  {e.note}")
        if self.vectors:
            share = self._share(self.vector_nbytes, self.nbytes)
            lines.append(f"    and {self.vectors} vectors (biases, norms): {share} of bytes")
        return "\n".join(lines)


def _nbytes(param: Any) -> int:
    """Bytes of the whole parameter, also where it is sharded."""
    if not isinstance(param, DTensor):
        return param.nbytes_stored() if isinstance(param, LowbitTensor) else param.nbytes
    local = param.to_local()
    if not isinstance(local, LowbitTensor) or local.numel() == 0:
        return param.numel() * param.element_size()
    return local.nbytes_stored() * param.numel() // local.numel()


def is_linear(module: nn.Module, fqn: str) -> bool:
    """The filter in use when none is given: every `nn.Linear`."""
    return isinstance(module, nn.Linear)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)


_ACCEPTED: dict[type, tuple[str, str, str]] = {
    Scheme: (
        "a Scheme, e.g. lowbit.Int4WeightOnly(group_size=128)",
        "Scheme",
        "{'lm_head': None, '*': lowbit.Int8WeightOnly()}",
    ),
    TrainingScheme: (
        "a training scheme, e.g. lowbit.train.Int8MixedPrecision()",
        "training scheme",
        "{'lm_head': None, '*': lowbit.train.Int8MixedPrecision()}",
    ),
}


def _check_schemes(schemes: AnySchemes, kind: type) -> None:
    values = schemes.values() if isinstance(schemes, Mapping) else [schemes]
    for scheme in values:
        if not (isinstance(scheme, kind) or (scheme is None and isinstance(schemes, Mapping))):
            one, name, patterns = _ACCEPTED[kind]
            raise TypeError(
                f"unknown scheme {scheme!r}; accepted: {one}, or a dict of name patterns to a {name} or None, e.g. "
                f"{patterns}"
            )
    for pattern in schemes if isinstance(schemes, Mapping) else ():
        if not isinstance(pattern, str):
            raise TypeError(f"a pattern must be a str, got {pattern!r}")
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


def _pattern_for(schemes: Mapping[str, Any], names: tuple[str, str]) -> str | None:
    """The first pattern that matches the module's or the weight's name."""
    return next((p for p in schemes if any(_matches(p, name) for name in names)), None)


def check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be an nn.Module, got {type(model).__name__}: it is changed in place, where its modules hold "
            "the weights"
        )


def find_owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str, str]]]:
    """id of a parameter → every (module, attribute, fully qualified name) that holds it. Raises TypeError for what is
    no module."""
    check_module(model)
    owners: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                fqn = f"{prefix}.{name}" if prefix else name
                owners.setdefault(id(param), []).append((module, name, fqn))
    return owners


def _has_own_product(module: nn.Module) -> bool:
    """Whether its product, or its lookup, is that of one parameter, `weight`."""
    return isinstance(module, nn.Linear | nn.Embedding)


def _weights_of(module: nn.Module, selected: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a product could take, with their attribute names: of two or more dimensions, or of a selected
    module, where they have no shape yet."""
    for name, param in module._parameters.items():
        if param is None:
            continue
        if isinstance(param, nn.UninitializedParameter):
            if name == "weight" if _has_own_product(module) else selected:
                yield name, param
        elif param.ndim >= 2 or (name == "weight" and _has_own_product(module)):
            yield name, param


def _refusal(owners: Owners, weight: Tensor, trains: bool) -> str | None:
    """Why a selected weight is left alone, whatever the scheme, or None. `trains`: by a training scheme."""
    if isinstance(weight, LowbitTensor):
        return weight.already or f"already a {type(weight).__name__}"
    for module, _, _ in owners:
        if hasattr(module, "converted_as"):  # lowbit's own, which stands for others
            return str(module.converted_as)
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            return "its max_norm rewrites rows at every lookup"
        if isinstance(module, nn.Embedding) and module.sparse and trains:
            return "its embedding has sparse=True, and a low-bit weight takes dense gradients"
        if type(module).__module__.startswith("torch.nn") and not isinstance(
            module, nn.Linear | nn.Embedding
        ):
            return f"no low-bit product for {type(module).__name__}"
    if not isinstance(weight, nn.UninitializedParameter) and weight.ndim > 3:
        return f"no low-bit product takes {weight.ndim} dimensions"
    return None


def _use(module: nn.Module, attentions: set[int]) -> str:
    """Which of `USES`. `attentions`: ids of the modules that only nn.MultiheadAttention's own product reads."""
    if id(module) in attentions:
        return "attention"
    kinds = {nn.Linear: "linear", nn.Embedding: "embedding"}
    return next((name for kind, name in kinds.items() if isinstance(module, kind)), "other")


def find_targets(
    model: nn.Module, schemes: AnySchemes, filter_fn: Filter | None, kind: type = Scheme
) -> tuple[list[Target], Report]:
    """The weights to convert, all of them checked, and a report of the ones left alone. `kind`: of schemes.

    Raises:
        TypeError: not a scheme, no module, no filter.
        ValueError: a pattern that matches nothing; nothing to convert, unless a training scheme left something alone by
            a rule of its own; an integer, complex, NaN or infinite weight; tied weights with different schemes; a model
            already sharded.
    """
    _check_schemes(schemes, kind)
    filter_fn = is_linear if filter_fn is None else filter_fn
    if not callable(filter_fn):
        raise TypeError(
            f"filter_fn must be a function of a module and its name, or None, got {filter_fn!r}; to choose by name "
            "give patterns, {'layers.*': scheme}"
        )
    walk = _Walk(model, schemes, filter_fn, kind)
    for prefix, module in model.named_modules():
        walk.visit(prefix, module)
    report = walk.report
    _check_targets(schemes, walk.targets, walk.used, report)
    if not walk.targets and not walk.left_by_rule:
        reasons = "; ".join(f"{fqn}: {why}" for fqn, why in list(report.left.items())[:4])
        raise ValueError(
            f"nothing to convert in {type(model).__name__} ({reasons or 'it has no nn.Linear'}); "
            "choose modules with filter_fn(module, name), or by patterns that give them a scheme"
        )
    shared = {fqn for t in walk.targets.values() for _, _, fqn in t.owners}
    report.entries = [e for e in report.entries if e.fqn not in shared]
    return list(walk.targets.values()), report


_NO_PARAMETER = "<no parameter>"
"""A name that no parameter has."""


class _Walk:
    """From module to module: what is to be converted, by which scheme, and what is left alone, and why."""

    def __init__(
        self, model: nn.Module, schemes: AnySchemes, filter_fn: Filter, kind: type
    ) -> None:
        self.schemes, self.filter_fn, self.kind = schemes, filter_fn, kind
        self.owners = find_owners(model)
        attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
        self.attentions = {id(m.out_proj) for m in attentions}
        self.report = Report()
        self.used: set[str] = set()
        self.targets: dict[int, Target] = {}
        self.chosen: dict[int, tuple[str, AnyScheme | None]] = {}
        self.left_by_rule = False

    def visit(self, prefix: str, module: nn.Module) -> None:
        selected = self.filter_fn(module, prefix) or hasattr(module, "converted_as")
        if _has_own_product(module) and module._parameters.get("weight") is None:
            fqn = f"{prefix}.weight" if prefix else "weight"
            note = "computed from other parameters, so none to convert"
            self.report.entries.append(Entry(fqn, (), False, note))
        for name, param in _weights_of(module, selected):
            fqn = f"{prefix}.{name}" if prefix else name
            shape = () if isinstance(param, nn.UninitializedParameter) else tuple(param.shape)
            why, scheme = self._look_at(module, prefix, name, fqn, param, selected)
            if why is None and scheme is not None and shape:
                uses = {_use(owner, self.attentions) for owner, _, _ in self.owners[id(param)]}
                why = scheme.obstacle(shape, uses)
                self.left_by_rule |= why is not None and self.kind is TrainingScheme
            if why is not None or scheme is None:
                why = why or "no scheme for this name"
                self.report.entries.append(Entry(fqn, shape, False, why))
            elif id(param) not in self.targets:
                owners = tuple(self.owners[id(param)])
                self.targets[id(param)] = Target(param, scheme, owners)

    def _look_at(
        self,
        module: nn.Module,
        prefix: str,
        name: str,
        fqn: str,
        param: nn.Parameter,
        selected: bool,
    ) -> tuple[str | None, AnyScheme | None]:
        """Why this weight is left alone, or None, and the scheme for it, or None."""
        schemes = self.schemes
        pattern = _pattern_for(schemes, (prefix, fqn)) if isinstance(schemes, Mapping) else None
        is_second = _has_own_product(module) and name != "weight"
        is_first = _has_own_product(module) and not is_second
        if is_second and selected:  # adapters beside a weight shall not be frozen along with it
            selected = pattern is not None and not _matches(pattern, prefix)
        elif not selected and not is_first:
            selected = self._chosen_by_name(module, prefix, fqn)
        if not selected:
            return self._not_selected(module, param, is_first, is_second), None
        note = _refusal(self.owners[id(param)], param, self.kind is TrainingScheme)
        if note is not None or not isinstance(schemes, Mapping):
            return note, schemes if isinstance(schemes, self.kind) else None  # type: ignore[return-value]
        if pattern is None:
            return None, None
        self.used.add(pattern)
        scheme = schemes[pattern]
        _check_ties(self.chosen.setdefault(id(param), (fqn, scheme)), (fqn, scheme))
        return None, scheme

    def _chosen_by_name(self, module: nn.Module, prefix: str, fqn: str) -> bool:
        """Whether the filter, which does not take the module, takes this parameter of it. A filter that would take
        any other name as well excludes the module by its name; it does not choose the parameter."""
        no_parameter = f"{prefix}.{_NO_PARAMETER}" if prefix else _NO_PARAMETER
        return self.filter_fn(module, fqn) and not self.filter_fn(module, no_parameter)

    def _not_selected(
        self, module: nn.Module, param: nn.Parameter, is_first: bool, is_second: bool
    ) -> str:
        kind = type(module).__name__
        if is_first:
            return "not selected by the filter"
        if is_second:
            return f"beside the weight of a {kind}: a pattern or filter that names it converts it"
        refusal = _refusal(self.owners[id(param)], param, self.kind is TrainingScheme)
        return refusal or f"of a {kind}: filter_fn can select it, the default takes nn.Linear only"


def _check_ties(first: tuple[str, AnyScheme | None], other: tuple[str, AnyScheme | None]) -> None:
    if first[1] != other[1]:
        raise ValueError(
            f"{first[0]} and {other[0]} are one tied weight, but the patterns give them {first[1]} and {other[1]}; "
            "give both one scheme, or leave both alone"
        )


def _check_targets(
    schemes: AnySchemes,
    targets: Mapping[int, Target],
    used: set[str],
    report: Report,
) -> None:
    for target in targets.values():
        fqn = target.owners[0][2]
        if isinstance(target.weight, DTensor):
            raise ValueError(
                f"{fqn} is a DTensor: convert the model before fully_shard or parallelize_module"
            )
        if isinstance(target.weight, nn.UninitializedParameter):
            raise ValueError(
                f"{fqn} has no shape yet: run the model once, so that its lazy modules are initialised"
            )
        check_weight(target.weight, fqn)
        try:
            target.scheme.check(target.weight)
        except ValueError as error:
            raise ValueError(f"{fqn}: {error}") from error
    unused = [p for p in schemes if p not in used] if isinstance(schemes, Mapping) else []
    if unused:
        raise ValueError(
            f"the patterns {unused} chose no weight (a pattern before them may match first); names end like "
            f"{[e.fqn for e in report.entries][:3] or [t.owners[0][2] for t in targets.values()][:3]}"
        )


def replace_weights(
    targets: list[Target],
    report: Report,
    make: Callable[[Target], Tensor],
    trainable: bool,
    note: str | None = None,
) -> Report:
    """Replace each target by `make(target)` in every module that holds it, and complete the report, with `note`
    or what the scheme has to say. What stays trainable keeps the gradient that it has accumulated, and its hooks; an
    optimizer that holds the old parameters raises at its next step (`lowbit.replaced`).

    Empties `targets` on the way, so that each old weight's memory is free before the next one's turn.
    """
    while targets:
        target = targets.pop(0)
        keeps_grad = trainable and target.weight.requires_grad
        new = nn.Parameter(make(target), requires_grad=keeps_grad)
        for module, name, _ in target.owners:
            module.register_parameter(name, new)
        first, *others = (fqn for _, _, fqn in target.owners)
        left_behind = hand_over(target.weight, new, first, trainable)
        about = note or target.scheme.describe(new.shape)
        about = f"{about}; {left_behind}" if left_behind else about
        report.entries.append(Entry(first, tuple(new.shape), True, about))
        report.entries += [Entry(fqn, tuple(new.shape), True, f"tied to {first}") for fqn in others]
    return report

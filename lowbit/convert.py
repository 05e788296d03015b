"""Walk a model, choose a scheme for each weight, replace the weights, and report them.

`lowbit.quantize_`, `lowbit.qat` and `lowbit.train` share it. All weights are checked before the first one is replaced,
so a refused model stays as it was. A tensor that several modules share is converted once and stays shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from lowbit.patterns import is_refused
from lowbit.patterns import matches as matches_expression
from lowbit.progress import progress
from lowbit.replaced import hand_over
from lowbit.scheme import Scheme, Spec
from lowbit.sharded import is_dtensor
from lowbit.siblings import families, group_of
from lowbit.tensor.affine_tensor import representation_of
from lowbit.tensor.base import LowbitTensor, check_weight
from lowbit.tensor.conv_tensor import CONVOLUTIONS, check_spec, matrix_shape
from lowbit.tensor.dtensor import local
from lowbit.tensor.learned_scales import weight_scaled_by
from lowbit.train_scheme import TrainingScheme

Filter = Callable[[nn.Module, str], bool]
Schemes = Scheme | Mapping[str, Scheme | None]
TrainingSchemes = TrainingScheme | Mapping[str, TrainingScheme | None]
USES = ("linear", "embedding", "conv", "attention", "other")
"""How a module uses its weight, as schemes ask; "attention" is the `out_proj` of nn.MultiheadAttention."""


class Owner(NamedTuple):
    """A module that holds a parameter, the attribute, and the parameter's fully qualified name there."""

    module: nn.Module
    attribute: str
    fqn: str


@dataclass(frozen=True)
class Target:
    """A weight to convert, its scheme (a `Scheme` or `TrainingScheme`), and every module that holds it."""

    weight: Tensor
    scheme: Any
    owners: tuple[Owner, ...]


def rounding_owners(target: Target) -> list[Owner]:
    """The modules, linears or convolutions, that round their inputs by the scheme of the weight that they hold. With a
    static scale the input of the first one stands for those of all."""
    kinds = (nn.Linear, *CONVOLUTIONS)
    return [owner for owner in target.owners if isinstance(owner.module, kinds)]


def is_conv(target: Target) -> bool:
    """Whether the weight is stored as `lowbit.tensor.conv_tensor` says."""
    return _is_of_conv(target.owners[0])


def _is_of_conv(owner: Owner) -> bool:
    return isinstance(owner.module, CONVOLUTIONS) and owner.attribute == "weight"


# ---- siblings -------------------------------------------------------------------------------------------------


def families_of(targets: Sequence[Target]) -> list[list[Target]]:
    """The targets, two or more at a time, that are siblings (`lowbit.siblings`) and share a part of their scales, as
    their schemes join."""
    by_name = {target.owners[0].fqn: target for target in targets if _joins(target)}
    weights = {
        name: (
            [owner.fqn for owner in target.owners],
            alike(target.scheme.weight, target.weight.shape),
        )
        for name, target in by_name.items()
    }
    return [[by_name[name] for name in group] for group in families(weights)]


def _joins(target: Target) -> bool:
    return target.scheme.weight.joins and target.weight.ndim >= 2 and not is_conv(target)


def alike(spec: Spec, shape: Sequence[int]) -> Hashable:
    """What siblings must agree in to share a part of their scales."""
    return spec, tuple(shape[:-2]), shape[-1]


def joint_parts(targets: Sequence[Target], searched: bool = False) -> dict[str, Tensor]:
    """What the weights of each family share, by the first name of each of them. `searched`: as for `joint_part`."""
    found: dict[str, Tensor] = {}
    for family in families_of(targets):
        weights = [target.weight for target in family]
        shared = joint_part(family[0].scheme.weight, weights, searched)
        found |= {target.owners[0].fqn: shared for target in family}
    return found


@torch.no_grad()
def joint_part(spec: Spec, weights: Sequence[Tensor], searched: bool = False) -> Tensor:
    """`Spec.joint_part` of plain weights, with scales of the dtype that these get. `searched`: with the smallest
    squared error over all of them, as `Spec.search_qparams` finds it."""
    dtype = representation_of(spec).scale_dtype(spec, weights[0].dtype)
    own = [weight.detach() for weight in weights]
    if searched:
        return spec.search_qparams(torch.cat([w.to(own[0].device) for w in own], -2), dtype)[0]
    return spec.joint_part(own, dtype)


# ---- the report -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One weight: its fully qualified name, shape, whether it was converted, and how or why not.

    nbytes: the bytes that it takes now; for a tied weight, only in the first entry.
    """

    fqn: str
    shape: tuple[int, ...]
    converted: bool
    note: str
    nbytes: int = 0


@dataclass
class Report:
    """The report of a conversion: `print(report)`, or read `converted` and `left`.

    Attributes:
        entries: every weight of two or more dimensions that was looked at.
        parameters: elements of all parameters of the model.
        low_bits: how many of them are now stored in low bits.
        prepared: how many are kept in high precision, with products in low bits.
        nbytes: bytes that all parameters take now.
        low_bit_nbytes: how many of them those in low bits take.
        vectors: how many parameters of fewer than two dimensions there are, such as biases and norms.
        vector_nbytes: bytes that these take.
    """

    entries: list[Entry] = field(default_factory=list)
    parameters: int = 0
    low_bits: int = 0
    prepared: int = 0
    nbytes: int = 0
    low_bit_nbytes: int = 0
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
        """Fill in the numbers from `model` as it is now, and tell `followers` of it. Returns the report."""
        self.parameters = self.low_bits = self.prepared = 0
        self.nbytes = self.low_bit_nbytes = self.vectors = self.vector_nbytes = 0
        sizes: dict[str, int] = {}
        for name, param in model.named_parameters():  # tied ones once
            if isinstance(param, nn.UninitializedParameter):
                continue
            sizes[name] = size = _nbytes(param)
            self.parameters += param.numel()
            self.nbytes += size
            own = local(param)
            if isinstance(own, LowbitTensor):
                if own.updated_in_place() is None:
                    self.low_bits += param.numel()
                    self.low_bit_nbytes += size
                else:
                    self.prepared += param.numel()
            elif param.ndim < 2:
                self.vectors += 1
                self.vector_nbytes += size
        self.entries = [replace(e, nbytes=sizes.get(e.fqn, 0)) for e in self.entries]
        tell(model)
        return self

    def __str__(self) -> str:
        count = len(self.converted)
        head = f"{count} weights converted, {len(self.entries) - count} left alone"
        if self.parameters:
            share = _share(self.low_bits, self.parameters)
            head += f"; {share} of {self.parameters:,} parameters are now in low bits"
        if self.low_bits:
            head += f" and take {_share(self.low_bit_nbytes, self.nbytes)} of the bytes"
        if self.prepared:
            head += f", {_share(self.prepared, self.parameters)} have low-bit products"
        lines = [head]
        width = max((len(e.fqn) for e in self.entries), default=0)
        for e in self.entries:
            tied = "counted above" if self.parameters and e.shape else ""
            share = f"{_share(e.nbytes, self.nbytes):>6} of bytes" if e.nbytes else tied
            shape = "x".join(map(str, e.shape))
            mark = "+" if e.converted else "-"
            lines.append(f"  {mark} {e.fqn:<{width}}  {shape:<14}  {share:>15}  {e.note}")
        if self.vectors:
            share = _share(self.vector_nbytes, self.nbytes)
            lines.append(f"    and {self.vectors} vectors (biases, norms): {share} of bytes")
        return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    percent = 100 * part / whole if whole else 0.0
    return "<0.1%" if 0 < percent < 0.05 else f"{percent:.1f}%"


def _nbytes(param: Any) -> int:
    """Bytes of the whole parameter, also where it is sharded."""
    own = local(param)
    if not isinstance(own, LowbitTensor) or own.numel() == 0:
        return param.numel() * param.element_size()
    return own.nbytes_stored() * param.numel() // own.numel()


# ---- arguments ------------------------------------------------------------------------------------------------

_ACCEPTED: dict[type, tuple[str, str, str]] = {
    Scheme: ("a Scheme", "Scheme", "lowbit.Int4WeightOnly(group_size=128)"),
    TrainingScheme: ("a training scheme", "training scheme", "lowbit.train.Int8MixedPrecision()"),
}
"""How messages name a kind of schemes, with an example."""


def _check_schemes(schemes: Any, kind: type) -> None:
    by_pattern = isinstance(schemes, Mapping)
    for scheme in schemes.values() if by_pattern else [schemes]:
        if not (isinstance(scheme, kind) or (scheme is None and by_pattern)):
            one, name, example = _ACCEPTED[kind]
            raise TypeError(
                f"unknown scheme {scheme!r}; accepted: {one}, e.g. {example}, or a dict of name patterns to a {name} "
                f"or None, e.g. {{'lm_head': None, '*': {example}}}{_remedy(scheme)}"
            )
    for pattern in schemes if by_pattern else ():
        check_pattern(pattern)


def check_pattern(pattern: Any) -> None:
    """Raise TypeError for anything but a str, and ValueError for "re:" and what is no regular expression."""
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern must be a str, got {pattern!r}")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


def _remedy(scheme: Any) -> str:
    """The end of the message about an object that is no scheme of the kind that a flow takes."""
    if isinstance(scheme, Scheme):
        return ". A Scheme is for lowbit.quantize_ and lowbit.qat.prepare_"
    if isinstance(scheme, TrainingScheme):
        return ". A training scheme is for lowbit.train.prepare_"
    name = getattr(scheme, "__name__", None)
    return f". To make one, call it: {name}()" if name and callable(scheme) else ""


def matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        expression = pattern[3:]
        if is_refused(expression):  # a user's own back reference, for example
            return re.fullmatch(expression, name) is not None
        return matches_expression(expression, name, whole=True)
    return fnmatchcase(name, pattern)


def check_module(model: Any) -> None:
    """Raise TypeError for anything but a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be an nn.Module, got {type(model).__name__}: it is changed in place, where its modules hold "
            "the weights"
        )


followers: list[Callable[[nn.Module], None]] = []
"""Functions that get each model whose weights were replaced, once it is complete."""


def tell(model: nn.Module) -> None:
    """Call the `followers` of a model whose weights were replaced."""
    for follow in followers:
        follow(model)


# ---- the walk -------------------------------------------------------------------------------------------------


def joined_name(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def find_owners(model: nn.Module) -> dict[int, list[Owner]]:
    """id of a parameter → everything that holds it. Raises TypeError for anything but a module."""
    check_module(model)
    owners: dict[int, list[Owner]] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                owners.setdefault(id(param), []).append(
                    Owner(module, name, joined_name(prefix, name))
                )
    return owners


def find_targets(
    model: nn.Module,
    schemes: Schemes | TrainingSchemes,
    filter_fn: Filter | None,
    kind: type = Scheme,
) -> tuple[list[Target], Report]:
    """The weights to convert, all of them checked, and a report of the ones left alone.

    Args:
        schemes: one of `kind`, `Scheme` or `TrainingScheme`; or a dict of name patterns to one of `kind` or None.
        filter_fn: chooses modules; None chooses every `nn.Linear`.

    Raises:
        TypeError: not a scheme, not a module, not a filter.
        ValueError: a pattern that chooses nothing, unless it stands for None and matches a layer that stays in high
            precision anyway; nothing to convert, unless a rule of a training scheme left a weight alone; an integer,
            complex, NaN or infinite weight; tied weights with different schemes; a model already sharded.
    """
    _check_schemes(schemes, kind)
    if filter_fn is None:
        filter_fn = _is_linear
    if not callable(filter_fn):
        raise TypeError(
            f"filter_fn must be a function of a module and its name, or None, got {filter_fn!r}; to choose by name "
            "give patterns, {'layers.*': scheme}"
        )
    patterns = schemes if isinstance(schemes, Mapping) else {"*": schemes}
    walk = _Walk(model, patterns, filter_fn, trains=kind is TrainingScheme)
    for prefix, module in model.named_modules():
        walk.visit(prefix, module)
    walk.settle_small()
    targets, report = list(walk.targets.values()), walk.report
    for target in targets:
        _check_target(target)
    if isinstance(schemes, Mapping):
        _check_patterns(walk)
    if not targets and not walk.left_by_rule:
        reasons = "; ".join(f"{fqn}: {why}" for fqn, why in list(report.left.items())[:4])
        raise ValueError(
            f"nothing to convert in {type(model).__name__} ({reasons or 'it has no nn.Linear'}); "
            "choose modules with filter_fn(module, name), or by patterns that give them a scheme"
        )
    shared = {owner.fqn for target in targets for owner in target.owners}
    report.entries = [e for e in report.entries if e.fqn not in shared]
    return targets, report


def _check_target(target: Target) -> None:
    fqn = target.owners[0].fqn
    if is_dtensor(target.weight):
        raise ValueError(
            f"{fqn} is a DTensor: convert the model before fully_shard or parallelize_module"
        )
    if isinstance(target.weight, nn.UninitializedParameter):
        raise ValueError(
            f"{fqn} has no shape yet: run the model once, so that its lazy modules are initialised"
        )
    if not isinstance(target.weight, LowbitTensor):  # training may start from a quantized one
        check_weight(target.weight, fqn)
    try:
        if is_conv(target):
            check_spec(target.scheme.weight)
            target.scheme.check(torch.empty(matrix_shape(target.weight.shape), device="meta"))
        else:
            target.scheme.check(target.weight)
    except ValueError as error:
        raise ValueError(f"{fqn}: {error}") from error


def _check_patterns(walk: _Walk) -> None:
    """Raise ValueError for a pattern that does nothing. None for a layer that stays in high precision anyway says how
    it is, and is no mistake."""
    unused = [
        pattern
        for pattern, scheme in walk.patterns.items()
        if pattern not in walk.used and not (scheme is None and walk.leaves_alone(pattern))
    ]
    if unused:
        targets = walk.targets.values()
        names = [e.fqn for e in walk.report.entries][:3] or [t.owners[0].fqn for t in targets][:3]
        left = [
            f"{e.fqn}: {e.note}"
            for e in walk.report.entries
            if any(matches(p, e.fqn) or matches(p, e.fqn.rpartition(".")[0]) for p in unused)
        ]
        why = f"; left alone: {'; '.join(left[:3])}" if left else ""
        raise ValueError(
            f"the patterns {unused} chose no weight (a pattern before them may match first); names end like {names}"
            f"{why}"
        )


class _Walk:
    """Visits each module and sorts its weights: to convert, by which scheme, or left alone, and why."""

    def __init__(
        self, model: nn.Module, patterns: Mapping[str, Any], filter_fn: Filter, trains: bool
    ) -> None:
        self.patterns, self.filter_fn, self.trains = patterns, filter_fn, trains
        self.owners = find_owners(model)
        attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
        self.attentions = {id(m.out_proj) for m in attentions}
        self.report = Report()
        self.targets: dict[int, Target] = {}
        self.used: set[str] = set()
        """The patterns that chose a weight, or left one alone."""
        self.schemes: dict[int, tuple[str, Any]] = {}
        """id of a parameter → the first name that a pattern matched, and its scheme or None."""
        self.left_by_rule = False
        """Whether a training scheme left a weight alone."""
        self.small: set[int] = set()
        """The ids of `targets` that are linear layers' weights, and that their training scheme leaves alone."""
        self.model = model

    def visit(self, prefix: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            note = "of a TorchScript module, which holds no low-bit weights: convert the module it was made of"
            for name, param in module.named_parameters(prefix, recurse=False):
                self.report.entries.append(Entry(name, _shape(param), False, note))
            return
        selected = self.filter_fn(module, prefix) or hasattr(module, "converted_as")
        if _has_own_product(module) and module._parameters.get("weight") is None:
            note = "computed from other parameters, so none to convert"
            self.report.entries.append(Entry(joined_name(prefix, "weight"), (), False, note))
        for name, param in _weights_of(module, selected):
            owner = Owner(module, name, joined_name(prefix, name))
            choice = self._choose(owner, prefix, param, selected)
            if isinstance(choice, str):
                self.report.entries.append(Entry(owner.fqn, _shape(param), False, choice))
            else:
                owners = tuple(self.owners[id(param)])
                self.targets.setdefault(id(param), Target(param, choice, owners))

    def settle_small(self) -> None:
        """Of weights that are too small alone, keep those whose layer follows a larger one, as key and value follow the
        query."""
        for key in self.small:
            small = self.targets[key]
            shape, scheme = small.weight.shape, small.scheme
            larger = filter(None, (self._larger_before(owner, small) for owner in small.owners))
            found = filter(None, (scheme.after_larger(shape, other) for other in larger))
            if beside := next(found, None):
                self.targets[key] = replace(small, scheme=beside)
            else:
                del self.targets[key]

    def _larger_before(self, owner: Owner, small: Target) -> Sequence[int] | None:
        """The shape of a larger weight with the scheme of `small` that multiplies the same input: that of a sibling
        by name, or else probably one of the linear layers with as many inputs that the module of both has right before
        this one."""
        path, _, name = owner.fqn.rpartition(".")[0].rpartition(".")
        parent = self.model.get_submodule(path)
        if isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            return None
        if group := group_of(name):
            children = [parent._modules.get(other) for other in group if other != name]
        else:
            children = list(takewhile(lambda child: child is not owner.module, parent.children()))
        found: Sequence[int] | None = None
        for child in children:
            if not isinstance(child, nn.Linear) or child.in_features != owner.module.in_features:
                found = found if group else None
                continue
            weight = child._parameters.get("weight")  # the attribute may compute it
            target = None if id(weight) in self.small else self.targets.get(id(weight))
            if weight is not None and target is not None and target.scheme == small.scheme:
                found = tuple(weight.shape)
        return found

    def leaves_alone(self, pattern: str) -> bool:
        """Whether `pattern`, which stands for None, is the first that matches a parameter or the layer that holds it.

        Raises ValueError where another name of such a parameter is converted.
        """
        found = False
        for prefix, module in self.model.named_modules():
            own = [(name, p) for name, p in module._parameters.items() if p is not None]
            is_layer = bool(own) and not any(
                True for c in module.children() for _ in c.parameters()
            )
            for name, param in own:
                fqn = joined_name(prefix, name)
                if self._first_match(*([prefix] if is_layer else []), fqn) != pattern:
                    continue
                found = True
                if id(param) in self.targets and id(param) in self.schemes:
                    self._check_ties(fqn, param, None)
        return found

    def _first_match(self, *names: str) -> str | None:
        """The pattern that decides on a weight with these names."""
        return next((p for p in self.patterns if any(matches(p, n) for n in names)), None)

    def _choose(self, owner: Owner, prefix: str, param: nn.Parameter, selected: bool) -> Any:
        """The scheme for this weight, or as a str the reason why it is left alone."""
        if (weight := weight_scaled_by(owner.module, owner.attribute)) is not None:
            return f"learned scales or zero points of {joined_name(prefix, weight)}"
        pattern = self._first_match(prefix, owner.fqn)
        scheme = None if pattern is None else self.patterns[pattern]
        starts = self.trains and scheme is not None and scheme.starts_from(param)
        refusal = _refusal(self.owners[id(param)], param, self.trains, starts)
        if not self._is_selected(owner, prefix, pattern, selected):
            return _why_not_selected(owner, refusal)
        if refusal is not None:
            return refusal
        if pattern is not None:
            self.used.add(pattern)
            self._check_ties(owner.fqn, param, scheme)
        if scheme is None:
            return "no scheme for this name"
        if isinstance(param, nn.UninitializedParameter):
            return scheme
        uses = {_use(other.module, self.attentions) for other in self.owners[id(param)]}
        obstacle = scheme.obstacle(_shape(param), uses)
        if obstacle is not None and self.trains:
            self.left_by_rule = True
            if uses == {"linear"}:
                self.small.add(id(param))
                self.targets[id(param)] = Target(param, scheme, tuple(self.owners[id(param)]))
        return scheme if obstacle is None else obstacle

    def _is_selected(self, owner: Owner, prefix: str, pattern: str | None, selected: bool) -> bool:
        """Whether the filter or a pattern asks for this parameter. `selected`: the filter takes the module."""
        if _has_own_product(owner.module):
            if owner.attribute == "weight":
                return selected
            if selected:  # an adapter beside the weight must not be frozen along with it
                return pattern is not None and not matches(pattern, prefix)
        return selected or self._filter_names(owner, prefix)

    def _filter_names(self, owner: Owner, prefix: str) -> bool:
        """Whether the filter takes this parameter by its name. Example: `name != "up"` refuses the module "up" and
        accepts "up.weight". It accepts "up.<no parameter>" too, so it means the module, and chooses no parameter."""
        others = joined_name(prefix, _NO_PARAMETER)
        return self.filter_fn(owner.module, owner.fqn) and not self.filter_fn(owner.module, others)

    def _check_ties(self, fqn: str, param: nn.Parameter, scheme: Any) -> None:
        first, its_scheme = self.schemes.setdefault(id(param), (fqn, scheme))
        if its_scheme != scheme:
            raise ValueError(
                f"{first} and {fqn} are one tied weight, but the patterns give them {its_scheme} and {scheme}; give "
                "both one scheme, or leave both alone"
            )


_NO_PARAMETER = "<no parameter>"
"""A name that no parameter has."""


def _is_linear(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Linear)


def _has_own_product(module: nn.Module) -> bool:
    """Whether the module multiplies by, convolves with, or looks up its parameter `weight` and no other."""
    return isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS))


def _shape(param: nn.Parameter) -> tuple[int, ...]:
    return () if isinstance(param, nn.UninitializedParameter) else tuple(param.shape)


def _weights_of(module: nn.Module, selected: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of two or more dimensions by attribute; of a selected module also those without a shape yet."""
    for name, param in module._parameters.items():
        if param is None:
            continue
        is_own = _has_own_product(module) and name == "weight"
        if isinstance(param, nn.UninitializedParameter):
            is_weight = is_own if _has_own_product(module) else selected
        else:
            is_weight = is_own or param.ndim >= 2
        if is_weight:
            yield name, param


def _refusal(owners: list[Owner], weight: Tensor, trains: bool, starts: bool) -> str | None:
    """Why no scheme can convert this weight, or None. `trains`: the schemes are training schemes. `starts`: the scheme
    of this weight trains from its codes."""
    if isinstance(weight, LowbitTensor) and not starts:
        return weight.already or f"already in low bits ({type(weight).__name__})"
    for module, _, _ in owners:
        if hasattr(module, "converted_as"):  # a module of lowbit that stands for others
            return str(module.converted_as)
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            return "its max_norm rewrites rows at every lookup"
        if isinstance(module, nn.Embedding) and module.sparse and trains:
            return "its embedding has sparse=True, and a low-bit weight takes dense gradients"
        without = trains and isinstance(module, CONVOLUTIONS)
        if without or (
            type(module).__module__.startswith("torch.nn") and not _has_own_product(module)
        ):
            return f"no low-bit product for {type(module).__name__}"
    of_convolutions = [_is_of_conv(owner) for owner in owners]
    if any(of_convolutions):
        return None if all(of_convolutions) else "one weight of a convolution and of another module"
    if not isinstance(weight, nn.UninitializedParameter) and weight.ndim > 3:
        return f"no low-bit product takes {weight.ndim} dimensions"
    return None


def _why_not_selected(owner: Owner, refusal: str | None) -> str:
    kind = type(owner.module).__name__
    if not _has_own_product(owner.module):
        return refusal or (
            f"a parameter of a {kind}: filter_fn can select it, the default takes nn.Linear only"
        )
    if owner.attribute == "weight":
        return "not selected by the filter"
    return f"beside the weight of a {kind}: a pattern or filter that names it converts it"


def _use(module: nn.Module, attentions: set[int]) -> str:
    """One of `USES`. `attentions`: ids of the modules whose weight nn.MultiheadAttention multiplies by itself."""
    if id(module) in attentions:
        return "attention"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, CONVOLUTIONS):
        return "conv"
    return "embedding" if isinstance(module, nn.Embedding) else "other"


# ---- the replacement ------------------------------------------------------------------------------------------


def replace_weights(
    targets: list[Target],
    report: Report,
    make: Callable[[Target], Tensor],
    trainable: bool,
    note: str | None = None,
) -> Report:
    """Replace each target by `make(target)` in every module that holds it, and complete the report.

    A weight that stays trainable keeps its accumulated gradient and its hooks. A quantized weight that training starts
    from becomes trainable. An optimizer that holds the old
    parameters raises at its next step (`lowbit.replaced`). Empties `targets`, so that the memory of each old weight is
    free before the next one is replaced.

    Args:
        note: what the report says of each; None for the scheme's description.
    """
    with progress("converting weights", sum(t.weight.nbytes for t in targets)) as advance:
        while targets:
            size = targets[0].weight.nbytes
            _replace(targets.pop(0), report, make, trainable, note)
            advance(size)
    return report


def _replace(
    target: Target,
    report: Report,
    make: Callable[[Target], Tensor],
    trainable: bool,
    note: str | None,
) -> None:
    starts = getattr(target.weight, "stored_as", None) is not None and target.scheme is not None
    keeps_grad = trainable and (starts or target.weight.requires_grad)
    new = nn.Parameter(make(target), requires_grad=keeps_grad)
    for module, name, _ in target.owners:
        module.register_parameter(name, new)
    first, *others = (owner.fqn for owner in target.owners)
    left_behind = hand_over(target.weight, new, first, trainable)
    shape = matrix_shape(new.shape) if is_conv(target) else new.shape
    about = note or target.scheme.describe(shape)
    about = f"{about}; {left_behind}" if left_behind else about
    report.entries.append(Entry(first, tuple(new.shape), True, about))
    report.entries += [Entry(fqn, tuple(new.shape), True, f"tied to {first}") for fqn in others]

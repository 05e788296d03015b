"""Walk a model and choose a scheme for each of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.adapters import adapter_modules
from lowbit.convert.by_name import check_schemes, first_match, matches, of_unused, unused
from lowbit.convert.choice import NAMED, Choice
from lowbit.convert.experts import is_bias, stores_inputs_first
from lowbit.convert.owners import Owner, check_held, check_module, find_owners, joined_name
from lowbit.convert.plan import Plan
from lowbit.convert.report import Entry, Report
from lowbit.convert.siblings import group_of
from lowbit.linear.frozen.kinds import representation_of
from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.schemes.low_bit_weights import LowbitWeight
from lowbit.schemes.scheme import Scheme
from lowbit.schemes.training import TrainingScheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.checks import check_weight
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.conv_tensor import CONVOLUTIONS, check_spec, matrix_shape
from lowbit.tensor.frozen.turned import spec_of_linears
from lowbit.tensor.trained.learned_scales import weight_scaled_by

Filter = Callable[[nn.Module, str], bool]
Schemes = Scheme | Mapping[str, Scheme | None]
TrainingSchemes = TrainingScheme | Mapping[str, TrainingScheme | None]
USES = ("linear", "embedding", "conv", "attention", "other")
"""How a module may use its weight. "attention" is the `out_proj` of nn.MultiheadAttention."""


@dataclass(frozen=True)
class Target:
    """A weight to convert, its scheme (a `Scheme` or `TrainingScheme`), and every module that holds it.

    A `Scheme` divides a weight of the shape `shape_of_blocks(target)` into blocks.
    """

    weight: Tensor
    scheme: Any
    owners: tuple[Owner, ...]

    @property
    def fqn(self) -> str:
        """The first of the fully qualified names of the weight."""
        return self.owners[0].fqn


def modules_of(targets: Iterable[Target]) -> set[nn.Module]:
    """The modules that hold these weights."""
    return {owner.module for target in targets for owner in target.owners}


def rounding_owners(target: Target) -> list[Owner]:
    """The linears and convolutions that round their inputs by the scheme of the weight that they hold. A static scale
    is calibrated on the input of the first one, for all of them."""
    kinds = (nn.Linear, *CONVOLUTIONS)
    return [owner for owner in target.owners if isinstance(owner.module, kinds)]


def is_conv(target: Target) -> bool:
    """True if the weight is stored as `lowbit.tensor.frozen.conv_tensor` says."""
    return _is_of_conv(target.owners[0])


def _is_of_conv(owner: Owner) -> bool:
    return isinstance(owner.module, CONVOLUTIONS) and owner.attribute == "weight"


def is_turned(target: Target) -> bool:
    """True if the weight is quantized with its last two dimensions swapped (`lowbit.convert.experts`)."""
    return any(stores_inputs_first(owner) for owner in target.owners)


def shape_of_blocks(target: Target) -> tuple[int, ...]:
    """The shape of the weight as it is quantized."""
    shape = tuple(target.weight.shape)
    if is_conv(target):
        return tuple(matrix_shape(shape))
    return (*shape[:-2], shape[-1], shape[-2]) if is_turned(target) else shape


def own_schemes(model: nn.Module) -> dict[str, Scheme]:
    """The scheme of each quantized weight of `model` that training can start from, by its first name, with scales of
    the dtype that it stores.

    Raises ValueError if there is none, and for one that is sharded.
    """
    found: dict[str, Scheme] = {}
    left: list[str] = []
    for owners in find_owners(model).values():
        module, name, fqn = owners[0]
        weight = module._parameters[name]
        if isinstance(held_locally(weight), AffineTensor):
            _check_whole(fqn, weight)
        if not isinstance(weight, AffineTensor):
            continue
        spec, activation = weight.spec, weight.activation
        is_static = activation is not None and activation.static
        if is_static or type(weight) is not representation_of(spec):
            left.append(fqn)
            continue
        is_free = spec.scale_format == "float" and spec.scale_dtype is None
        if is_free and spec.scale_dtype_for(weight.dtype) is not weight.scale.dtype:
            spec = replace(spec, scale_dtype=weight.scale.dtype)
        found[fqn] = Scheme(spec, activation)
    if not found:
        others = f"; {left[0]} has act-order or a static scale of its inputs" if left else ""
        raise ValueError(
            f"{type(model).__name__} has no weights in low bits with a scheme to train by{others}; a model that is "
            "prepared already needs no more, and a plain one takes a scheme, such as lowbit.Int4WeightOnly()"
        )
    return found


def find_targets(
    model: nn.Module,
    schemes: Schemes | TrainingSchemes,
    filter_fn: Filter | Choice | None,
    kind: type = Scheme,
    starts: bool = False,
) -> tuple[list[Target], Report]:
    """The weights to convert, all of them checked, and a report of the ones left alone.

    Args:
        model: whose modules hold the weights.
        schemes: one of `kind`; or a dict of name patterns to one of `kind` or None.
        filter_fn: chooses modules; None: `lowbit.convert.choice` says which weights the patterns take.
        kind: `Scheme` or `TrainingScheme`.
        starts: True if the schemes are `own_schemes`, so that training starts from quantized weights. A filter may then
            choose few of them.

    Raises:
        TypeError: not a scheme, not a module, not a filter.
        ValueError: a pattern that chooses nothing, unless it stands for None and matches a layer that stays in high
            precision anyway; nothing to convert, unless a rule of a training scheme left a weight alone or `schemes` is
            a plan that leaves all in high precision; an integer, complex, NaN or infinite weight; tied weights with
            different schemes; a model already sharded; a weight that accelerate offloads.
    """
    check_schemes(schemes, kind)
    check_module(model)
    if filter_fn is None:
        filter_fn = Choice(model)
    if not (isinstance(filter_fn, Choice) or callable(filter_fn)):
        raise TypeError(
            f"filter_fn must be a function of a module and its name, or None, got {filter_fn!r}; to choose by name "
            "give patterns, {'layers.*': scheme}"
        )
    patterns = schemes if isinstance(schemes, Mapping) else {"*": schemes}
    walk = _Walk(model, patterns, filter_fn, trains=kind is TrainingScheme, starts=starts)
    for prefix, module in model.named_modules():
        walk.visit(prefix, module)
    walk.settle_small()
    targets, report = list(walk.targets.values()), walk.report
    for target in targets:
        _check_target(target)
    if isinstance(schemes, Mapping) and not starts:
        _check_patterns(walk)
    leaves_all = isinstance(schemes, Plan) and not any(schemes.values())
    if not targets and not walk.left_by_rule and not leaves_all:
        reasons = "; ".join(f"{fqn}: {why}" for fqn, why in list(report.left.items())[:4])
        raise ValueError(
            f"nothing to convert in {type(model).__name__} ({reasons or 'it has no nn.Linear'}); "
            "choose modules with filter_fn(module, name), or by patterns that name their weights"
        )
    shared = {owner.fqn for target in targets for owner in target.owners}
    report.entries = [e for e in report.entries if e.fqn not in shared]
    return targets, report


def _check_whole(fqn: str, weight: Any) -> None:
    if is_dtensor(weight):
        raise ValueError(
            f"{fqn} is a DTensor: convert the model before fully_shard, parallelize_module or "
            "apply_expert_parallelism"
        )


def _check_target(target: Target) -> None:
    fqn = target.fqn
    _check_whole(fqn, target.weight)
    check_held(target.owners[0], target.weight)
    if isinstance(target.weight, nn.UninitializedParameter):
        raise ValueError(
            f"{fqn} has no shape yet: run the model once, so that its lazy modules are initialised"
        )
    if not isinstance(target.weight, LowbitTensor):  # training may start from a quantized one
        check_weight(target.weight, fqn)
    try:
        if is_conv(target):
            check_spec(target.scheme.weight)
        if isinstance(target.scheme, Scheme):
            target.scheme.check(torch.empty(shape_of_blocks(target), device="meta"))
        else:
            target.scheme.check(target.weight)
    except ValueError as error:
        raise ValueError(f"{fqn}: {error}") from error


def _check_patterns(walk: _Walk) -> None:
    """Raise ValueError for a pattern that does nothing."""
    idle = unused(walk.patterns, walk.used, walk.leaves_alone)
    if idle:
        targets = walk.targets.values()
        names = [e.fqn for e in walk.report.entries][:3] or [t.fqn for t in targets][:3]
        left = [
            f"{e.fqn}: {e.note}"
            for e in walk.report.entries
            if first_match(idle, e.fqn, e.fqn.rpartition(".")[0]) is not None
        ]
        if left and left[0].endswith(NAMED):
            _, dot, last = left[0].partition(":")[0].removesuffix(".weight").rpartition(".")
            left[0] += f" ('{'*.' if dot else ''}{last}' does)"
        why = f"; left alone: {'; '.join(left[:3])}" if left else ""
        raise ValueError(f"{of_unused(idle, names)}{why}")


class _Walk:
    """Visits each module and sorts its weights: to convert, by which scheme, or left alone, and why."""

    def __init__(
        self,
        model: nn.Module,
        patterns: Mapping[str, Any],
        chosen_by: Filter | Choice,
        trains: bool,
        starts: bool,
    ) -> None:
        self.patterns, self.chosen_by, self.trains = patterns, chosen_by, trains
        self.starts = starts
        """True if training starts from quantized weights, for which alone there are patterns."""
        self.owners = find_owners(model)
        self.adapters = set() if trains else adapter_modules(model)
        attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
        self.attentions = {id(m.out_proj) for m in attentions}
        self.report = Report()
        self.targets: dict[int, Target] = {}
        self.used: set[str] = set()
        """The patterns that chose a weight, or left one alone."""
        self.schemes: dict[int, tuple[str, Any]] = {}
        """id of a parameter → the first name that a pattern matched, and its scheme or None."""
        self.left_by_rule = False
        """True once a training scheme left a weight alone."""
        self.small: set[int] = set()
        """The ids of `targets` that are weights of linear layers and too small for their training scheme."""
        self.model = model

    def visit(self, prefix: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            note = "of a TorchScript module, which holds no low-bit weights: convert the module it was made of"
            for name, param in module.named_parameters(prefix, recurse=False):
                self.report.entries.append(Entry(name, _shape(param), False, note))
            return
        selected = self._selects(module, prefix)
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
        """Keep a weight that is too small alone if it has a larger sibling, as key and value have the query."""
        for key in self.small:
            small = self.targets[key]
            shape, scheme = small.weight.shape, small.scheme
            larger = (other for owner in small.owners for other in self._siblings_of(owner, small))
            found = filter(None, (scheme.after_larger(shape, other) for other in larger))
            if beside := next(found, None):
                self.targets[key] = replace(small, scheme=beside)
            else:
                del self.targets[key]

    def _siblings_of(self, owner: Owner, small: Target) -> Iterator[Sequence[int]]:
        """The shapes of the siblings' weights that the scheme of `small` converts by itself."""
        path, _, name = owner.fqn.rpartition(".")[0].rpartition(".")
        parent = self.model.get_submodule(path)
        for other in group_of(name):
            child = parent._modules.get(other)
            if isinstance(child, nn.Linear) and child.in_features == owner.module.in_features:
                weight = child._parameters.get("weight")  # the attribute may compute it
                target = None if id(weight) in self.small else self.targets.get(id(weight))
                if target is not None and target.scheme == small.scheme:
                    yield target.weight.shape

    def leaves_alone(self, pattern: str) -> bool:
        """True if `pattern`, which gives None, is the first that matches a parameter or the layer that holds it.

        Raises ValueError if another name of such a parameter is converted.
        """
        found = False
        for prefix, module in self.model.named_modules():
            own = [(name, p) for name, p in module._parameters.items() if p is not None]
            is_layer = bool(own) and not any(
                True for c in module.children() for _ in c.parameters()
            )
            for name, param in own:
                fqn = joined_name(prefix, name)
                if first_match(self.patterns, *([prefix] if is_layer else []), fqn) != pattern:
                    continue
                found = True
                if id(param) in self.targets and id(param) in self.schemes:
                    self._check_ties(fqn, param, None)
        return found

    def _choose(self, owner: Owner, prefix: str, param: nn.Parameter, selected: bool) -> Any:
        """The scheme for this weight; or, as a str, why the weight is left alone."""
        if owner.module in self.adapters:
            return "of an adapter, which stays in high precision"
        if (weight := weight_scaled_by(owner.module, owner.attribute)) is not None:
            return f"learned scales or zero points of {joined_name(prefix, weight)}"
        if is_bias(owner):
            return "the biases of stacked experts"
        pattern = first_match(self.patterns, prefix, owner.fqn)
        scheme = None if pattern is None else self.patterns[pattern]
        starts = scheme is not None and (self.starts or (self.trains and scheme.starts_from(param)))
        refusal = _refusal(self.owners[id(param)], param, self.trains, starts)
        left = self._why_left(owner, prefix, pattern, selected)
        if left == _NOT_SELECTED and _has_own_product(owner.module):
            return left
        if refusal is not None:
            return refusal
        uses = {_use(other.module, self.attentions) for other in self.owners[id(param)]}
        obstacle = None
        if scheme is not None and not isinstance(param, nn.UninitializedParameter):
            obstacle = scheme.obstacle(_shape(param), uses)
        if left is not None:  # what no pattern could change says more than that none names it
            return obstacle if obstacle is not None and uses == {"embedding"} else left
        if pattern is not None:
            self.used.add(pattern)
            self._check_ties(owner.fqn, param, scheme)
        if scheme is None:
            return "no scheme for this name"
        obstacle = obstacle or self._why_plain(owner, scheme)
        if obstacle is None:
            return scheme if self.trains else _in_order_of_linears(scheme, owner)
        if self.trains:
            self.left_by_rule = True
            if uses == {"linear"}:
                self.small.add(id(param))
                self.targets[id(param)] = Target(param, scheme, tuple(self.owners[id(param)]))
        return obstacle

    def _why_plain(self, owner: Owner, scheme: Any) -> str | None:
        """Why this training scheme does not take these experts unless a filter selects them."""
        is_stored_only = isinstance(scheme, LowbitWeight) and not scheme.products
        multiplies = self.trains and not is_stored_only
        if multiplies and isinstance(self.chosen_by, Choice) and stores_inputs_first(owner):
            return (
                "stored as [experts, inputs, outputs], for which training has no low-bit products"
            )
        return None

    def _selects(self, module: nn.Module, prefix: str) -> bool:
        """True if the filter takes the module. Without a filter, each weight is chosen by itself."""
        if isinstance(self.chosen_by, Choice):
            return isinstance(module, nn.Linear)
        return bool(self.chosen_by(module, prefix))

    def _why_left(
        self, owner: Owner, prefix: str, pattern: str | None, selected: bool
    ) -> str | None:
        """Why neither the filter nor a pattern asks for this parameter; None: one does. `selected`: the filter takes
        the module."""
        module, attribute, _ = owner
        if _has_own_product(module) and attribute != "weight" and selected:
            # an adapter beside the weight must not be frozen along with it
            is_named = pattern is not None and not matches(pattern, prefix)
            return None if is_named else _BESIDE.format(type(module).__name__)
        if isinstance(self.chosen_by, Choice):
            return self.chosen_by.why_left(owner, prefix, pattern)
        if selected:
            return None
        if _has_own_product(module):
            if attribute == "weight":
                return _NOT_SELECTED
            return (
                None if self._filter_names(owner, prefix) else _BESIDE.format(type(module).__name__)
            )
        return None if self._filter_names(owner, prefix) else _NOT_SELECTED

    def _filter_names(self, owner: Owner, prefix: str) -> bool:
        """True if the filter takes this parameter by its name. Example: `name != "up"` refuses the module "up" and
        accepts "up.weight". That filter accepts "up.<no parameter>" too, so it means the module, not a parameter."""
        others = joined_name(prefix, _NO_PARAMETER)
        asks: Any = self.chosen_by
        return asks(owner.module, owner.fqn) and not asks(owner.module, others)

    def _check_ties(self, fqn: str, param: nn.Parameter, scheme: Any) -> None:
        first, its_scheme = self.schemes.setdefault(id(param), (fqn, scheme))
        if its_scheme != scheme:
            raise ValueError(
                f"{first} and {fqn} are one tied weight, but the patterns give them {its_scheme} and {scheme}; give "
                "both one scheme, or leave both alone"
            )


def _in_order_of_linears(scheme: Scheme, owner: Owner) -> Scheme:
    """`PerBlock(g, 1)`, groups of g inputs in the order of experts [E, K, N], is `PerGroup(g)` as they are stored."""
    if not stores_inputs_first(owner):
        return scheme
    inputs = owner.module._parameters[owner.attribute].shape[1]  # type: ignore[union-attr]
    return replace(scheme, weight=spec_of_linears(scheme.weight, inputs))


_NOT_SELECTED = "not selected by the filter"
_BESIDE = "beside the weight of a {}: a pattern or filter that names it converts it"
_NO_PARAMETER = "<no parameter>"
"""A name that no parameter has."""


def _has_own_product(module: nn.Module) -> bool:
    """True if the module multiplies by, convolves with, or looks up its parameter `weight` and no other."""
    return isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS))


def _shape(param: nn.Parameter) -> tuple[int, ...]:
    return () if isinstance(param, nn.UninitializedParameter) else tuple(param.shape)


def _weights_of(module: nn.Module, selected: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of two or more dimensions by attribute, and those of a selected module that have no shape yet."""
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
    trains from the codes of this weight."""
    if isinstance(weight, LowbitTensor) and not starts:
        return weight.already or f"already in low bits ({type(weight).__name__})"
    for module, _, _ in owners:
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


def _use(module: nn.Module, attentions: set[int]) -> str:
    """One of `USES`. `attentions`: ids of the modules whose weight nn.MultiheadAttention multiplies by itself."""
    if id(module) in attentions:
        return "attention"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, CONVOLUTIONS):
        return "conv"
    return "embedding" if isinstance(module, nn.Embedding) else "other"

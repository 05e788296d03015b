"""The units of a plan: weights that take one scheme, and the ways to store them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lowbit.convert import (
    Filter,
    Schemes,
    Target,
    adapter_modules,
    find_owners,
    find_targets,
    pattern_of,
    shape_of_blocks,
    unit_of,
)
from lowbit.inference.quantize import quantized, quantizing
from lowbit.layers.exchange import Held, exchanged
from lowbit.layers.frozen import shown_class
from lowbit.numerics.search import Scales
from lowbit.numerics.super_blocks import INPUTS
from lowbit.schemes.scheme import Scheme
from lowbit.tracing.damage import Changed


@dataclass(frozen=True)
class Option:
    """One way to store the weights of a unit.

    Attributes:
        targets: the weights that are quantized, each with its scheme.
        plain: the weights of the unit that stay in high precision.
        scales: how scales are chosen, as `lowbit.quantize_` takes it.
    """

    targets: tuple[Target, ...]
    plain: tuple[Target, ...]
    scales: Scales | None

    @property
    def schemes(self) -> dict[str, Scheme | None]:
        """Patterns to schemes, one for each weight."""
        found = {_pattern(target): target.scheme for target in self.targets}
        return {**found, **dict.fromkeys(map(_pattern, self.plain))}

    def weights(self) -> list[Tensor]:
        """The quantized weights of `targets`."""
        return list(map(quantizing(self.targets, self.scales), self.targets))

    def held(self, weights: Sequence[Tensor]) -> list[Held]:
        """What the modules hold with these weights."""
        found: dict[int, Held] = {}
        for target, weight in zip(self.targets, weights, strict=True):
            parameter = nn.Parameter(weight, requires_grad=False)
            for owner in target.owners:
                held = found.get(id(owner.module))
                own = {} if held is None else held.parameters
                kind = shown_class(owner.module)
                found[id(owner.module)] = Held(
                    owner.module, kind, {**own, owner.attribute: parameter}
                )
        return list(found.values())

    def changed(self, keep: bool = True) -> Changed:
        """A function that gives the context in which the model holds the quantized weights. Without `keep` they are
        made each time."""
        if not keep:
            return lambda: exchanged(self.held(self.weights()))
        return partial(exchanged, self.held(self.weights()))

    def nbytes(self) -> int:
        """Bytes of the weights, by their shapes. Those of K-quants are those of the file (`SuperBlocks`)."""
        return sum(map(_nbytes, self.targets)) + sum(t.weight.nbytes for t in self.plain)


def _nbytes(target: Target) -> int:
    kind, shape = target.scheme.weight.super_blocks, shape_of_blocks(target)
    if kind is not None:
        blocks = -(-shape[-1] // INPUTS)
        return math.prod(shape[:-1]) * blocks * int(kind.nbytes)
    like = replace(target, weight=target.weight.detach().to("meta"))
    stored: Any = quantized(like, "minmax", None)
    return int(stored.nbytes_stored())


@dataclass
class Unit:
    """Weights that take one scheme.

    Attributes:
        name: of the unit.
        weights: by the id of the tensor.
        options: the ways to store them; the first leaves all in high precision.
    """

    name: str
    weights: dict[int, Target] = field(default_factory=dict)
    options: list[Option] = field(default_factory=list)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that hold the weights, each once."""
        return list(
            {id(o.module): o.module for t in self.weights.values() for o in t.owners}.values()
        )

    def uniform(self, i: int) -> Scheme | None:
        """The scheme of all weights under an option; None where there are several, or a weight stays plain."""
        option = self.options[i]
        schemes = list(option.schemes.values())
        return schemes[0] if len({*schemes}) == 1 else None


def units_of(
    model: nn.Module, candidates: Sequence[Schemes], filter_fn: Filter | None, scales: Scales | None
) -> list[Unit]:
    """The units of the weights that the candidates take, in the order of the model. Without a filter a scheme takes
    embeddings, too.

    Raises what `lowbit.quantize_` raises; NotImplementedError for a static activation, whose scale no batch has found.
    """
    if filter_fn is None:
        candidates = [_with_embeddings(model, one) for one in candidates]
    found = [find_targets(model, one, filter_fn)[0] for one in candidates]
    units: dict[str, Unit] = {}
    for target in (t for own in found for t in own):
        if target.scheme.is_static:
            raise NotImplementedError(
                f"{target.fqn}: {target.scheme} has static activations; accepted: dynamic ones. Calibrate "
                "with the finished plan, after you have changed its schemes to static ones"
            )
        unit = units.setdefault(_unit_of(target), Unit(_unit_of(target)))
        unit.weights.setdefault(id(target.weight), target)
    for unit in units.values():
        everything = tuple(unit.weights.values())
        unit.options.append(Option((), everything, scales))
    for own in found:
        by_unit: dict[str, list[Target]] = {}
        for target in own:
            by_unit.setdefault(_unit_of(target), []).append(target)
        for name, targets in by_unit.items():
            unit, taken = units[name], {id(t.weight) for t in targets}
            plain = tuple(t for key, t in unit.weights.items() if key not in taken)
            option = Option(tuple(targets), plain, scales)
            if all(option.schemes != other.schemes for other in unit.options):
                unit.options.append(option)
    return list(units.values())


def _with_embeddings(model: nn.Module, given: Schemes) -> Schemes:
    """A bare scheme, and patterns that name the embeddings which it takes."""
    if not isinstance(given, Scheme):
        return given
    adapters = adapter_modules(model)
    names = {}
    for own in find_owners(model).values():
        is_free = all(
            isinstance(o.module, nn.Embedding)
            and o.module.max_norm is None
            and o.module not in adapters
            for o in own
        )
        weight: Any = own[0].module._parameters[own[0].attribute]
        if is_free and given.obstacle(tuple(weight.shape), {"embedding"}) is None:
            names[pattern_of(tuple(o.fqn for o in own))] = given
    return {**names, "*": given} if names else given


def _unit_of(target: Target) -> str:
    return unit_of(target.fqn, target.weight.shape)


def _pattern(target: Target) -> str:
    return pattern_of(tuple(owner.fqn for owner in target.owners))


def whole(
    model: nn.Module, schemes: Schemes, filter_fn: Filter | None, scales: Scales | None
) -> Option:
    """The whole model, quantized by these schemes."""
    return Option(tuple(find_targets(model, schemes, filter_fn)[0]), (), scales)

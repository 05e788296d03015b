"""Which weights of a model are quantized while `from_pretrained` loads it, decided on its skeleton on meta."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lowbit.convert import Report, families_of, find_targets, is_turned
from lowbit.formats.folder_choice import FolderChoice
from lowbit.schemes.scheme import Scheme


@dataclass
class WeightChoice:
    """The weights that are quantized, and a report of the others.

    Attributes:
        schemes: the scheme of each weight that is quantized, by every name of the weight.
        transposed: names of the weights that the model stores as [experts, inputs, outputs]. They are quantized as
            [experts, outputs, inputs], so that groups run along the inputs, and transposed.
        report: of the other weights.
        siblings: for each weight that shares a part of its scales with others, the names of all of these weights.
    """

    schemes: dict[str, Scheme]
    transposed: set[str]
    report: Report
    siblings: dict[str, tuple[str, ...]]


def plan(model: Any, patterns: Mapping[str, Scheme | None], experts: bool) -> WeightChoice:
    """Choose by `patterns` and `experts` as `LowbitConfig` says, in a `model` of transformers or diffusers on meta.

    Raises ValueError: nothing to quantize, a pattern that chooses nothing, a weight that its scheme does not take, tied
    weights with different schemes.
    """
    with _tied(model):
        targets, report = find_targets(model, dict(patterns), FolderChoice(model, experts))
    owners = [(owner, t.scheme) for t in targets for owner in t.owners]
    schemes = {owner.fqn: scheme for owner, scheme in owners}
    transposed = {owner.fqn for t in targets if is_turned(t) for owner in t.owners}
    families = [tuple(t.fqn for t in family) for family in families_of(targets)]
    siblings = {name: family for family in families for name in family}
    return WeightChoice(schemes, transposed, report, siblings)


@contextmanager
def _tied(model: Any) -> Iterator[None]:
    """Tie the weights that transformers ties after it read them, so that the walk finds one weight."""
    apart = []
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        layer, _, attribute = name.rpartition(".")
        module = model.get_submodule(layer)
        apart.append((module, attribute, module._parameters[attribute]))
        module._parameters[attribute] = model.get_parameter(source)
    try:
        yield
    finally:
        for module, attribute, param in apart:
            module._parameters[attribute] = param

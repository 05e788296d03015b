"""Which weights of a model of transformers are quantized while it loads, decided on its skeleton on meta."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lowbit.convert import Report, families_of, find_targets, first_match
from lowbit.formats.layer_names import is_router, why_left_alone
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
    """Choose by `patterns` and `experts` as `LowbitConfig` says, in a `model` of transformers on meta.

    Raises ValueError: nothing to quantize, a pattern that chooses nothing, a weight that its scheme does not take, tied
    weights with different schemes.
    """
    chosen = _WalkFilter(model, patterns, experts)
    with _tied(model):
        targets, report = find_targets(model, dict(patterns), chosen)
    owners = [(owner, t.scheme) for t in targets for owner in t.owners]
    schemes = {owner.fqn: scheme for owner, scheme in owners}
    transposed = {
        owner.fqn
        for owner, _ in owners
        if getattr(owner.module, "is_transposed", False)
        and owner.attribute in _stacks(owner.module)
    }
    report.entries = [replace(e, note=chosen.reasons.get(e.fqn, e.note)) for e in report.entries]
    families = [tuple(t.owners[0].fqn for t in family) for family in families_of(targets)]
    siblings = {name: family for family in families for name in family}
    return WeightChoice(schemes, transposed, report, siblings)


@contextmanager
def _tied(model: Any) -> Iterator[None]:
    """Tie the weights that transformers ties after it read them, so that the walk finds one weight."""
    apart = []
    for name, source in model.all_tied_weights_keys.items():
        layer, _, attribute = name.rpartition(".")
        module = model.get_submodule(layer)
        apart.append((module, attribute, module._parameters[attribute]))
        module._parameters[attribute] = model.get_parameter(source)
    try:
        yield
    finally:
        for module, attribute, param in apart:
            module._parameters[attribute] = param


class _WalkFilter:
    """The filter of the walk. `reasons`: why it refused a weight, by name."""

    def __init__(self, model: Any, patterns: Mapping[str, Scheme | None], experts: bool) -> None:
        self.patterns, self.experts = patterns, experts
        self.head = model.get_output_embeddings()
        self.reasons: dict[str, str] = {}

    def __call__(self, module: nn.Module, name: str) -> bool:
        if _stacks(module):
            return self._takes_experts(module, name)
        is_own_router = is_router(name) and module._parameters.get("weight") is not None
        if not (isinstance(module, nn.Linear | nn.Embedding) or is_own_router):
            note = f"a parameter of a {type(module).__name__}: lowbit.quantize_ with a filter can convert it"
            self.reasons |= {f"{name}.{n}": note for n in module._parameters}
            return False
        names = (name, f"{name}.weight")
        pattern = first_match(self.patterns, *names)
        is_embedding = isinstance(module, nn.Embedding)
        why = why_left_alone(name, pattern, is_embedding, module is self.head)
        if why is not None:
            self.reasons[names[1]] = why
        return why is None

    def _takes_experts(self, module: nn.Module, name: str) -> bool:
        """True for the stacked weights of experts, of three dimensions, not for their stacked biases, of two."""
        stacked = _stacks(module)
        matrices = [n for n, p in module._parameters.items() if p is not None and p.ndim >= 2]
        last = name.rpartition(".")[2]
        # The walk calls this for each parameter of a module that is refused.
        selected = last in stacked if stacked != matrices else last not in module._parameters
        if not self.experts:
            self.reasons |= {f"{name}.{n}": "of experts, and experts=False" for n in stacked}
        return selected and self.experts


def _stacks(module: nn.Module) -> list[str]:
    """The parameters with one matrix for each expert, of a module that is not a layer of torch."""
    if type(module).__module__.startswith("torch.nn"):
        return []
    return [n for n, p in module._parameters.items() if p is not None and p.ndim == 3]

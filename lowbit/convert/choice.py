"""Which weights patterns take where no filter chooses: one rule for every flow.

| a weight                                                         | a bare scheme, "*"   | a pattern that names it |
|------------------------------------------------------------------|----------------------|-------------------------|
| of an `nn.Linear`; stacked experts                                | taken                | taken                   |
| of a router                                                      | left alone           | taken                   |
| of an `nn.Embedding` or a convolution; a parameter of a module of | left alone           | taken                   |
| another class                                                    |                      |                         |

Any other pattern, such as "model.layers.*", takes what the bare scheme takes of the names that it matches. A pattern
names a weight if it matches the weight, or the module of a parameter `weight`, and no other name in its place
(`names_outright`): "*.mlp.gate" and "*.gate.weight", not "*gate*" and "*e".

`lowbit.interop.hf.plan` has the same rule for a model that is loaded, besides the head and embeddings.
"""

from __future__ import annotations

from torch import nn

from lowbit.convert.by_name import matches, names_outright
from lowbit.convert.experts import routers_of, stacked
from lowbit.convert.owners import Owner
from lowbit.tensor.frozen.conv_tensor import CONVOLUTIONS

NAMED = "a pattern that names it converts it"
"""The end of the report's note on a weight that no pattern names."""


class Choice:
    """The rule for one model. A flow with further rules has a subclass."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = routers_of(model)

    def why_left(self, owner: Owner, layer: str, pattern: str | None) -> str | None:
        """Why the pattern that matches this weight does not take it; None: it does.

        Args:
            owner: the weight and the module that holds it.
            layer: the name of the module.
            pattern: the first that matches the layer or the weight; None if none does.
        """
        module, attribute, fqn = owner
        is_router = layer in self.routers
        is_of_layer = attribute == "weight" and isinstance(module, nn.Linear)
        if not is_router and (is_of_layer or attribute in stacked(module, layer)):
            return None
        names = (layer, fqn) if attribute == "weight" else (fqn,)
        if pattern is not None and _names(pattern, *names):
            return None
        return f"{'a router' if is_router else _kind(module)}: {NAMED}"


def _names(pattern: str, name: str, *others: str) -> bool:
    """True if the pattern matches one of the names, and no longer one than the first."""
    is_matched = any(matches(pattern, each) for each in (name, *others))
    return is_matched and names_outright(pattern, name)


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding):
        return "an embedding"
    if isinstance(module, CONVOLUTIONS):
        return "a convolution"
    return f"a parameter of a {type(module).__name__}"

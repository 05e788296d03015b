"""A low-bit weight that is made inside a graph of torch.compile, from inner tensors that are the graph's inputs.

Code that torch.compile traces imports this module while it is traced, since the import brings the compiler along.
"""

from __future__ import annotations

from torch import Tensor

from lowbit.linear.frozen.whole import taken_whole
from lowbit.tensor.core.forms import form


@taken_whole
def made(name: str, sources: str, *parts: Tensor) -> Tensor:
    """The weight of the form of this name over its inner tensors. `sources` only tells graphs apart."""
    kind, names, context, shape, strides = form(name)
    return kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, shape, strides)

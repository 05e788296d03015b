"""Runs a new program, and compares its outputs with the expected ones, for the example call that was traced.

A faulty compiler or lowering makes a program that runs and computes something else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map

from lowbit.formats.base import FormatError
from lowbit.formats.programs.base import Call
from lowbit.formats.programs.capture import first_line, quiet
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.codebook_tensor import CodebookTensor

TOLERANCE, TOLERANCE_FLOAT32 = 0.3, 0.001
"""The largest accepted ‖y − ŷ‖ / ‖y‖ of an output: for models that compute in 16 bits or TF32 or round the inputs of
products, and for others. Another order of sums moves the outputs by less. A wrong weight in each layer gives values
near 1."""


def outputs_of(program: ExportedProgram, call: Call) -> list[Tensor]:
    """The outputs of the traced graph for the example call. The model and the inputs stay as they are."""
    with quiet():
        module = program.module(check_guards=False)
    own = {buffer.data_ptr() for buffer in call.model.buffers()}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.data_ptr() in own:  # a call may write to the buffer
                owner._buffers[name] = buffer.clone()
    return called(module, call)


def outputs_of_model(call: Call) -> list[Tensor]:
    """The outputs of the model for the example call. Its buffers and the inputs stay as they are."""
    buffers = {name: buffer.clone() for name, buffer in call.model.named_buffers()}

    def run(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(call.model, buffers, args, kwargs)

    return called(run, call)


@torch.no_grad()
def called(run: Callable[..., Any], call: Call) -> list[Tensor]:
    """The floating-point outputs of `run` for copies of the example inputs.

    Integers are left out: a small difference may change the likeliest token."""
    args, kwargs = tree_map(_copy, (call.args, call.kwargs))
    with quiet():
        found = tree_leaves(run(*args, **kwargs))
    return [t for t in found if isinstance(t, Tensor) and t.is_floating_point()]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def compare(
    name: str,
    run: Callable[[], list[Tensor]],
    reference: Callable[[], list[Tensor]],
    tolerance: float,
) -> None:
    """Raise FormatError if the program fails, or gives other outputs than the reference.

    Args:
        name: of the format.
        run: loads the program and calls it.
        reference: gives the expected outputs. A model that draws random numbers gives others at each call, and is not
            compared.
        tolerance: from `tolerance_of`.
    """
    expected = reference()
    try:
        found = run()
    except Exception as error:  # runtimes raise errors of many kinds
        raise FormatError(
            f"the {name} program was written and does not run: {first_line(error)}"
        ) from error
    apart = difference(found, expected)
    noise = difference(reference(), expected) if apart > tolerance else 0.0
    if apart > tolerance + 2 * noise and noise <= tolerance:
        raise FormatError(
            f"the {name} program was written and computes something else than the model: its outputs have a relative "
            f"error of {apart:.2g} for example_inputs; please report it"
        )


def tolerance_of(program: ExportedProgram, call: Call) -> float:
    """The largest difference that another order of sums may cause."""
    narrow = any(
        isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 4
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        for value in tree_leaves(node.meta.get("val"))
    )
    narrow = narrow or torch.get_float32_matmul_precision() != "highest"
    narrow = narrow or any(map(_rounds_inputs, call.weights.values()))
    return TOLERANCE if narrow else TOLERANCE_FLOAT32


def _rounds_inputs(weight: LowbitTensor) -> bool:
    known = isinstance(weight, AffineTensor | CodebookTensor)
    return not known or getattr(weight, "activation", None) is not None


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest ‖y − ŷ‖ / ‖y‖ of an output, over the finite elements of y; infinite for other shapes and for NaN."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return math.inf
    return max(map(_relative, found, expected), default=0.0)


def _relative(found: Tensor, expected: Tensor) -> float:
    y, got = expected.detach().double().flatten(), found.detach().double().flatten()
    finite = y.isfinite()
    y, error = y[finite], (got[finite] - y[finite]).norm()
    relative = float(error / y.norm()) if y.any() else float(error)
    return relative if math.isfinite(relative) else math.inf

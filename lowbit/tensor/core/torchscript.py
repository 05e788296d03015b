"""Refuses TorchScript, which has no place for a low-bit weight.

TorchScript keeps the memory of each parameter. A low-bit tensor has none of its own, only its inner tensors have, so a
saved module would hold zeros. `torch.export` takes low-bit tensors apart, and `lowbit.export` writes the result.

Every module with a low-bit parameter has `refuse_script` as its `__prepare_scriptable__`, which `torch.jit.script`
calls before anything else. A trace refuses with the first operation on such a tensor.
"""

from __future__ import annotations

from typing import NoReturn

import torch

is_traced = torch._C._get_tracing_state
"""Not None while `torch.jit.trace` or `torch.onnx.export(…, dynamo=False)` runs. torch.compile knows this one."""
PREPARE = "__prepare_scriptable__"
"""The attribute of a module that `torch.jit.script` calls."""


def refuse_script() -> NoReturn:
    """Raise NotImplementedError, for a module with a low-bit parameter."""
    _refuse("torch.jit.script")


def refuse_trace() -> NoReturn:
    """Raise NotImplementedError, for an operation on a low-bit tensor."""
    _refuse("torch.jit.trace (also in torch.onnx.export with dynamo=False)")


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} makes TorchScript, which saves zeros in place of low-bit weights; accepted: "
        "torch.export.export(model, inputs), which torch.export.save writes, or lowbit.export(model, file, 'aoti', "
        "example_inputs=inputs) and 'onnx' or 'executorch'; lowbit.dequantize_(model) gives a plain model"
    )

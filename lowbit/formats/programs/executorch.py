"""A program of ExecuTorch, "executorch": int8 inputs times int4 or int8 weights in XNNPACK, as phones run it.

Weights and inputs become the ops of `torch.ops.quantized_decomposed`, which ExecuTorch's XNNPACK partitioner turns into
its own kernels:

    scheme of a linear                       inputs                          weights
    int8 inputs of dynamic scale             asymmetric, a scale a token     int8 or int4 in rows, int4 in groups
    int8 inputs of static scale              the scale of the scheme         int8 in rows

- XNNPACK rounds dynamic inputs asymmetrically, for any mapping of the scheme. The step is never larger than that of
  symmetric rounding. `Spec(Int(8), PerToken(), "asymmetric")` as the activation of a Scheme trains with that rounding.
- XNNPACK stores scales of groups in bfloat16. Weights whose scales are other numbers are refused, or rounded (`lossy`).
- XNNPACK multiplies static int8 only if the next op, after a ReLU or none, is static int8 too. Otherwise ExecuTorch
  dequantizes the weight at each call and multiplies in float32, with the same values.
- int8 embeddings in rows stay packed too, by `quantized_decomposed.embedding_byte`.

After writing, the program runs once, and its outputs are compared with those of the graph that was lowered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from lowbit.formats.base import FormatError, with_qparams
from lowbit.formats.integers import (
    IntegerLayout,
    exact_scales,
    integers_of,
    layout_of,
)
from lowbit.formats.programs.base import Call, ProgramFormat, package
from lowbit.formats.programs.capture import Use, first_line, quiet, root_cause, traced_with
from lowbit.formats.programs.running import called, compare, outputs_of, tolerance_of
from lowbit.formats.sources import Item
from lowbit.numerics.granularity import PerToken
from lowbit.numerics.number_format import Int
from lowbit.numerics.snr import snr
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor

GROUP_STEP = 32
"""XNNPACK takes groups of multiples of this size."""
_ACCEPTED = (
    "Int8DynamicActivationInt8Weight, Int8DynamicActivationInt4Weight with groups of a multiple of 32, "
    "Int8StaticActivationInt8Weight, and int8 embeddings in rows"
)


class ExecuTorch(ProgramFormat):
    name = "executorch"
    suffix = ".pte"
    scale_dtype = torch.bfloat16

    def write(self, call: Call, path: Path, lossy: bool) -> list[Item]:
        exir, xnnpack = _packages()
        define_ops()
        items: dict[str, Item] = {}

        def replace(name: str, weight: LowbitTensor, use: Use) -> nn.Module:
            module, items[name] = _module_of(name, weight, use, lossy)
            return module

        program = traced_with(call, replace)
        try:
            with torch.no_grad(), quiet():
                # The second partitioner takes the products in float32 of weights that are dequantized at each call.
                partitioners = [xnnpack(), xnnpack(force_non_static_weights_for_f32_linear=True)]
                edge = exir.to_edge_transform_and_lower(program, partitioner=partitioners)
                edge.to_executorch().save(str(path))
        except OSError:
            raise
        except Exception as error:  # ExecuTorch raises errors of many kinds
            raise FormatError(
                f"ExecuTorch cannot lower the program: {first_line(root_cause(error))}"
            ) from error

        def reference() -> list[Tensor]:
            return outputs_of(program, call)

        compare(self.name, lambda: _run(path, call), reference, tolerance_of(program, call))
        return list(items.values())


def _run(path: Path, call: Call) -> list[Tensor]:
    """The outputs of the file for the example call."""
    with quiet():
        runtime = package("executorch.runtime", "executorch").Runtime.get()
        method = runtime.load_program(str(path)).load_method("forward")
    return called(lambda *args, **kwargs: method.execute(tree_leaves((args, kwargs))), call)


def define_ops() -> None:
    """Let torch define the ops of `quantized_decomposed`."""
    with quiet():
        import torch.ao.quantization.fx._decomposed  # noqa: F401


def _packages() -> tuple[Any, Any]:
    """The package that lowers programs, and the partitioner of XNNPACK."""
    with quiet():
        exir = package("executorch.exir", "executorch")
        package("executorch.kernels.quantized", "executorch")
        part = "executorch.backends.xnnpack.partition.xnnpack_partitioner"
        return exir, package(part, "executorch").XnnpackPartitioner


def _module_of(name: str, weight: LowbitTensor, use: Use, lossy: bool) -> tuple[nn.Module, Item]:
    """The module that takes the place of a use of the weight, and the entry of the report."""
    matrix, layout = _integers(weight, use)
    note, loss = weight.stored_format(), None
    if layout.group_size is not None:
        matrix, loss = _with_short_scales(matrix, lossy)
    item = Item(name, weight, "other", note, loss)
    if use == "embedding":
        return _Embedding(matrix, layout), item
    assert matrix.activation is not None
    linear = _StaticLinear if matrix.activation.static else _DynamicLinear
    return linear(matrix, layout), item


def _integers(weight: LowbitTensor, use: Use) -> tuple[AffineTensor, IntegerLayout]:
    """The weight and its layout. Raises FormatError for a weight that XNNPACK has no kernel for."""
    if type(weight) is not AffineTensor:
        raise FormatError(f"executorch holds {_ACCEPTED}; got {weight.stored_format()}")
    spec, activation = weight.spec, weight.activation
    is_plain = spec.has_zero_point or spec.format not in (Int(4), Int(8))
    if is_plain or (use == "embedding" and spec.format != Int(8)) or use == "values":
        place = "" if use == "linear" else f" used for its {'rows' if use == 'embedding' else use}"
        raise FormatError(f"executorch holds {_ACCEPTED}; got {weight.stored_format()}{place}")
    if weight.dtype is not torch.float32:
        raise FormatError(
            f"executorch programs compute in float32, got {weight.dtype}: call model.float(), which keeps codes"
        )
    layout = layout_of(weight, "executorch")
    by_group = layout.group_size is not None
    if use == "linear" and not _fits(activation, layout):
        raise FormatError(f"executorch holds {_ACCEPTED}; got {weight.stored_format()}")
    if by_group and (
        use == "embedding" or layout.bits != 4 or (layout.group_size or 0) % GROUP_STEP
    ):
        raise FormatError(f"executorch holds {_ACCEPTED}; got {weight.stored_format()}")
    return weight, layout


def _fits(activation: Spec | None, layout: IntegerLayout) -> bool:
    """True if XNNPACK multiplies inputs of this spec by such weights."""
    if activation is None or activation.format != Int(8) or activation.zero_point_is_value:
        return False
    if activation.static:
        return layout.bits == 8 and layout.group_size is None
    return isinstance(activation.granularity, PerToken)


def _with_short_scales(weight: AffineTensor, lossy: bool) -> tuple[AffineTensor, float | None]:
    """The weight with scales of bfloat16, and the signal-to-noise ratio if its values changed."""
    try:
        exact_scales(weight.scale, torch.bfloat16, "XNNPACK")
        return weight, None
    except FormatError as error:
        if not lossy:
            raise FormatError(f"{error}; lossy=True rounds them, and states the loss") from error
    values = weight.dequantize()
    qparams = weight.spec.search_qparams(values, torch.bfloat16)
    rounded = with_qparams(values, Scheme(weight.spec, weight.activation), qparams)
    return rounded, snr(values, rounded.dequantize())


# ---- the modules ---------------------------------------------------------------------------------------------------


class _Weight(nn.Module):
    """codes int8 [N, K], scale [N] or [N, groups] float32, zero points of 0."""

    codes: Tensor
    scale: Tensor
    zeros: Tensor

    def __init__(self, weight: AffineTensor, layout: IntegerLayout) -> None:
        super().__init__()
        codes, scale, _ = integers_of(weight, layout)
        self.group_size = layout.group_size
        self.low, self.high = -layout.middle, layout.middle - 1
        scale = scale.float() if self.group_size else scale[:, 0].float()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale.contiguous())
        kind = torch.int32 if self.group_size else torch.int64
        self.register_buffer("zeros", torch.zeros(scale.shape, dtype=kind))

    def values(self) -> Tensor:
        """float32 [N, K]."""
        ops = torch.ops.quantized_decomposed
        if self.group_size is None:
            return ops.dequantize_per_channel.default(
                self.codes, self.scale, self.zeros, 0, self.low, self.high, torch.int8
            )
        return ops.dequantize_per_channel_group.default(
            *(self.codes, self.scale, self.zeros, self.low, self.high, torch.int8),
            *(self.group_size, torch.float32),
        )


class _DynamicLinear(_Weight):
    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        ops = torch.ops.quantized_decomposed
        scale, zero = ops.choose_qparams_per_token_asymmetric.default(x, torch.int8)
        codes = ops.quantize_per_token.default(x, scale, zero, -128, 127, torch.int8)
        rounded = ops.dequantize_per_token.default(
            codes, scale, zero, -128, 127, torch.int8, torch.float32
        )
        return F.linear(rounded, self.values(), bias)


class _StaticLinear(_Weight):
    def __init__(self, weight: AffineTensor, layout: IntegerLayout) -> None:
        super().__init__(weight, layout)
        activation = weight.activation
        assert activation is not None and weight.input_scale is not None
        assert isinstance(activation.format, Int)
        zero = 0 if weight.input_zero_point is None else int(weight.input_zero_point)
        bounds = activation.format.quant_min, activation.format.quant_max
        self._input = (float(weight.input_scale), zero, *bounds, activation.format.dtype)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        ops = torch.ops.quantized_decomposed
        codes = ops.quantize_per_tensor.default(x, *self._input)
        return F.linear(ops.dequantize_per_tensor.default(codes, *self._input), self.values(), bias)


class _Embedding(_Weight):
    def forward(self, indices: Tensor) -> Tensor:
        return torch.ops.quantized_decomposed.embedding_byte.default(
            self.codes, self.scale, None, self.low, self.high, indices
        )

"""ConvTensor: the weight of an nn.Conv1d or nn.Conv2d in integer or float8 codes.

A weight [N, C/groups, k…] is stored as the matrix [N, K] of its rows, K = C/groups · k…, exactly as an
`AffineTensor` or a `Float8Tensor` of that matrix. So `PerRow` gives each output channel one scale, `PerGroup(g)` one to
each g consecutive elements of a row, with the kernel's positions of one input channel next to each other, and
`PerBlock(a, b)` one to each a x b of the matrix. K is padded to a whole number of groups: a depthwise 3 x 3 kernel has
K = 9, and wants `PerRow`.

    y = conv(round(x), (code − zero_point) · scale, bias)

The convolution is torch's own, of the dequantized weight and of x, rounded where the scheme has an activation. Its
result has the memory format that x asks for. Codes save memory and bytes of a checkpoint, but not time: each call
dequantizes the weight, and products run in high precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.linear.frozen.checks import autocast_inputs
from lowbit.linear.frozen.kinds import representation_of
from lowbit.numerics.spec import Spec
from lowbit.tensor.core import LowbitTensor, check_weight, is_traced, refuse_trace
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.float8_tensor import Float8Tensor

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
"""The modules whose weight is stored as a matrix. torch multiplies in each by the function of `_FUNCTIONS`."""
_FUNCTIONS = (F.conv1d, F.conv2d)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """[N, K] of a weight [N, C/groups, k…]."""
    return shape[0], math.prod(shape[1:])


class ConvTensor(AffineTensor):
    """The weight of a convolution. `ConvTensor.from_float(weight, scheme)` makes one. Scales and zero points have the
    shape that they have for the matrix [N, K]."""

    @classmethod
    def from_float(cls, weight: Tensor, *args: Any, **kwargs: Any) -> ConvTensor:
        """Quantize `weight` [N, C/groups, k…]. Arguments and errors are those of `AffineTensor.from_float`."""
        return cls.of_matrix(
            AffineTensor.from_float(_matrix(weight), *args, **kwargs), weight.shape
        )

    @classmethod
    def searched(cls, weight: Tensor, *args: Any, **kwargs: Any) -> ConvTensor:
        """`AffineTensor.searched` of the matrix. `importance` is broadcastable to [N, K]."""
        return cls.of_matrix(AffineTensor.searched(_matrix(weight), *args, **kwargs), weight.shape)

    @classmethod
    def quantized(cls, weight: Tensor, *args: Any, **kwargs: Any) -> ConvTensor:
        """`AffineTensor.quantized` of the matrix."""
        return cls.of_matrix(AffineTensor.quantized(_matrix(weight), *args, **kwargs), weight.shape)

    @classmethod
    def of_matrix(cls, matrix: AffineTensor, shape: Sequence[int]) -> Self:
        """The weight of this shape over the memory of a quantized matrix [N, K], an AffineTensor or Float8Tensor."""
        return cls.from_inner(matrix.inner_tensors(), matrix.meta(), shape, matrix.dtype)

    @property
    def matrix(self) -> AffineTensor:
        """The matrix [N, K], over the same memory."""
        kind = representation_of(self.spec)
        shape = matrix_shape(self.shape)
        return kind.from_inner(self.inner_tensors(), self.meta(), shape, self.dtype)

    def _like(self, matrix: AffineTensor) -> Self:
        return self._with(matrix.inner_tensors(), (matrix.shape[0], *self.shape[1:]))

    # ---- AffineTensor's methods ------------------------------------------------------------------------------

    def check_meta(self) -> None:
        LowbitTensor.check_meta(self)
        if self.transposed is not False:
            raise ValueError(f"transposed must be False, got {self.transposed!r}")
        check_spec(self.spec)

    def shape_of_codes(self, shape: Sequence[int]) -> tuple[int, ...]:
        return matrix_shape(shape)

    def _stored_values(self) -> Tensor:
        return super()._stored_values().view(self.shape)

    def _as_stored(self, values: Tensor) -> tuple[AffineTensor, Tensor]:
        return self.matrix, values.flatten(1)

    def _blocks_along(self, dim: int) -> int:
        return self.matrix._blocks_along(dim)

    def _slice(self, dim: int, start: int, end: int) -> Self:
        if dim != 0:
            raise self._unsupported(
                f"slicing along dimension {dim} (accepted: dimension 0, output channels)"
            )
        return self._like(self.matrix._slice(0, start, end))

    def _view(self, shape: tuple[int, ...]) -> Any:
        """`flatten(1)`, as weight standardisation asks for it: the matrix, whose products round no input."""
        if shape != matrix_shape(self.shape):
            return None
        own = {name: t for name, t in self.inner_tensors().items() if name not in self._of_input()}
        return self.matrix._with(own, activation=None)

    def _cat(self, tensors: Sequence[Self], dim: int) -> Self:
        if dim != 0:
            raise self._unsupported(
                f"cat along dimension {dim} (accepted: dimension 0, output channels)"
            )
        return self._like(self.matrix._cat([t.matrix for t in tensors], 0))

    def _pad_rows(self, rows: int) -> Self:
        return self._like(self.matrix._pad_rows(rows))

    def _transposed(self) -> Self:
        raise self._unsupported("transposition")

    def _expert(self, index: int) -> Any:
        """An output channel, as plain values."""
        return self._row(index)

    def holds(self, values: Tensor) -> bool:
        return self.matrix.holds(values.flatten(1))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUNCTIONS:
            if is_traced() is not None:
                refuse_trace()
            return _convolved(func, *args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def check_spec(spec: Spec) -> None:
    """Raise ValueError for a spec whose weights a class of the user's own stores."""
    kind = representation_of(spec)
    if kind not in (AffineTensor, Float8Tensor):
        raise ValueError(
            f"no convolution of a weight that a {kind.__name__} stores, {spec}; accepted: specs that AffineTensor and "
            "Float8Tensor store, or leave it out by filter_fn or a pattern"
        )


def _matrix(weight: Tensor) -> Tensor:
    check_weight(weight)
    if weight.ndim not in (3, 4):
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)}; accepted: [N, C/groups, k] of nn.Conv1d and "
            "[N, C/groups, kh, kw] of nn.Conv2d"
        )
    return weight.detach().flatten(1)


def check_convolution(input: Any, weight: Any) -> None:
    """Raise NotImplementedError unless `weight` is the low-bit operand, and the only one, and ValueError for tensors
    on several devices."""
    if isinstance(input, LowbitTensor) or not isinstance(weight, LowbitTensor):
        raise NotImplementedError(
            f"a convolution of a {type(input).__name__} and a {type(weight).__name__}: only the weight, the second, "
            "may be in low bits; accepted: plain inputs, or .dequantize()"
        )
    if input.device != weight.device:
        raise ValueError(
            f"a convolution of an input on {input.device} with a weight on {weight.device}; accepted: both on one "
            "device, by model.to(device) or input.to(device)"
        )


def _convolved(
    convolution: Callable[..., Tensor],
    input: Tensor,
    weight: Any,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """F.conv1d or F.conv2d of a plain input and a ConvTensor. Differentiable in the input and the bias."""
    with torch._C.DisableTorchFunctionSubclass():
        check_convolution(input, weight)
        x, bias = autocast_inputs(input, weight, bias, "convolution")
        x = weight.rounded_input(x)
        return convolution(x, weight.dequantize().to(x.dtype), bias, *args, **kwargs)

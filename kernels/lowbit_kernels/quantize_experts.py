"""The transposed copy of the row codes of experts' weights.

    scale[e, n]         = max_k |weight[e, n, k]| / L             L = 127 (int8), 448 (e4m3), 57344 (e5m2)
    codes_t[e, k, n]    = round(weight[e, n, k] / scale[e, n])    to nearest even

    weight    float32, bfloat16 or float16 [E, N, K], any strides
    codes_t   int8, float8_e4m3fn or float8_e5m2 [E, K, N rounded up to a multiple of 16], 0 in the padding
    scale     float32 [E, N]

These are the codes and scales of `quantize_rowcol` for the rows of each expert, so the gradient of an expert's input
reads the same weight as its output. Scales of zeros, NaN and infinities are as there.

`quantize_grouped_sm90.cu` reads the weight from memory once. Elsewhere PyTorch operations do the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit_kernels import nvrtc, quantize_grouped_sm90, quantize_rowcol
from lowbit_kernels.launches import ran
from lowbit_kernels.library import FLOATS, register
from lowbit_kernels.quantize_rowcol import FORMATS


def quantize_experts(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """codes_t and scale; shapes, dtypes and the formula are in the module's docstring.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: an unknown format, or a shape other than [E, N, K].
    """
    return torch.ops.lowbit.quantize_experts(weight, format)


def reference(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """The formula in PyTorch ops, on any device."""
    _check(weight, format)
    experts, n, k = weight.shape
    flat = weight.reshape(experts * n, k)
    codes, scale, _, _ = quantize_rowcol.reference(flat, format, columns=False)
    own = codes.view(experts, n, codes.shape[1])[..., :k].mT.view(torch.uint8)
    return F.pad(own, (0, -n % 16)).contiguous().view(codes.dtype), scale.view(experts, n)


def _allocate(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    experts, n, k = weight.shape
    codes_t = weight.new_empty((experts, k, n + -n % 16), dtype=FORMATS[format][0])
    return codes_t, weight.new_empty((experts, n), dtype=torch.float32)


def _launch(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    _check(weight, format)
    if weight.numel() and nvrtc.runs_on_hopper(weight.device):
        ran("quantize_experts", "sm90")
        codes_t, scale = _allocate(weight, format)
        quantize_grouped_sm90.weights(weight, format, codes_t, scale)
        return codes_t, scale
    ran("quantize_experts", "torch")
    return reference(weight, format)


def _fake(weight, format) -> tuple[Tensor, Tensor]:
    _check(weight, format)
    return _allocate(weight, format)


def _check(weight: Tensor, format: str) -> None:
    if weight.dtype not in FLOATS:
        raise TypeError(
            f"quantize_experts takes a weight of {', '.join(map(str, FLOATS))}; got {weight.dtype}"
        )
    if weight.dim() != 3:
        raise ValueError(f"quantize_experts takes a weight [E, N, K], got {tuple(weight.shape)}")
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")


register(
    "quantize_experts(Tensor weight, str format) -> (Tensor, Tensor)",
    _launch,
    _fake,
)

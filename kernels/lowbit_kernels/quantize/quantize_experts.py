"""The codes of experts' weights, along rows or transposed.

    codes[e, n, :], scale[e, n]    those that `quantize_rowcol` gives the row weight[e, n, :]

    weight    float32, bfloat16 or float16 [E, N, K], any strides
    codes     in `format`, as of `quantize_rowcol` [E, N, K rounded up to a multiple of 16], 0 in the padding;
              ``transposed``: [E, K, N rounded up to a multiple of 16]
    scale     float32 [E, N]

So the gradient of an expert's input can read the same codes as its output. Scales of zeros, NaN and infinities are as
in `quantize_rowcol`. A transposed copy with the scales of an earlier call, ``scale``, reads the weight once, without a
pass for the largest magnitudes.

On Hopper, a row of at most 2048 elements stays in the registers of a warp. The kernel of `quantize_rowcol`, which gives
a row to a block, is slower for so many short rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit_kernels.quantize import quantize_grouped_sm90, quantize_rowcol
from lowbit_kernels.quantize.quantize_rowcol import FORMATS, encode
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launch_plan import Buffer
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op


@op(
    "allocate(weight, format, transposed)",
    planned=True,
    weight="float [E, N, K]",
    scale="float32 [E, N]",
    rules={
        "quantize_rowcol.check_format(format, False)": "",
        "scale is None or transposed": "scale is for codes with transposed=True; leave it out",
    },
)
def quantize_experts(
    weight: Tensor, format: str, *, transposed: bool = False, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """codes and scale; see the module's docstring."""
    experts, n, k = weight.shape
    flat = weight.reshape(experts * n, k)
    codes, found, _, _ = quantize_rowcol.reference(flat, format, columns=False)
    if scale is not None:
        values = encode(flat.float(), scale.reshape(-1, 1), format, None)
        codes = F.pad(values.view(torch.uint8), (0, -k % 16)).view(codes.dtype)
    found = found.view(experts, n) if scale is None else scale.clone()
    codes = codes.view(experts, n, codes.shape[1])
    if transposed:
        own = codes[..., :k].mT.view(torch.uint8)
        codes = F.pad(own, (0, -n % 16)).contiguous().view(codes.dtype)
    return codes, found


reference = quantize_experts.reference


def results_of(
    experts: int, n: int, k: int, format: str, transposed: bool
) -> tuple[Buffer, Buffer]:
    """codes and scale."""
    across, along = (k, n) if transposed else (n, k)
    codes = Buffer((experts, across, along + -along % 16), FORMATS[format][0])
    return codes, Buffer((experts, n), torch.float32)


def allocate(weight: Tensor, format: str, transposed: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised results."""
    experts, n, k = weight.shape
    codes, scale = results_of(experts, n, k, format, transposed)
    return codes.empty(weight), scale.empty(weight)


@quantize_experts.kernel
def _launch(weight, format, transposed, scale) -> tuple[Tensor, Tensor] | None:
    if not (weight.numel() and nvrtc.runs_on_hopper(weight.device)):
        return None
    ran("quantize_experts", "sm90")
    experts, n, k = weight.shape
    if not transposed and k > quantize_grouped_sm90.MOST_SHORT:
        flat = weight.reshape(experts * n, k)
        codes, found, _, _ = quantize_rowcol.quantize_rowcol(flat, format, columns=False)
        return codes.view(experts, n, codes.shape[1]), found.view(experts, n)
    results = results_of(experts, n, k, format, transposed)
    if transposed:
        codes, found = quantize_grouped_sm90.weights_t(weight, format, scale, results)
    else:
        codes, found = quantize_grouped_sm90.weights(weight, format, results)
    return codes, found

"""The codes of weights, transposed.

    out[e, k, n] = codes[e, n, k] for k < K

    codes  int8, float8_e4m3fn or float8_e5m2 [E, N, Kp]
    k      K, at most Kp
    out    like codes, [E, K, N rounded up to a multiple of 16], 0 in the padding

So the product for the input's gradient reads the codes that the forward product reads. PyTorch's copy of a transposed
tensor moves single bytes; the Triton kernel moves tiles. `after` is that of `int4_to_int8`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, launch, runs_on, tl, triton

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@op(
    "empty(codes.dtype, E, k, N + -N % 16)",
    planned=True,
    codes="codes [E, N, K]",
    rules={"0 <= k <= K": "k must be 0 to K, here {K}, got {k}"},
)
def transpose_codes(codes: Tensor, k: int, after: Tensor | None = None) -> Tensor:
    """The transposed codes; see the module's docstring."""
    own = codes.view(torch.uint8)[..., :k].mT
    return F.pad(own, (0, -codes.shape[1] % 16)).contiguous().view(codes.dtype)


reference = transpose_codes.reference


@jit
def _kernel(codes, out, n, k, width, width_t, across, tiles, BLOCK: tl.constexpr):
    expert = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = tile // across * BLOCK + tl.arange(0, BLOCK)
    column = tile % across * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None] * width + column[None, :]
    inside = (row < n)[:, None] & (column < k)[None, :]
    found = tl.load(codes + expert * n * width + at, mask=inside, other=0)
    to = column[:, None] * width_t + row[None, :]
    wanted = (column < k)[:, None] & (row < width_t)[None, :]
    tl.store(out + expert * k * width_t + to, tl.trans(found), mask=wanted)


@transpose_codes.kernel
def _launch(codes: Tensor, k: int, after: Tensor | None) -> Tensor | None:
    if not (codes.numel() and k and runs_on(codes.device)):
        return None
    ran("transpose_codes", "triton")
    own = codes.contiguous()
    experts, n, width = codes.shape
    out = codes.new_empty((experts, k, n + -n % 16))
    block = 32 if codes.device.type == "cpu" else 128
    across = triton.cdiv(k, block)
    tiles = triton.cdiv(n, block) * across
    as_bytes = own.view(torch.uint8), out.view(torch.uint8)
    launch(
        "transpose_codes",
        (codes, after),
        (out,),
        _kernel,
        tiles * experts,
        (*as_bytes, n, k, width, out.shape[2], across, tiles),
        {"BLOCK": block, "num_warps": 8},
    )
    return out

"""The nearest orthogonal matrix, about, of many matrices at once, and of sharded ones.

Newton-Schulz iterations of an odd polynomial of degree 5 with the coefficients (a, b, c) of Keller Jordan's Muon
(https://kellerjordan.github.io/posts/muon/) send all singular values near 1::

    X = U / max(norm(U), eps)
    X = a X + (b A + c A A) X,  A = X X^T        (X transposed first, where it is tall)

A sharded matrix is gathered, every rank orthogonalizes it and keeps its own part: what one process would get.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    matrices: Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    *,
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """`matrices` [count, rows, cols] with their singular values near 1, in their dtype; see the module."""
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns, as which a parameter of this shape is seen."""
    return shape[0], math.prod(shape[1:])


def working_dtype(param: Tensor) -> torch.dtype:
    """In which matrices are orthogonalized where this parameter's are."""
    device = param.device_mesh.device_type if isinstance(param, DTensor) else param.device.type
    return torch.bfloat16 if device == "cuda" else torch.float32


def gathered(param: Tensor, part: Tensor) -> Tensor:
    """The whole of what this rank has a part of, on the mesh's device."""
    if not isinstance(param, DTensor):
        return part
    mesh, shape = param.device_mesh, param.shape
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    sharded = DTensor.from_local(
        part, mesh, param.placements, run_check=False, shape=shape, stride=stride
    )
    return sharded.full_tensor()


def own_part(param: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of what every rank has the whole of."""
    if not isinstance(param, DTensor):
        return whole
    copies = [Replicate()] * param.device_mesh.ndim
    same = DTensor.from_local(whole.contiguous(), param.device_mesh, copies, run_check=False)
    return same.redistribute(param.device_mesh, param.placements).to_local()

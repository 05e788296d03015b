"""The linear of a prepared model, for weights that tensor parallelism has split over ranks.

`F.linear` of DTensors is taken apart below autograd, where a weight sees the product but not its gradients. So
`prepare_` makes each `nn.Linear` a `Linear`, which hands the local parts to the weight's own product and says how
the result is placed:

    weight         input       output      gradient of the input
    Shard(0)       Replicate   Shard(-1)   Partial       columns of the output, as ColwiseParallel splits it
    Shard(1)       Shard(-1)   Partial     Shard(-1)     terms of each sum, as RowwiseParallel splits it
    Replicate      any         the same    the same
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from lowbit.tensor.bitnet import BitNetTensor, bitnet_linear
from lowbit.train.bitnet_scale import sharded_scale
from lowbit.train.locate import share_scales


class Linear(nn.Linear):
    """nn.Linear, also where its weight is a DTensor over a low-bit one."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(self.weight, DTensor):
            return sharded_linear(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Tensor parallelism replaces the weight by this."""
        super().register_parameter(name, param)
        if isinstance(param, DTensor):
            share_scales(param)


def sharded_linear(input: Any, weight: DTensor, bias: Any) -> Tensor:
    """input [..., K], a DTensor or the same tensor on every rank, times weight [N, K] transposed, plus bias [N].

    Raises:
        NotImplementedError: a weight placed otherwise than the module's table tells.
    """
    mesh, last = weight.device_mesh, input.ndim - 1
    if not isinstance(input, DTensor):
        input = DTensor.from_local(input, mesh, [Replicate()] * mesh.ndim, run_check=False)
    plans = [_plan(w, x, last) for w, x in zip(weight.placements, input.placements, strict=True)]
    needs, gives, grad_x, grad_weight, bias_as = (
        list(column) for column in zip(*plans, strict=True)
    )
    x = input.redistribute(mesh, needs).to_local(grad_placements=grad_x)
    local: Any = weight.to_local(grad_placements=grad_weight)
    is_bitnet = isinstance(local, BitNetTensor)
    y = bitnet_linear(x, local, None, sharded_scale(weight)) if is_bitnet else F.linear(x, local)
    if bias is not None:
        y = y + _local_bias(bias, mesh, bias_as, gives, grad_weight)
    shape = torch.Size((*input.shape[:-1], weight.shape[0]))
    return DTensor.from_local(
        y, mesh, gives, run_check=False, shape=shape, stride=_contiguous(shape)
    )


def _plan(weight: Any, x: Any, last: int) -> tuple[Any, Any, Any, Any, Any]:
    """Along one dimension of the mesh, the placements of: the input, the output, their gradients' (the input's and
    the weight's), the bias."""
    if weight == Shard(0):
        return Replicate(), Shard(last), Partial(), Shard(0), Shard(0)
    if weight == Shard(1):
        return Shard(last), Partial(), Shard(last), Shard(1), Replicate()
    if not isinstance(weight, Replicate):
        raise NotImplementedError(
            f"a linear's weight placed as {weight}; accepted: Shard(0), Shard(1), Replicate()"
        )
    if isinstance(x, Shard) and x.dim < last:
        return x, x, x, Partial(), Replicate()
    return Replicate(), Replicate(), Replicate(), Replicate(), Replicate()


def _local_bias(bias: Any, mesh: Any, placed: Any, output: Any, grad_weight: Any) -> Tensor:
    """This rank's term of the bias. Of a partial output only the first rank adds it; its gradient, that of the sum,
    is the same on all."""
    if not isinstance(bias, DTensor):
        bias = DTensor.from_local(bias, mesh, [Replicate()] * mesh.ndim, run_check=False)
    pairs = zip(placed, grad_weight, strict=True)
    grads = [Partial() if isinstance(g, Partial) else p for p, g in pairs]
    local = bias.redistribute(mesh, placed).to_local(grad_placements=grads)
    partial = [dim for dim, p in enumerate(output) if isinstance(p, Partial)]
    if any(mesh.get_local_rank(dim) for dim in partial):
        return local - local.detach()
    return local


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides)

"""The product of a linear whose low-bit weight tensor parallelism has split over ranks.

torch decomposes `F.linear` of DTensors below autograd, where a weight sees the product but not its gradients. So a
prepared linear hands the local parts to the weight's own product, and declares the placement of the result:

    weight         input       output      gradient of the input
    Shard(0)       Replicate   Shard(-1)   Partial       columns of the output, as ColwiseParallel splits it
    Shard(1)       Shard(-1)   Partial     Shard(-1)     terms of each sum, as RowwiseParallel splits it
    Replicate      any         the same    the same
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.numerics.sharded import is_dtensor
from lowbit.tensor.core.dtensor import replicated
from lowbit.tensor.trained.trainable import TrainableTensor
from lowbit_kernels.runtime.library import contiguous_strides

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def sharded_linear(
    input: Any,
    weight: DTensor,
    bias: Any,
    product: Callable[[Tensor, Any, list[Any]], Tensor] | None = None,
) -> Tensor:
    """input [..., K], a DTensor or the same tensor on every rank, times weight [N, K] transposed, plus bias [N].

    Args:
        product: of the local input and weight, in place of the weight's own. Its third argument is the placement of the
            weight's gradient along each dimension of the mesh.

    Raises:
        NotImplementedError: a placement of the weight that is not in the module's table.
    """
    from torch.distributed.tensor import DTensor

    mesh, last = weight.device_mesh, input.ndim - 1
    if not is_dtensor(input):
        input = replicated(input, mesh)
    plans = [_plan(w, x, last) for w, x in zip(weight.placements, input.placements, strict=True)]
    needs, gives, grad_x, grad_weight, bias_as = (
        list(column) for column in zip(*plans, strict=True)
    )
    x = input.redistribute(mesh, needs).to_local(grad_placements=grad_x)
    local: Any = weight.to_local(grad_placements=grad_weight)
    if product is not None:
        y = product(x, local, grad_weight)
    elif isinstance(local, TrainableTensor):
        y = local.sharded_product(x, weight)
    else:
        y = F.linear(x, local)
    if bias is not None:
        y = y + _local_bias(bias, mesh, bias_as, gives, grad_weight)
    shape = torch.Size((*input.shape[:-1], weight.shape[0]))
    return DTensor.from_local(
        y, mesh, gives, run_check=False, shape=shape, stride=contiguous_strides(shape)
    )


def _plan(weight: Any, x: Any, last: int) -> tuple[Any, Any, Any, Any, Any]:
    """Along one dimension of the mesh, the placements of the input, the output, the input's gradient, the weight's
    gradient, and the bias."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if weight == Shard(0):
        return Replicate(), Shard(last), Partial(), Shard(0), Shard(0)
    if weight == Shard(1):
        return Shard(last), Partial(), Shard(last), Shard(1), Replicate()
    if not weight.is_replicate():
        raise NotImplementedError(
            f"a linear's weight placed as {weight}; accepted: Shard(0), Shard(1), Replicate()"
        )
    if isinstance(x, Shard) and x.dim < last:
        return x, x, x, Partial(), Replicate()
    return Replicate(), Replicate(), Replicate(), Replicate(), Replicate()


def _local_bias(bias: Any, mesh: Any, placed: Any, output: Any, grad_weight: Any) -> Tensor:
    """This rank's term of the bias. Only the first rank adds it to a partial output; all ranks have its gradient."""
    if not is_dtensor(bias):
        bias = replicated(bias, mesh)
    from torch.distributed.tensor import Partial

    pairs = zip(placed, grad_weight, strict=True)
    grads = [Partial() if g.is_partial() else p for p, g in pairs]
    local = bias.redistribute(mesh, placed).to_local(grad_placements=grads)
    partial = [dim for dim, p in enumerate(output) if p.is_partial()]
    if any(mesh.get_local_rank(dim) for dim in partial):
        return local - local.detach()
    return local

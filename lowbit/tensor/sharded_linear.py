"""The linear of a prepared model, for weights that tensor parallelism has split over ranks.

`F.linear` of DTensors is taken apart below autograd, where a weight sees the product but not its gradients. So
`lowbit.train.prepare_` and `lowbit.qat.prepare_` make each `nn.Linear` a `Linear`, which hands the local parts to the
weight's own product and says how the result is placed:

    weight         input       output      gradient of the input
    Shard(0)       Replicate   Shard(-1)   Partial       columns of the output, as ColwiseParallel splits it
    Shard(1)       Shard(-1)   Partial     Shard(-1)     terms of each sum, as RowwiseParallel splits it
    Replicate      any         the same    the same
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import functional as F

from lowbit.tensor.bitnet import BitNetTensor, GatheredBitNet, bitnet_linear
from lowbit.tensor.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.int8_weight import Int8WeightTensor
from lowbit.tensor.ternary import magnitude, scale_of


class Linear(nn.Linear):
    """nn.Linear, also where its weight is a DTensor over a low-bit one."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight  # once: nn.Module looks parameters up in Python
        if isinstance(weight, DTensor):
            return sharded_linear(input, weight, self.bias)
        return F.linear(input, weight, self.bias)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Tensor parallelism replaces the weight by this."""
        if isinstance(param, DTensor):
            check_whole_blocks(param)
        super().register_parameter(name, param)
        if isinstance(param, DTensor):
            share_scales(param)


def make_shardable(modules: Iterable[nn.Module]) -> None:
    """Make each plain `nn.Linear` of `modules` a `Linear`, in place."""
    for module in modules:
        if type(module) is nn.Linear:
            module.__class__ = Linear


def make_plain(modules: Iterable[nn.Module]) -> None:
    """Undo `make_shardable`."""
    for module in modules:
        if type(module) is Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]


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


def check_whole_blocks(param: DTensor) -> None:
    """Raise NotImplementedError where the parts of a fake-quantized weight cut through blocks that share a scale: each
    part would find a scale of its own, and `convert_` would make other values of the whole weight."""
    own: Any = param._local_tensor
    if not isinstance(own, FakeQuantizedTensor):
        return
    spec = own.scheme.weight
    sizes = spec.block_size(spec.padded_shape(param.shape))
    for mesh_dim, placed in enumerate(param.placements):
        dim = getattr(placed, "dim", None)
        if dim is None:
            continue
        part = -(-param.shape[dim] // param.device_mesh.size(mesh_dim))
        if part < param.shape[dim] and part % sizes[dim]:
            raise NotImplementedError(
                f"a weight of shape {tuple(param.shape)} prepared for QAT with {spec.granularity!r}, split along "
                f"dimension {dim} into parts of {part}, which cut through blocks of {sizes[dim]} that share a scale; "
                "accepted: parts of whole blocks, such as PerGroup(g) with g dividing in_features / ranks under "
                "RowwiseParallel, or PerRow() under ColwiseParallel"
            )


def share_scales(param: Any) -> None:
    """Where the columns of a DTensor over an int8 weight are split, have its parts find their rows' scales together."""
    own = param._local_tensor
    if not isinstance(own, Int8WeightTensor) or own.columns is None:
        return
    split = (getattr(placed, "dim", None) for placed in param.placements)
    dims = [mesh_dim for mesh_dim, dim in enumerate(split) if dim == param.ndim - 1]
    if len(dims) != 1 or own.shape[-1] == 0:
        raise NotImplementedError(
            f"an int8 weight of shape {tuple(param.shape)} placed as {param.placements}, of which this rank has "
            f"{own.shape[-1]} columns; accepted: columns split along one dimension of the mesh, some on every rank"
        )
    _, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    group = param.device_mesh.get_group(dims[0]).group_name
    # the part may have come by a scatter, into a tensor made in the image of the first one
    own.columns = replace(own.columns, start=offset[-1], group=group)


def split_dims(weight: Any) -> tuple[int, ...]:
    """Dimensions of the mesh along which the [N, K] matrices of a DTensor are split."""
    inner = (weight.ndim - 2, weight.ndim - 1)
    # the shards of FSDP2 over tensor parallel ones are no `Shard` to torch, but have a dimension too
    split = (getattr(placed, "dim", None) for placed in weight.placements)
    return tuple(mesh_dim for mesh_dim, dim in enumerate(split) if dim in inner)


def sharded_scale(weight: Any) -> Tensor | None:
    """The scale of a DTensor over a BitNetTensor, for its product; None where that has its own."""
    own = weight._local_tensor
    dims = split_dims(weight)
    if isinstance(own, GatheredBitNet) or not dims:
        return None
    known = None if torch.compiler.is_compiling() else own.known_scale()
    if known is not None:
        return known
    total = magnitude(own.weight.detach())
    for dim in dims:
        total = all_reduce(total, "sum", (weight.device_mesh, dim))
    n, k = own.matrix
    return scale_of(total, n * k)

"""Sharded matrices on their way to the ranks that orthogonalize them, and back.

Each rank of a mesh dimension holds some rows of every matrix of a batch. `to_owners` gives each rank some of the
matrices as a whole, and `back` gives their rows back: two all-to-alls in place of a gather of every matrix on every
rank. Rows are divided as `torch.chunk` does, and as FSDP2 shards dimension 0, so the last ranks may have fewer rows or
none. Ranks along mesh dimensions that replicate do the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.numerics.sharded import is_dtensor
from lowbit.tensor.core.dtensor import replicated
from lowbit_kernels.runtime.library import contiguous_strides

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass
class RowExchange:
    """The division of `count` matrices of one shape.

    Args:
        group: the process group of the mesh dimension.
        rank: of this process in it.
        rows: rows of a matrix that each rank holds.
        cols: columns of a matrix.
        owned: number of matrices that each rank orthogonalizes, one after another in the order of the batch.
    """

    group: Any
    rank: int
    rows: list[int]
    cols: int
    owned: list[int]

    def to_owners(self, parts: Tensor) -> Tensor:
        """This rank's matrices [owned, rows, cols], from its rows of all matrices [count, own rows, cols]."""
        mine = self.owned[self.rank]
        received = parts.new_empty(mine * sum(self.rows) * self.cols)
        sizes = [mine * rows * self.cols for rows in self.rows]
        own = self.rows[self.rank] * self.cols
        self._exchange(received, parts, sizes, [count * own for count in self.owned])
        blocks = received.split(sizes)
        pairs = zip(blocks, self.rows, strict=True)
        return torch.cat([block.view(mine, rows, self.cols) for block, rows in pairs], dim=1)

    def back(self, whole: Tensor) -> Tensor:
        """This rank's rows of all matrices [count, own rows, cols], from its matrices [owned, rows, cols]."""
        mine, own = self.owned[self.rank], self.rows[self.rank]
        sent = torch.cat([block.reshape(-1) for block in whole.split(self.rows, dim=1)])
        received = whole.new_empty(sum(self.owned), own, self.cols)
        sizes = [count * own * self.cols for count in self.owned]
        self._exchange(received, sent, sizes, [mine * rows * self.cols for rows in self.rows])
        return received

    def _exchange(
        self, received: Tensor, sent: Tensor, sizes: list[int], own_sizes: list[int]
    ) -> None:
        dist.all_to_all_single(received.view(-1), sent.view(-1), sizes, own_sizes, group=self.group)


def sharded_dim(param: Tensor) -> int | None:
    """The mesh dimension that shards a parameter by rows, if it is sharded in this way only and its part is on the
    device on which ranks communicate. None: it is not sharded, or must be gathered."""
    if not is_dtensor(param):
        return None
    dims = [i for i, p in enumerate(param.placements) if not p.is_replicate()]
    if len(dims) != 1:
        return None
    from torch.distributed.tensor import Shard

    placement = param.placements[dims[0]]
    if type(placement) is not Shard or placement.dim != 0:
        return None
    is_here = param._local_tensor.device.type == param.device_mesh.device_type
    return dims[0] if is_here else None


def divided(param: DTensor, count: int, cols: int, first: int) -> RowExchange:
    """The exchange of some matrices. Each rank owns equally many.

    Args:
        param: one of the parameters, [rows, ...]; all have its shape and placements.
        count: the number of matrices.
        cols: columns of a matrix, to which the trailing dimensions of `param` are flattened.
        first: the remaining `count % ranks` matrices go to this rank and the ranks after it, one matrix each.
    """
    dim = sharded_dim(param)
    assert dim is not None
    mesh = param.device_mesh
    world = mesh.size(dim)
    owned = [count // world + ((rank - first) % world < count % world) for rank in range(world)]
    return RowExchange(
        mesh.get_group(dim),
        mesh.get_local_rank(dim),
        rows_of_ranks(param.shape[0], world),
        cols,
        owned,
    )


def rows_of_ranks(rows: int, world: int) -> list[int]:
    """The number of rows that each rank holds."""
    each = -(-rows // world)
    return [max(0, min(rows - rank * each, each)) for rank in range(world)]


def gathered(params: Sequence[Tensor], parts: Tensor) -> Tensor:
    """The whole tensors of which `parts` [count, ...] are this rank's parts, on the mesh's device: [count, ...]."""
    first: Any = params[0]
    if not is_dtensor(first):
        return parts
    from torch.distributed.tensor import DTensor

    mesh, shape = first.device_mesh, first.shape
    whole = [
        DTensor.from_local(
            part,
            mesh,
            first.placements,
            run_check=False,
            shape=shape,
            stride=contiguous_strides(shape),
        ).full_tensor()
        for part in parts
    ]
    return torch.stack(whole)


def own_part(param: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has as a whole."""
    if not is_dtensor(param):
        return whole
    same = replicated(whole.contiguous(), param.device_mesh)
    return same.redistribute(param.device_mesh, param.placements).to_local()

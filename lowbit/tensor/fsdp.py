"""The FSDP2 all-gather of a low-bit tensor: what travels is the stored form, not the values.

`fully_shard` splits dimension 0. Evenly sharded, the inner tensors that run along it travel as they are. Unevenly
sharded, FSDP2 demands inputs of exactly the padded shard's logical size, whatever their dtype; so each row's
codes, scales and zero points are laid end to end as bytes, and that row is viewed as a dtype of as many bytes as
the logical size needs: 1 byte an element for 4 bits, 2 for 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.tensor.kernels import forget_packed

if TYPE_CHECKING:
    from lowbit.tensor.base import LowbitTensor

# of those that gloo and NCCL move; only bits are copied
_DTYPE_OF_BYTES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


def as_bytes(t: Tensor) -> Tensor:
    """float8 as uint8, which every collective backend moves; other dtypes as they are."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 and t.dtype.is_floating_point else t


def _to_rows(tensor: LowbitTensor, rows: int) -> Tensor:
    """[rows, trailing…] of a dtype wide enough, holding each row's inner tensors as bytes, zero padded."""
    parts = []
    for name in tensor._row_attrs():
        inner = getattr(tensor, name)
        parts.append(inner.flatten(1).contiguous().view(torch.uint8))
    used = sum(part.shape[1] for part in parts)
    elements = max(tensor.shape[1:].numel(), 1)
    width = next((w for w in _DTYPE_OF_BYTES if w * elements >= used), None)
    if width is None:
        raise NotImplementedError(
            f"an uneven FSDP2 shard of {tensor!r} needs more than 8 bytes an element; pad dimension 0 "
            "to a multiple of the world size or keep this parameter in high precision"
        )
    packed = parts[0].new_zeros((rows, elements * width))
    packed[: tensor.shape[0], :used] = torch.cat(parts, dim=1)
    return packed.view(_DTYPE_OF_BYTES[width]).view(rows, *tensor.shape[1:])


def _from_rows(tensor: LowbitTensor, packed: Tensor, rows: int) -> dict[str, Tensor]:
    """The inner tensors of `rows` rows, from what `_to_rows` laid end to end on each rank."""
    shapes = tensor.inner_shapes((rows, *tensor.shape[1:]))
    flat = packed.reshape(packed.shape[0], -1).view(torch.uint8)[:rows]
    found, start = {}, 0
    for name in tensor._row_attrs():
        shape, dtype = shapes[name]
        nbytes = dtype.itemsize * torch.Size(shape[1:]).numel()
        part = flat[:, start : start + nbytes].clone(memory_format=torch.contiguous_format)
        found[name] = part.view(dtype).view(shape)
        start += nbytes
    return found


class FSDPHooks:
    """Mixin of LowbitTensor: `fsdp_pre_all_gather` and `fsdp_post_all_gather`."""

    def _wire(self: Any) -> LowbitTensor:
        """This shard in the form that travels and that the next product takes; by default, as it is."""
        return self

    def fsdp_pre_all_gather(
        self: Any, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """The tensors to gather, and (the shard that they are of, the full size, their names; None: rows as bytes)."""
        shard = self._wire()
        if outer_size[0] % mesh.size():
            rows = -(-outer_size[0] // mesh.size())
            return (_to_rows(shard, rows),), (shard, outer_size, None)
        names = shard._row_attrs()
        if mesh.size() == 1:  # where torch 2.13 takes the first only, and nothing is missing anyway
            names = names[:1]
        inputs = tuple(as_bytes(getattr(shard, name)) for name in names)
        return inputs, (shard, outer_size, names)

    def fsdp_post_all_gather(
        self: Any,
        outputs: tuple[Tensor, ...],
        metadata: tuple[Any, ...],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole parameter in low bits, with `param_dtype` as its logical dtype."""
        shard, outer_size, names = metadata
        if names is None:
            gathered = _from_rows(shard, outputs[0], outer_size[0])
            owned = tuple(gathered.values())
        else:
            gathered = {
                name: t.view(getattr(shard, name).dtype)
                for name, t in zip(names, outputs, strict=True)
            }
            owned = outputs
        inner = {**shard.inner_tensors(), **gathered}
        if out is None:
            return shard._with(inner, outer_size, param_dtype), owned
        target: Any = getattr(out, "_local_tensor", out)  # a DTensor under tensor parallelism
        for name, t in inner.items():
            if names is None or name not in names:  # what was gathered as it is lies in place
                held = getattr(target, name)
                # the same values as in forward: what autograd saved of it is not stale
                with torch.autograd._unsafe_preserve_version_counter(held):
                    held.copy_(t)
        forget_packed(*target.inner_tensors().values())
        return None

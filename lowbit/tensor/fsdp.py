"""The FSDP2 all-gather of a low-bit tensor: the stored form travels, not the values.

`fully_shard` splits dimension 0. With even shards the inner tensors that run along it travel unchanged. With uneven
shards FSDP2 accepts only inputs of exactly the padded shard's logical size. Then the bytes of each row's codes, scales
and zero points are concatenated and cut into planes: uint8 tensors of that size, as many as the row needs (one for
4-bit codes, two for 8-bit codes with their scales).

Codes travel as integers, never as bits of a floating dtype. FSDP2 copies the inputs of an all-gather by
`torch._foreach_copy_`, which on CUDA converts bfloat16 and float16 through float32 and so changes NaN patterns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def as_bytes(t: Tensor) -> Tensor:
    """A float8 tensor viewed as uint8, which every collective backend moves; other tensors unchanged."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 and t.dtype.is_floating_point else t


def _to_planes(tensor: Any, rows: int) -> tuple[Tensor, ...]:
    """uint8 tensors [rows, trailing…], zero padded: plane p holds bytes p·E to (p + 1)·E of each row of E elements."""
    found = [getattr(tensor, name) for name in tensor._row_attrs()]
    if any(t.shape[0] != tensor.shape[0] for t in found):
        raise tensor._unsupported(
            "uneven shards of rows that share scales in blocks (accepted: as many whole blocks on each rank)"
        )
    parts = [t.flatten(1).contiguous().view(torch.uint8) for t in found]
    used = sum(part.shape[1] for part in parts)
    elements = max(tensor.shape[1:].numel(), 1)
    planes = max(-(-used // elements), 1)
    packed = parts[0].new_zeros((rows, planes * elements))
    packed[: tensor.shape[0], :used] = torch.cat(parts, dim=1)
    split = packed.view(rows, planes, elements).transpose(0, 1).contiguous()
    return tuple(plane.view(rows, *tensor.shape[1:]) for plane in split)


def _from_planes(tensor: Any, planes: Sequence[Tensor], rows: int) -> dict[str, Tensor]:
    """The inner tensors of `rows` rows, from the gathered planes."""
    shapes = tensor.inner_shapes((rows, *tensor.shape[1:]))
    whole = [plane[:rows].flatten(1) for plane in planes]
    flat = torch.cat(whole, dim=1) if len(whole) > 1 else whole[0]
    found, start = {}, 0
    for name in tensor._row_attrs():
        shape, dtype = shapes[name]
        nbytes = dtype.itemsize * torch.Size(shape[1:]).numel()
        part = flat[:, start : start + nbytes].clone(memory_format=torch.contiguous_format)
        found[name] = part.view(dtype).view(shape)
        start += nbytes
    return found


def _keep_until_read(tensors: Iterable[Tensor]) -> None:
    """Keep the memory of these tensors until the current stream has read them.

    FSDP2 calls `fsdp_pre_all_gather` on a stream of its own. The allocator gives the memory of a tensor from there to
    the next all-gather as soon as the host drops it, when the current stream may have yet to read it.
    """
    for t in tensors:
        if t.is_cuda and not torch.compiler.is_compiling():
            t.record_stream(torch.cuda.current_stream(t.device))


class _BoundHook:
    """A hook and its tensor. FSDP2 calls `inspect.signature` of it at each gather; for a bound method that takes longer
    than the hook itself."""

    __slots__ = ("__signature__", "hook", "tensor")

    def __init__(self, hook: Callable[..., Any], tensor: Any, signature: inspect.Signature) -> None:
        self.hook, self.tensor, self.__signature__ = hook, tensor, signature

    def __call__(self, *args: Any) -> Any:
        return self.hook(self.tensor, *args)


class pre_all_gather:
    """Decorator of a method `fsdp_pre_all_gather`: makes it a `_BoundHook` of a tensor, and calls it without
    `__torch_function__`, through which each attribute of the tensor would pass in Python."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        found = inspect.signature(hook)
        self.signature = found.replace(parameters=list(found.parameters.values())[1:])

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        return self if tensor is None else _BoundHook(self, tensor, self.signature)

    def __call__(self, tensor: Any, *args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.hook(tensor, *args)


class FSDPHooks:
    """Mixin of LowbitTensor: `fsdp_pre_all_gather` and `fsdp_post_all_gather`."""

    def _wire(self: Any) -> Any:
        """This shard in the form that travels and that the next product reads; by default, unchanged."""
        return self

    def _wire_fits(self, shape: torch.Size, ranks: int) -> bool:
        """Whether each of `ranks` shards of a weight of `shape` has this form. All ranks decide alike."""
        return True

    @pre_all_gather
    def fsdp_pre_all_gather(
        self: Any, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """The tensors to gather, and (the shard, the full size, the names of the tensors, or None for planes)."""
        shard = self._wire() if self._wire_fits(outer_size, mesh.size()) else self
        if outer_size[0] % mesh.size():
            rows = -(-outer_size[0] // mesh.size())
            return _to_planes(shard, rows), (shard, outer_size, None)
        names = shard._row_attrs()
        # torch 2.13 gathers only the first tensor on a mesh of one rank; the shard already holds the others.
        if mesh.size() == 1:
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
        planes = {} if names else _from_planes(shard, outputs, outer_size[0])
        own = shard.inner_tensors().items()
        computed = {name: t for name, t in own if name not in (names or planes)}
        _keep_until_read(computed.values())
        if out is None:
            dtypes = (getattr(shard, name).dtype for name in names or ())
            viewed = [t.view(dtype) for t, dtype in zip(outputs, dtypes, strict=False)]
            gathered = planes or dict(zip(names, viewed, strict=True))
            owned = tuple(planes.values()) or outputs
            return shard._with({**computed, **gathered}, outer_size, param_dtype), owned
        target: Any = getattr(out, "_local_tensor", out)  # a DTensor under tensor parallelism
        for name, t in {**computed, **planes}.items():  # FSDP2 gathers the others in place
            held = getattr(target, name)
            # The values are those of forward, so tensors that autograd saved are not stale.
            with torch.autograd._unsafe_preserve_version_counter(held):
                held.copy_(t)
        return None

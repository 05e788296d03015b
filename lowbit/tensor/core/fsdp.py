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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowbit.numerics.packing import as_bytes


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


class _BoundHook(partial[Any]):
    """A hook and its tensor. FSDP2 calls `inspect.signature` of it at each gather; for a bound method that takes longer
    than the hook itself."""

    __slots__ = ()
    __signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("mesh", "outer_size", "outer_stride", "module", "mp_policy")
        ]
    )


class pre_all_gather:
    """Decorator of a method `fsdp_pre_all_gather`: makes it a `_BoundHook` of a tensor, and calls it without
    `__torch_function__`, through which each attribute of the tensor would pass in Python."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        return self if tensor is None else _BoundHook(self, tensor)

    def __call__(self, tensor: Any, *args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.hook(tensor, *args)


class Gather(NamedTuple):
    """An all-gather, as FSDP2 describes it: the mesh and how many ranks it has, the shape of the whole parameter, its
    module, and the policy of mixed precision."""

    mesh: Any
    ranks: int
    shape: torch.Size
    module: Any
    policy: Any


class Wire(NamedTuple):
    """The form in which a shard travels: a tensor of class `kind` over these inner tensors, with the metadata that the
    shard has. FSDP2 asks for it in each gather, but makes a tensor only in the first one.

    The rows of the tensors are the shard's, except of those in `shared`, which every rank has.
    """

    kind: type[Any]
    tensors: dict[str, Tensor]
    shared: tuple[str, ...] = ()

    def over(self, shard: Any, tensors: dict[str, Tensor], shape: Any, dtype: torch.dtype) -> Any:
        """The tensor of this form over `tensors`."""
        meta = {name: getattr(shard, name) for name in self.kind.meta_attrs}
        return self.kind.from_inner(tensors, meta, shape, dtype)


class FSDPHooks:
    """Mixin of LowbitTensor: `fsdp_pre_all_gather` and `fsdp_post_all_gather`."""

    def is_contiguous(self: Any, memory_format: Any = torch.contiguous_format) -> bool:
        """As for a plain tensor of these strides, but True for a transposed stack. FSDP2 takes contiguous parameters
        alone, and the experts that it shards lie one after another."""
        is_stack = self.transposed and self.ndim == 3 and memory_format is torch.contiguous_format
        return is_stack or torch.Tensor.is_contiguous(self, memory_format=memory_format)

    def _on_the_wire(self: Any, gather: Gather) -> Wire | None:
        """The form in which this shard travels and which the next product reads; None: as it is. All ranks decide
        alike."""
        return None

    @pre_all_gather
    def fsdp_pre_all_gather(
        self: Any, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """The tensors to gather, and (the shard, its form, the full size, the names of the tensors, or None for
        planes)."""
        ranks = mesh.size()
        wire = self._on_the_wire(Gather(mesh, ranks, outer_size, module, mp_policy))
        if outer_size[0] % ranks:
            sent = self if wire is None else wire.over(self, wire.tensors, self.shape, self.dtype)
            planes = _to_planes(sent, -(-outer_size[0] // ranks))
            return planes, (sent, Wire(type(sent), sent.inner_tensors()), outer_size, None)
        if wire is None:
            wire, names = Wire(type(self), self.inner_tensors()), self._row_attrs()
        else:
            names = tuple(wire.tensors)
            if wire.shared:
                names = tuple([name for name in names if name not in wire.shared])
        # torch 2.13 gathers only the first tensor on a mesh of one rank; the shard already holds the others.
        if ranks == 1:
            names = names[:1]
        inputs = tuple([as_bytes(wire.tensors[name]) for name in names])
        return inputs, (self, wire, outer_size, names)

    def fsdp_post_all_gather(
        self: Any,
        outputs: tuple[Tensor, ...],
        metadata: tuple[Any, ...],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole parameter in low bits, with `param_dtype` as its logical dtype, and the tensors besides `outputs`
        that FSDP2 frees with it."""
        shard, wire, outer_size, names = metadata
        own: dict[str, Tensor] = wire.tensors
        if out is not None and names and len(names) == len(own):
            return None  # FSDP2 has gathered all of it in place
        planes = {} if names else _from_planes(shard, outputs, outer_size[0])
        computed = {name: t for name, t in own.items() if name not in (names or planes)}
        _keep_until_read(computed.values())
        if out is None:
            dtypes = (own[name].dtype for name in names or ())
            viewed = [t.view(dtype) for t, dtype in zip(outputs, dtypes, strict=False)]
            gathered = planes or dict(zip(names, viewed, strict=True))
            whole = wire.over(shard, {**computed, **gathered}, outer_size, param_dtype)
            return whole, tuple(planes.values())
        target: Any = getattr(out, "_local_tensor", out)  # a DTensor under tensor parallelism
        for name, t in {**computed, **planes}.items():  # FSDP2 gathers the others in place
            held = getattr(target, name)
            # The values are those of forward, so tensors that autograd saved are not stale. Selective checkpointing
            # around a sharded module would count these copies, which the first gather does not make.
            with torch.autograd._unsafe_preserve_version_counter(held), _disable_current_modes():
                held.copy_(t)
        return None

"""What a call of an op allocates and launches, as data that depends on the layouts of its operands alone.

An op makes a `Plan` once for operands of the same layouts. `run` carries it out from Python; `launcher` gives it to a
compiled launcher, which carries out the same plan in a tenth of the time. Tensors of a call have numbers: first the
operands, then the results, then scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.tensor_map import tensor_map

if TYPE_CHECKING:
    from lowbit_kernels.nvrtc import Kernel


class Buffer(NamedTuple):
    """A contiguous tensor to allocate. `fill`: the value of its elements before the first launch; None leaves them as
    they are. Other values than 0 are for float32."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Address(NamedTuple):
    """The address of the tensor with this number, plus `offset` bytes. 0, a null pointer, for an operand of None."""

    tensor: int
    offset: int = 0


class Map(NamedTuple):
    """A tensor map over the tensor with this number; the other fields are arguments of `tensor_map.tensor_map`."""

    tensor: int
    size: int
    rows: int
    columns: int
    stride: int
    box: int
    width: int


class TritonKernel(NamedTuple):
    """A kernel that Triton has compiled, for the launcher alone: `run` leaves its launch to Triton."""

    handle: int
    shared: int
    cluster: int = 1
    overlaps: bool = False


class Launch(NamedTuple):
    """A launch of `grid` blocks of `threads` threads; an int among the arguments is passed as it is."""

    kernel: Kernel | TritonKernel
    grid: int
    threads: int
    arguments: tuple[int | Address | Map, ...]


class CublasProduct(NamedTuple):
    """`torch._scaled_mm` of tensors with these numbers: out = a @ b.T, scaled, plus the bias, if that is not None.

    a [M, K] and b [N, K] are contiguous float8. `by_row`: the scales are [M] and [N], else both [1].
    """

    a: int
    b: int
    a_scale: int
    b_scale: int
    bias: int | None
    out: int
    by_row: bool


class Plan(NamedTuple):
    """The buffers of a call and its launches, in order."""

    results: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...]
    launches: tuple[Launch | CublasProduct, ...]


def run(plan: Plan, operands: Sequence[Tensor | None]) -> list[Tensor]:
    """Carry the plan out on the operands' device and return the results. The first operand is not None."""
    first = operands[0]
    assert first is not None
    made = [_allocated(buffer, first.device) for buffer in (*plan.results, *plan.scratch)]
    tensors = *operands, *made
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    with torch.cuda.device_of(first):
        for launch in plan.launches:
            if isinstance(launch, CublasProduct):
                _multiply(launch, tensors)
                continue
            stream = torch.cuda.current_stream().cuda_stream
            values = (_value(argument, addresses) for argument in launch.arguments)
            assert not isinstance(launch.kernel, TritonKernel)
            launch.kernel(stream, launch.grid, launch.threads, *values)
    return made[: len(plan.results)]


def _allocated(buffer: Buffer, device: torch.device) -> Tensor:
    options: dict[str, Any] = {"dtype": buffer.dtype, "device": device}
    if buffer.fill is None:
        return torch.empty(buffer.shape, **options)
    return torch.full(buffer.shape, buffer.fill, **options)


def _multiply(one: CublasProduct, tensors: Sequence[Any]) -> None:
    a_shape, b_shape = ((-1, 1), (1, -1)) if one.by_row else ((), ())
    out = tensors[one.out]
    torch._scaled_mm(
        tensors[one.a],
        tensors[one.b].t(),
        tensors[one.a_scale].view(a_shape),
        tensors[one.b_scale].view(b_shape),
        bias=None if one.bias is None else tensors[one.bias],
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out,
    )


def _value(argument: int | Address | Map, addresses: Sequence[int]) -> int:
    if isinstance(argument, Address):
        address = addresses[argument.tensor]
        return address and address + argument.offset
    if isinstance(argument, Map):
        return tensor_map(addresses[argument.tensor], *argument[1:]).getPtr()
    return argument

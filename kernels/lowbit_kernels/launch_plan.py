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

from lowbit_kernels.library import contiguous_strides
from lowbit_kernels.tensor_map import tensor_map
from lowbit_kernels.weight_operands import Layout

if TYPE_CHECKING:
    from lowbit_kernels.nvrtc import Kernel


PART = 128
"""Bytes: a multiple of it separates the parts of one allocation. Tensor maps need 16, a line of the cache has 128."""


class Buffer(NamedTuple):
    """A contiguous tensor to allocate.

    Attributes:
        fill: the value of its elements before the first launch; None leaves them as they are. Other values than 0 are
            for float32.
        filled: the number of elements that have this value, from the first on; None: all.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None = None
    filled: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def layout(self, device: torch.device) -> Layout:
        return Layout(self.shape, contiguous_strides(self.shape), self.dtype, device, 0)

    @property
    def filled_bytes(self) -> int:
        if self.fill is None:
            return 0
        return self.nbytes if self.filled is None else self.filled * self.dtype.itemsize


class Address(NamedTuple):
    """The address of the tensor with this number, plus `offset` bytes. 0, a null pointer, for an operand of None."""

    tensor: int
    offset: int = 0


class Map(NamedTuple):
    """A tensor map from `offset` bytes of the tensor with this number on; the other fields are arguments of
    `tensor_map.tensor_map`."""

    tensor: int
    size: int
    rows: int
    columns: int
    stride: int
    box: int
    width: int
    offset: int = 0


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


class Composition:
    """A plan made of the plans of several ops, whose scratch memory is one allocation."""

    def __init__(self, operands: int, results: Sequence[Buffer]) -> None:
        self._results = tuple(results)
        self._first = operands + len(self._results)
        self._scratch: list[Buffer] = []
        self._launches: list[Launch | CublasProduct] = []

    def scratch(self, buffers: Sequence[Buffer]) -> range:
        """The numbers of new tensors that no op returns."""
        self._scratch += buffers
        end = self._first + len(self._scratch)
        return range(end - len(buffers), end)

    def add(
        self, plan: Plan, operands: Sequence[int | None], results: Sequence[int | None]
    ) -> None:
        """Append the launches of a plan. `operands`, `results`: the numbers of its tensors here."""
        numbers = *operands, *results, *self.scratch(plan.scratch)
        places = [None if number is None else Address(number) for number in numbers]
        self._launches += _moved(plan.launches, places)

    def plan(self) -> Plan:
        """The whole plan. What a `CublasProduct` reads stays a tensor of its own, and so does a buffer that is filled
        with another number than 0."""
        products = [one for one in self._launches if isinstance(one, CublasProduct)]
        read = {number for product in products for number in product[:-1]}
        numbered = dict(enumerate(self._scratch, self._first))
        joined = {i: b for i, b in numbered.items() if i not in read and b.fill in (None, 0)}
        places = list(map(Address, range(self._first + len(self._scratch))))
        size = filled = 0
        for number, buffer in sorted(joined.items(), key=lambda pair: pair[1].fill is None):
            places[number] = Address(self._first, size)
            size += -(-buffer.nbytes // PART) * PART
            filled = filled if buffer.fill is None else size
        apart = [number for number in numbered if number not in joined]
        for place, number in enumerate(apart, self._first + 1):
            places[number] = Address(place)
        shared = Buffer((size,), torch.uint8, 0 if filled else None, filled or None)
        scratch = shared, *(numbered[number] for number in apart)
        return Plan(self._results, scratch, _moved(self._launches, places))


def _moved(
    launches: Sequence[Launch | CublasProduct], places: Sequence[Address | None]
) -> tuple[Launch | CublasProduct, ...]:
    """The launches where tensor i lies at `places[i]`, or is None."""

    def moved(argument: int | Address | Map) -> int | Address | Map:
        if isinstance(argument, int):
            return argument
        place = places[argument.tensor]
        if place is None:
            return 0
        return argument._replace(tensor=place.tensor, offset=argument.offset + place.offset)

    found: list[Launch | CublasProduct] = []
    for launch in launches:
        if isinstance(launch, Launch):
            found.append(launch._replace(arguments=tuple(map(moved, launch.arguments))))
            continue
        own = {name: getattr(launch, name) for name in launch._fields[:-1]}
        given = {name: places[number] for name, number in own.items() if number is not None}
        numbers: Any = {name: place and place.tensor for name, place in given.items()}
        found.append(launch._replace(**numbers))
    return tuple(found)


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
    made = torch.empty(buffer.shape, **options)
    if buffer.fill is not None:
        (made if buffer.filled is None else made[: buffer.filled]).fill_(buffer.fill)
    return made


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
        address = addresses[argument.tensor] + argument.offset
        return tensor_map(address, *argument[1:-1]).getPtr()
    return argument

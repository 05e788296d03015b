"""The allocations and launches of a call, as data that depends on the layouts of its operands alone.

An op makes a `LaunchPlan` once for operands of the same layouts. `run` carries it out from Python; `launcher` gives it
to a compiled launcher, which carries out the same plan in a tenth of the time. Tensors of a call have numbers: first
the operands, then the results, then scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.runtime.library import contiguous_strides
from lowbit_kernels.runtime.tensor_map import tensor_map
from lowbit_kernels.weight_only.weight_operands import TensorLayout

if TYPE_CHECKING:
    from lowbit_kernels.runtime.nvrtc import Kernel


PART = 256
"""Bytes: a multiple of it separates the parts of one allocation. Tensor maps need 16, a line of the cache has 128, and
cuBLAS chooses kernels by alignments of up to 256."""


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

    def empty(self, like: Tensor) -> Tensor:
        """The tensor on the device of another one, without its values."""
        return like.new_empty(self.shape, dtype=self.dtype)

    def layout(self, device: torch.device) -> TensorLayout:
        return TensorLayout(self.shape, contiguous_strides(self.shape), self.dtype, device, 0)

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


Argument = int | Address | Map
"""An argument of a kernel in a plan; an int is passed as it is."""


class TritonKernel(NamedTuple):
    """A kernel that Triton has compiled, for the launcher alone: `run` leaves its launch to Triton."""

    handle: int
    shared: int
    cluster: int = 1
    overlaps: bool = False


class Launch(NamedTuple):
    """A launch of `grid` blocks of `threads` threads."""

    kernel: Kernel | TritonKernel
    grid: int
    threads: int
    arguments: tuple[Argument, ...]


class TensorPart(NamedTuple):
    """A contiguous tensor of this shape in the memory of the tensor with this number, from `offset` bytes on. Both have
    one dtype."""

    tensor: int
    shape: tuple[int, ...]
    offset: int = 0


class CublasProduct(NamedTuple):
    """`torch._scaled_mm`: out = a @ b.T, scaled, plus the bias, if that is not None.

    a [M, K] and b [N, K] are float8; the scales are [M, 1] and [1, N], or both [].
    """

    a: TensorPart
    b: TensorPart
    a_scale: TensorPart
    b_scale: TensorPart
    bias: TensorPart | None
    out: TensorPart

    @property
    def parts(self) -> list[TensorPart]:
        return [one for one in self if one is not None]


class LaunchPlan(NamedTuple):
    """The buffers of a call and its launches, in order."""

    results: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...]
    launches: tuple[Launch | CublasProduct, ...]


class Composition:
    """A plan made of the plans of several ops. Their scratch memory is one allocation, and one more for each dtype that
    cuBLAS reads. Two tensors of one allocation share memory if the last launch that uses one comes before the first
    that uses the other."""

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
        self, plan: LaunchPlan, operands: Sequence[int | None], results: Sequence[int | None]
    ) -> tuple[int | None, ...]:
        """Append the launches of a plan. `operands`, `results`: the numbers of its tensors here. Returns these, and the
        numbers of its scratch memory."""
        numbers = *operands, *results, *self.scratch(plan.scratch)
        self.launch(plan.launches, numbers)
        return numbers

    def launch(
        self, launches: Sequence[Launch | CublasProduct], numbers: Sequence[int | None]
    ) -> None:
        """Append launches; `numbers`: those of their tensors here."""
        places = [None if number is None else Address(number) for number in numbers]
        self._launches += _moved(launches, places)

    def plan(self) -> LaunchPlan:
        """The whole plan. A buffer that is filled with another number than 0 stays a tensor of its own."""
        used = self._uses()
        numbered = {i: b for i, b in enumerate(self._scratch, self._first) if i in used}
        read = {
            one.tensor
            for launch in self._launches
            if isinstance(launch, CublasProduct)
            for one in launch.parts
        }
        apart = [i for i, b in numbered.items() if b.fill not in (None, 0)]
        groups: dict[torch.dtype, list[int]] = {
            numbered[i].dtype: [] for i in sorted(read) if i in numbered and i not in apart
        }
        others = torch.float32 if torch.float32 in groups else torch.uint8
        for i, buffer in numbered.items():
            if i not in apart:
                groups.setdefault(buffer.dtype if buffer.dtype in groups else others, []).append(i)
        places = list(map(Address, range(self._first + len(self._scratch))))
        scratch: list[Buffer] = []
        for dtype, members in groups.items():
            offsets, size, filled = _packed({i: numbered[i] for i in members}, used)
            for i, offset in offsets.items():
                places[i] = Address(self._first + len(scratch), offset)
            shape, words = (size // dtype.itemsize,), filled // dtype.itemsize
            scratch.append(Buffer(shape, dtype, 0 if filled else None, words or None))
        for i in apart:
            places[i] = Address(self._first + len(scratch))
            scratch.append(numbered[i])
        return LaunchPlan(self._results, tuple(scratch), _moved(self._launches, places))

    def _uses(self) -> dict[int, tuple[int, int]]:
        """The first and the last launch that uses each tensor, by their positions."""
        found: dict[int, tuple[int, int]] = {}
        for at, launch in enumerate(self._launches):
            for tensor in _tensors_of(launch):
                found[tensor] = found.get(tensor, (at, at))[0], at
        return found


def _tensors_of(launch: Launch | CublasProduct) -> list[int]:
    if isinstance(launch, CublasProduct):
        return [one.tensor for one in launch.parts]
    return [one.tensor for one in launch.arguments if not isinstance(one, int)]


def _packed(
    buffers: Mapping[int, Buffer], used: Mapping[int, tuple[int, int]]
) -> tuple[dict[int, int], int, int]:
    """The offset of each buffer in one allocation, its bytes, and how many of these, from the first on, are filled.

    Filled buffers come first, and share their memory with no other. The others, larger ones first, get the lowest
    offset that is free while they are `used`.
    """
    sizes = {i: -(-buffer.nbytes // PART) * PART for i, buffer in buffers.items()}
    filled = [i for i, buffer in buffers.items() if buffer.fill is not None]
    others = sorted(buffers.keys() - set(filled), key=lambda i: (-sizes[i], i))
    offsets: dict[int, int] = {}
    for i in (*filled, *others):
        first, last = used[i]
        taken = sorted(
            (at, at + sizes[j])
            for j, at in offsets.items()
            if j in filled or (used[j][0] <= last and first <= used[j][1])
        )
        lowest = 0
        for start, end in taken:
            if lowest + sizes[i] <= start:
                break
            lowest = max(lowest, end)
        offsets[i] = lowest
    size = max((at + sizes[i] for i, at in offsets.items()), default=0)
    return offsets, size, sum(sizes[i] for i in filled)


def _moved(
    launches: Sequence[Launch | CublasProduct], places: Sequence[Address | None]
) -> tuple[Launch | CublasProduct, ...]:
    """The launches where tensor i lies at `places[i]`, or is None."""

    def moved(argument: Any) -> Any:
        if argument is None or isinstance(argument, int):
            return argument
        place = places[argument.tensor]
        if place is None:
            return None if isinstance(argument, TensorPart) else 0
        return argument._replace(tensor=place.tensor, offset=argument.offset + place.offset)

    return tuple(
        CublasProduct(*map(moved, launch))
        if isinstance(launch, CublasProduct)
        else launch._replace(arguments=tuple(map(moved, launch.arguments)))
        for launch in launches
    )


def run(plan: LaunchPlan, operands: Sequence[Tensor | None]) -> list[Tensor]:
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
            values = [a if isinstance(a, int) else _value(a, addresses) for a in launch.arguments]
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
    def view(part: TensorPart) -> Tensor:
        tensor = tensors[part.tensor]
        offset = tensor.storage_offset() + part.offset // tensor.dtype.itemsize
        return tensor.as_strided(part.shape, contiguous_strides(part.shape), offset)

    out = view(one.out)
    torch._scaled_mm(
        view(one.a),
        view(one.b).t(),
        view(one.a_scale),
        view(one.b_scale),
        bias=None if one.bias is None else view(one.bias),
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out,
    )


def _value(argument: Address | Map, addresses: Sequence[int]) -> int:
    address = addresses[argument.tensor]
    if isinstance(argument, Map):
        return tensor_map(address + argument.offset, *argument[1:-1]).getPtr()
    return address and address + argument.offset

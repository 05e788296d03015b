"""One optimizer step over any number of tensors in one launch: the kernel of ``fused_step.cu``, and what it shares with
the CPU's kernel in ``fused_step_cpu.cpp``, which ``fused_step_cpu.py`` runs.

The tensors are given as a table of pointers, in the memory of their device. For each element the kernel decodes the
states to float32, updates them and the weight by an algorithm (`Rule`), and stores all of them again. Nothing is
materialised in between, and the host reads nothing. Options, step counters and the learning rate are read on the
device, so that a change compiles nothing, and a step can be captured in a CUDA graph.

The step is not an operator of ``torch.ops``: its operands are addresses in a table, which no operator's schema can
name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.sources import FLOAT_MACROS, program

STATES = {
    "fp32": "STATE_FP32",
    "bf16": "STATE_BF16",
    "float8": "STATE_FLOAT8",
    "8bit": "STATE_8BIT",
    "4bit": "STATE_4BIT",
}
ROUNDINGS = ("nearest", "stochastic", "corrected", "exact")
CUDA = tuple(
    f"elementwise/{name}"
    for name in ("fused_step_lanes.cuh", "fused_step_codes.cuh", "fused_step.cu")
)
ERRORS = ("dropped", "returned", "tried", "given")
TILE = 256  # elements of a row, the work of a warp
LOCATE = 256  # tiles for each entry of `locate`
# Threads on a multiprocessor at once, which leaves each one 64 registers; measured, see benchmarks/LOG.md.
RESIDENT_THREADS = 1024
MOST_BLOCKS = 8
"""Blocks of a multiprocessor that take rows of codes, of few threads each: one works while another waits."""
MAX_HYPER, MAX_STATES = 8, 3

# The structs of fused_step.h in words of 64 bits: the fields of `Tensor`, the sizes of `Group` and `Scalars`.
TENSOR = (
    *("grad", "param", "state_0", "state_1", "state_2", "correction"),
    *("scale_0", "scale_1", "scale_2", "step", "first_tile", "cols", "tiles_a_row"),
    *("aligned", "key", "first_index", "run", "stride"),
    *("group", "numel"),
    *("param_scale", "place", "width", "scale_width"),
)
COLUMN = {name: i for i, name in enumerate(TENSOR)}
GROUP_WORDS = 5 + MAX_HYPER
SCALARS_WORDS = 12


@dataclass(frozen=True)
class Rule:
    """An algorithm in C++, for GPUs and CPUs.

    Args:
        hyper: names of its options (never lr), at most 8.
        prepare: statements in double, run once a tensor: reads ``lr``, ``least_lr``, ``t`` (the step, from 1) and the
            options by name, writes ``c[0]`` .. ``c[11]``.
        update: statements in float, run for each element: reads ``c`` and the gradient ``g`` (unscaled and clipped,
            not negated), changes the weight ``w`` and the states ``s[0]`` .. ``s[2]``. ``quotient(a, b)`` is ``a / b``;
            on a GPU it is faster than ``/``, which would take most of the time. ``limit_magnitude(x, most)``
            clamps x to ``-most .. most`` and keeps a NaN. Multiply a factor with ``g`` before the second ``g``:
            ``g * g`` alone may overflow.
        compensate: statements in float, run for each element after the weight is rounded: reads ``c`` and the error
            ``e``, the weight before less the weight after, and adds it to the states. Empty: the algorithm can't.
    """

    hyper: tuple[str, ...]
    prepare: str
    update: str
    compensate: str = ""


@dataclass(frozen=True, eq=False)
class Table:
    """The lookup tables of a state's codes: ``values`` by code (float32) and ``cells`` by magnitude (uint32), with the
    number of the first cell and of the bits below a cell's (`lowbit.numerics.codebook.Cells`). Codes of 4 bits have no
    cells, because the kernel computes them."""

    values: np.ndarray
    first: int = 0
    shift: int = 1
    cells: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))


@dataclass(frozen=True)
class StepVariant:
    """The compile-time parameters of a kernel.

    Args:
        rule: the algorithm.
        param, grad: dtypes of weights and gradients: float32, bfloat16 or float16.
        formats: the format of each state, a key of `STATES`.
        signed: for each state, whether its values have a sign.
        stochastic: for each state, whether it is rounded stochastically where it is stored in bf16; 4 bits always are.
        rounding: the rounding of bf16 weights, one of `ROUNDINGS`; "corrected" keeps 8 more bits of each weight in an
            array of bytes, "exact" 16 more.
        error: what becomes of the rounding error of a weight, one of `ERRORS`, which fused_step.h defines. "tried" and
            "given" take float32 weights.
        code_bits: 8 or 4 for weights that are stored as integers with scales, whose values are float32; 0 for others.
            On a GPU, with the error "dropped" or "returned".
        scaled: whether gradients are multiplied by the first number of `control`.
        tables: the table of each state; None where there are no codes.
    """

    rule: Rule
    param: torch.dtype
    grad: torch.dtype
    formats: tuple[str, ...]
    signed: tuple[bool, ...]
    stochastic: tuple[bool, ...]
    rounding: str = "nearest"
    scaled: bool = False
    tables: tuple[Table | None, ...] = ()
    error: str = "dropped"
    code_bits: int = 0

    def __post_init__(self) -> None:
        for name, dtype in (("param", self.param), ("grad", self.grad)):
            if dtype not in FLOAT_MACROS:
                raise TypeError(
                    f"{name} must be one of {', '.join(map(str, FLOAT_MACROS))}, got {dtype}"
                )
        for format in self.formats:
            if format not in STATES:
                raise ValueError(f"a format must be one of {', '.join(STATES)}, got {format!r}")
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"rounding must be one of {', '.join(ROUNDINGS)}, got {self.rounding!r}"
            )
        if self.error not in ERRORS:
            raise ValueError(f"error must be one of {', '.join(ERRORS)}, got {self.error!r}")
        if self.code_bits not in (0, 4, 8):
            raise ValueError(f"code_bits must be 0, 4 or 8, got {self.code_bits}")
        if len(self.signed) > MAX_STATES or len(self.rule.hyper) > MAX_HYPER:
            raise ValueError(
                f"at most {MAX_STATES} states and {MAX_HYPER} options are taken, got {len(self.signed)} states and "
                f"the options {', '.join(self.rule.hyper)}"
            )

    @property
    def uses_codes(self) -> bool:
        return "8bit" in self.formats or "4bit" in self.formats

    @functools.cached_property
    def is_random(self) -> bool:
        """True if anything is rounded stochastically: the weights, or a state."""
        states = zip(self.formats, self.stochastic, strict=True)
        return self.rounding == "stochastic" or "4bit" in self.formats or ("bf16", True) in states

    @functools.cached_property
    def is_scaled(self) -> bool:
        """True if some state has scales. Then a tile takes enough work that the warps of a block should share tiles."""
        return self.uses_codes or "float8" in self.formats

    @functools.cached_property
    def threads(self) -> int:
        """Threads of a block: all of a multiprocessor, or few where the kernel only moves bytes. Blocks with rows of
        codes have fewer."""
        return RESIDENT_THREADS if self.is_scaled or self.code_bits else 256

    def table_words(self) -> np.ndarray:
        """The lookup tables as the kernel reads them (on a GPU from shared memory): the values of every state, then the
        cells of every state."""
        if not self.uses_codes:
            return np.zeros(1, np.uint32)
        values, cells = [], []
        for table, signed in zip(self.tables, self.signed, strict=True):
            if table is not None:
                values.append(table.values)
                cells.append(_kernel_cells(table, signed))
        return np.concatenate([*[v.view(np.uint32) for v in values], *cells])

    def source(self, primitives: str = "runtime/ptx.cuh", kernel: tuple[str, ...] = CUDA) -> str:
        """The C++ to compile: this variant as macros, then the machine's primitives (a file of this folder, or source
        text), what all kernels share, and the kernel."""
        defines: dict[str, object] = {
            "PARAM": FLOAT_MACROS[self.param],
            "GRAD": FLOAT_MACROS[self.grad],
            "STATES": len(self.signed),
            "SIGNED": _bits(self.signed),
            "STOCHASTIC_STATES": _bits(self.stochastic),
            "ROUNDING": self.rounding.upper(),
            "ERROR": self.error.upper(),
            "CODE_BITS": self.code_bits,
            "SCALED": self.scaled,
            "THREADS": self.threads,
            "HYPER": " ".join(
                [f"const double {n} = h[{i}];" for i, n in enumerate(self.rule.hyper)]
            ),
            "PREPARE": " ".join(self.rule.prepare.split()),
            "UPDATE": " ".join(self.rule.update.split()),
            "COMPENSATE": " ".join(self.rule.compensate.split()),
        }
        for i in range(MAX_STATES):
            table = self.tables[i] if i < len(self.tables) else None
            defines[f"FORMAT_{i}"] = STATES[self.formats[i] if i < len(self.formats) else "fp32"]
            defines[f"CELLS_{i}"] = len(table.cells) if table else 0
            defines[f"BASE_{i}"] = table.first if table else 0
            defines[f"SHIFT_{i}"] = table.shift if table else 1
        return program(
            defines, primitives, "elementwise/random_bits.h", "elementwise/fused_step.h", *kernel
        )


def _bits(flags: Sequence[bool]) -> int:
    """Bit n is flag n."""
    return sum([flag << i for i, flag in enumerate(flags)])


def tiles(numel: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """The number of tiles of tensors with `numel` elements in rows of `cols`: int64."""
    rows = np.divide(numel, cols, out=np.zeros_like(numel), where=cols > 0, casting="unsafe")
    return rows * -(-cols // TILE)


def locate(first_tile: np.ndarray, total: int) -> np.ndarray:
    """For tensors that begin at these tiles: the tensor of every `LOCATE`-th tile, and that of the last tile; int32."""
    marks = np.append(np.arange(0, total, LOCATE), max(total - 1, 0))
    return (np.searchsorted(first_tile, marks, side="right") - 1).astype(np.int32)


class StepArguments(NamedTuple):
    """What a kernel reads and writes in one step, in the memory of its device.

    Attributes:
        tensors, groups: addresses of the rows of `TENSOR` words, and of `GROUP_WORDS`.
        scalars: int64 [number, SCALARS_WORDS], scratch.
        locate: int32, see `locate`.
        number, tiles: of the tensors, and of all their tiles; of weights that are codes, all their rows.
        control: float32 [2], the factor of the gradients and whether to skip the step (not 0); or None.
        shared: bytes of shared memory besides the tables: of a row of codes, 16 for each scale, and 4 for each element
            if errors are dropped.
    """

    tensors: int
    groups: int
    scalars: torch.Tensor
    locate: torch.Tensor
    number: int
    tiles: int
    control: torch.Tensor | None
    shared: int = 0


class StepKernel:
    """The kernel of one variant, on one device.

    Args:
        variant: the algorithm and the formats for which it is compiled.
        device: a CUDA device.
    """

    def __init__(self, variant: StepVariant, device: torch.device) -> None:
        self.variant, self.device = variant, device
        source, arch = variant.source(), nvrtc.architecture(device)
        with torch.cuda.device(device):
            self._prepare = nvrtc.kernel(source, "prepare", 5, arch)
        self._step = functools.cache(
            lambda shared: nvrtc.kernel(source, "step", 6, arch, shared=shared)
        )
        """By bytes of shared memory."""
        self._multiprocessors = nvrtc.multiprocessors(device)
        self._tables = torch.from_numpy(variant.table_words().view(np.int32)).to(device)

    def __call__(self, step: StepArguments) -> None:
        """Launch the step on the device's current stream. The device must be the current one."""
        tensors, groups, scalars, locate, count, tiles, control, shared = step
        flag = 0 if control is None else control.data_ptr()
        stream = self._stream()
        self._prepare(
            stream, -(-count // 128), 128, tensors, groups, scalars.data_ptr(), count, flag
        )
        if tiles == 0:
            return
        self._step(shared)(
            stream,
            *self._blocks(tiles, shared),
            *(tensors, scalars.data_ptr(), locate.data_ptr(), self._tables.data_ptr(), tiles, flag),
        )

    def _blocks(self, tiles: int, shared: int) -> tuple[int, int]:
        """The number of blocks, and the threads of each: a warp for each tile; where warps share tiles, at most as many
        blocks as run at once. The blocks that take rows of codes are as many as their memory allows."""
        threads = self.variant.threads
        if self.variant.code_bits:
            of_block = shared + 4 * len(self._tables) + nvrtc.BLOCK_SHARED
            fit = min(max(1, nvrtc.SHARED_LIMIT // of_block), MOST_BLOCKS)
            return min(tiles, self._multiprocessors * fit), RESIDENT_THREADS // fit // 32 * 32
        blocks = -(-tiles // (threads // 32))
        return min(blocks, self._multiprocessors) if self.variant.is_scaled else blocks, threads

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream


def _kernel_cells(table: Table, signed: bool) -> np.ndarray:
    """The cells as `ranked` of fused_step_lanes.cuh reads them: the rank in the highest byte, the cell's own bits
    subtracted."""
    rank = table.cells >> table.shift
    words = table.cells.astype(np.int64)
    if not signed:  # a second moment never becomes zero
        words[rank == 0] = 1 << table.shift
    cell = np.arange(table.first, table.first + len(words), dtype=np.int64)
    return (((words << (24 - table.shift)) - (cell << 24)) & 0xFFFFFFFF).astype(np.uint32)

"""Compile the Triton kernels that ops launch for GPUs that this machine does not have, and read what they need.

The host code of an op runs as on that GPU, on tensors without memory, and chooses its tiles. Triton compiles each
launch down to machine code, by the ptxas of its wheel, and does not run it.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

REGISTERS = 65536
"""32-bit registers that the threads of a block share, on all of these GPUs; a thread has at most 255."""


@dataclass(frozen=True)
class Gpu:
    """A GPU's limits: CUDA programming guide, technical specifications by compute capability.

    Args:
        shared: KiB of shared memory that a block may have.
    """

    major: int
    minor: int
    shared: int
    multiprocessors: int

    @property
    def name(self) -> str:
        return f"sm_{self.major}{self.minor}"

    def properties(self, device: Any = None) -> Any:
        own = {"major": self.major, "minor": self.minor}
        sizes = {"multi_processor_count": self.multiprocessors, "L2_cache_size": 2**25}
        return SimpleNamespace(
            **own, **sizes, shared_memory_per_block_optin=self.shared * 1024, warp_size=32
        )


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(8, 0, 163, 108),  # A100
        Gpu(8, 6, 99, 82),  # RTX 3090
        Gpu(8, 9, 99, 128),  # RTX 4090, L40S
        Gpu(12, 0, 99, 170),  # RTX 5090
    )
}


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs. `spilled`: bytes of registers that a thread keeps in memory."""

    name: str
    warps: int
    shared: int
    registers: int
    spilled: int

    def fits(self, gpu: Gpu) -> bool:
        threads = 32 * self.warps
        return self.shared <= 1024 * gpu.shared and threads * self.registers <= REGISTERS


class _Driver:
    """Triton's view of a GPU that is not here. Each has a device number of its own, so that no kernel is reused."""

    def __init__(self, gpu: Gpu) -> None:
        from triton.backends.compiler import GPUTarget

        self.number = 10 * gpu.major + gpu.minor
        self.target = GPUTarget("cuda", self.number, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled_for(gpu: Gpu, launch: Callable[[], Any]) -> list[Compiled]:
    """The kernels that `launch()` launches on tensors of `tensors_like`, compiled for this GPU."""
    return [_read(name, kernel) for name, kernel in _launched(gpu, launch)]


def _launched(gpu: Gpu, launch: Callable[[], Any]) -> list[tuple[str, Any]]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from lowbit_kernels.runtime import triton_runtime

    found: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **named)
        found.append((f"{self.fn.__module__.rpartition('.')[2]}.{self.__name__}", kernel))
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "get_device_properties": gpu.properties,
            "get_device_capability": lambda device=None: (gpu.major, gpu.minor),
            "device_of": lambda tensor: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: False,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(FakeTensor, "data_ptr", lambda self: 0, raising=False)
        patch.setattr(FakeTensor, "contiguous", _contiguous, raising=False)
        patch.setattr(triton_runtime, "_is_known", lambda: False)
        patch.setattr(driver, "_active", _Driver(gpu))
        _forget_devices()
        try:
            with FakeTensorMode():
                launch()
        finally:
            _forget_devices()
    return found


def _contiguous(x: Tensor) -> Tensor:
    """A torch without CUDA refuses the method itself."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _forget_devices() -> None:
    """What functions remember of device 0."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lowbit_kernels"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@functools.cache
def _tool() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def _read(name: str, kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_tool()), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    metadata = kernel.metadata
    spilled = usage["STACK"] + usage["LOCAL"]
    return Compiled(name, metadata.num_warps, metadata.shared, usage["REG"], spilled)


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A contiguous tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def like(value: Any) -> Any:
    """An argument of an op on the CPU as one on the GPU, without memory."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    return [like(one) for one in value] if isinstance(value, list) else value


# ---- what ops launch -------------------------------------------------------------------------------------------------


def launches() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every op with a Triton kernel, by name: those that multiply at the shapes of a layer of Llama 3, where their
    tiles are the largest, and the others at their cases."""
    yield from _products()
    yield from _cases()
    yield from _descents()
    yield "fake_quantize-turned", _turned_rounding
    yield "next_token", _next_token


def _products() -> Iterator[tuple[str, Callable[[], Any]]]:
    from lowbit_kernels.matmul import batched_mm, grouped_mm_triton, int8_mm_triton, ternary_mm
    from lowbit_kernels.matmul.add_grouped_mm import add_grouped_mm_

    int8, e4m3, half = torch.int8, torch.float8_e4m3fn, torch.bfloat16
    scales = functools.partial(on_gpu, dtype=torch.float32)
    n, k = 14336, 4096

    def int8_mm(m: int) -> Any:
        codes = on_gpu(m, k, dtype=int8), on_gpu(n, k, dtype=int8)
        return int8_mm_triton.int8_mm(*codes, scales(m), scales(n), on_gpu(n), half)

    def batched(symmetric: bool, turned: bool, size: int) -> Any:
        x = on_gpu(4, size, size, dtype=torch.float16)
        y = x.mT if symmetric or turned else x
        return batched_mm._launch(x, y, x, symmetric, 2.0, 1.0, 3.0, torch.float16)

    def grouped(dtype: torch.dtype, columns: bool) -> Any:
        offsets = on_gpu(8, dtype=torch.int32)
        a, b = (
            on_gpu(n, 4096, dtype=dtype),
            on_gpu(*((k, 4096) if columns else (8, n, 4096)), dtype=dtype),
        )
        of_b = (8, k) if columns else (8, n)
        of_a = (8, n) if columns else (n,)
        return grouped_mm_triton.grouped_mm(a, b, scales(*of_a), scales(*of_b), offsets, half)

    def add_grouped(rank: int) -> Any:
        offsets = on_gpu(128, dtype=torch.int32)
        return add_grouped_mm_(on_gpu(n, k), on_gpu(n, rank), on_gpu(128, k, rank).mT, offsets, 0.5)

    def ternary(m: int) -> Any:
        packed = on_gpu(n, k // 4, dtype=torch.uint8)
        args = on_gpu(m, k, dtype=int8), packed, scales(m), scales(1), None, half
        return ternary_mm._launch(*args)

    for m in (64, 4096):
        yield f"int8_mm-{m}", functools.partial(int8_mm, m)
    for size in (2048, 1000):  # with tensor maps, where the GPU has them, and without
        yield f"batched_mm-{size}", functools.partial(batched, False, False, size)
        yield f"batched_mm-symmetric-{size}", functools.partial(batched, True, False, size)
    yield "batched_mm-turned", functools.partial(batched, False, True, 2048)
    for dtype in (int8, e4m3):
        for columns in (False, True):
            kind = "columns" if columns else "rows"
            yield f"grouped_mm-{kind}-{dtype}", functools.partial(grouped, dtype, columns)
    for rank in (16, 128):
        yield f"add_grouped_mm-{rank}", functools.partial(add_grouped, rank)
    for m in (1, 64):
        yield f"ternary_mm-{m}", functools.partial(ternary, m)
    yield from _weight_only()


def _weight_only() -> Iterator[tuple[str, Callable[[], Any]]]:
    from benchmarks.cases.formats import FORMATS
    from lowbit_kernels.composed import expert_linear
    from lowbit_kernels.weight_only import weight_linear

    k, named = 4096, {one.name: one for one in FORMATS}

    def linear(name: str, group: int, m: int, dtype: torch.dtype) -> Any:
        made = {key: like(value) for key, value in named[name].weight(64, k, group).items()}
        tensors = [made[key] for key in ("codes", "scale", "zero_point")]
        x = on_gpu(m, k, dtype=dtype)
        return weight_linear.run(
            x, *tensors, None, None, made["group_size"], implementation="triton"
        )

    def experts(name: str, tokens: int, dtype: torch.dtype) -> Any:
        made = named[name].weight(8 * 64, 1024)
        parts = [made[key] for key in ("codes", "scale", "zero_point")]
        parts = [None if t is None else like(t.view(8, 64, -1)) for t in parts]
        ids = on_gpu(2 * tokens, dtype=torch.int64)
        last = like(made["global_scale"]), made["bits"], made["table"]
        args = on_gpu(tokens, 1024, dtype=dtype), *parts, ids, None, made["group_size"], True, *last
        return expert_linear.run(*args)

    for name, group in (("int4", 32), ("int4", 128), ("int8", 0)):
        for m in (1, 16, 64):
            yield (
                f"weight_mm-{name}-{group}-{m}",
                functools.partial(linear, name, group, m, torch.bfloat16),
            )
    yield "weight_mm-int4-128-64-fp32", functools.partial(linear, "int4", 128, 64, torch.float32)
    for name in ("int4", "int8", "float8_e4m3fn", "mxfp4", "mxfp8"):
        for tokens in (1, 512):
            yield (
                f"experts-{name}-{tokens}",
                functools.partial(experts, name, tokens, torch.bfloat16),
            )


OPS = {
    "decoding": "decode_attention quantize_to_cache gated_activation top_experts rms_norm weighted_sum argmax_rows "
    "token_input",
    "quantize": "int4_to_int8 quantize_rowcol round_rows round_columns transpose_codes quantize_experts",
    "elementwise": "block_hadamard scale_matrices fake_quantize",
    "weight_only": "dequantize",
}
"""Ops whose cases in `benchmarks.cases` are compiled, by the folder of their module."""
CASES_OF_AN_OP = 6


def _cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    from importlib import import_module

    for folder, ops in OPS.items():
        for op in ops.split():
            module = import_module(f"lowbit_kernels.{folder}.{op}")
            cases = [
                c
                for c in import_module(f"benchmarks.cases.{op}").CASES
                if not getattr(c, "large", False)
            ]
            step = -(-len(cases) // CASES_OF_AN_OP)
            for case in cases[::step]:
                yield f"{op}-{case.name}", functools.partial(_launch_case, module, op, case)


def _next_token() -> Any:
    from lowbit_kernels.decoding.argmax_rows import _launch_next

    token, position = (on_gpu(*shape, dtype=torch.int64) for shape in ((2, 1), (1,)))
    return _launch_next(on_gpu(2, 128_256), token, position)


def _turned_rounding() -> Any:
    from lowbit_kernels.elementwise.fake_quantize import _launch
    from lowbit_kernels.elementwise.fake_quantize_turned_triton import zero_outside

    x = on_gpu(4, 2880, 5760).mT
    grid = "symmetric e2m1 -6 6 e8m0"
    found = _launch(x, None, None, 32, grid, torch.float32, x.dtype, True, None, None)
    assert found is not None
    return zero_outside(x, found[1], 32)


def _descents() -> Iterator[tuple[str, Callable[[], Any]]]:
    from lowbit_kernels.elementwise.fake_quantize import _launch_descent
    from tests.kernels.test_fake_quantize_descent import SMALL, arguments

    def descent(case: Any) -> Any:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            given = arguments(case)
        return _launch_descent(*map(like, given))

    kinds = ("int4-groups", "int4-asymmetric-groups", "int4-float-zero-groups", "int4-long-rows")
    for case in (c for c in SMALL if c.name in kinds):
        yield f"fake_quantize_descent-{case.name}", functools.partial(descent, case)


def _launch_case(module: Any, op: str, case: Any) -> Any:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        arguments = case.arguments()
    schema = getattr(torch.ops.lowbit, op).default._schema.arguments[len(arguments) :]
    return module._launch(*map(like, arguments), *(one.default_value for one in schema))

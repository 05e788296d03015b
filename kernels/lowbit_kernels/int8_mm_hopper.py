"""Launches ``scaled_mm.cu``: the int8 product on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels import nvrtc

FLOATS = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
TILE_M = TILE_K = 128
THREADS = 384
SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled for; the head of ``scaled_mm.cu`` says what each means."""

    tile_n: int = 256
    stages: int = 4
    cluster: int = 2
    skew: int = 2
    group: int = 8

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the ring, four boxes of the result, scales, barriers."""
        ring = self.stages * (TILE_M + self.tile_n) * TILE_K
        return ring + 4 * 64 * 128 + 2 * 4 * self.tile_n + 2 * 8 * self.stages


def choose(m: int, n: int, multiprocessors: int) -> Config:
    """For a result of m rows and n columns: wide tiles where they keep every multiprocessor at work."""
    wide = -(-m // TILE_M) * -(-n // 256)
    return Config() if wide >= multiprocessors else Config(tile_n=128, stages=6)


def is_available(device: torch.device) -> bool:
    """Whether `int8_mm` runs on this device."""
    return (
        device.type == "cuda"
        and nvrtc.is_available()
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def int8_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """The operands of ``lowbit::int8_scaled_mm``, checked, of a GPU for which `is_available` holds; M, N, K > 0."""
    (m, k), n = a.shape, b.shape[0]
    a, b = (x if _is_readable(x) else x.contiguous() for x in (a, b))
    a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    # The TMA stores rows that begin at multiples of 16 bytes: others are cut off wider ones.
    width = -(-n * out_dtype.itemsize // 16) * 16 // out_dtype.itemsize
    out = a.new_empty((m, width), dtype=out_dtype)
    with torch.cuda.device_of(a):
        multiprocessors = _multiprocessors(a.device)
        config = config or choose(m, n, multiprocessors)
        bias_dtype = None if bias is None else bias.dtype
        kernel = _kernel(config, out_dtype, bias_dtype, torch.cuda.current_device())
        maps = (
            _map(a.data_ptr(), torch.int8, m, k, a.stride(0), 128, 128),
            _map(b.data_ptr(), torch.int8, n, k, b.stride(0), config.tile_n // config.cluster, 128),
            _map(out.data_ptr(), out_dtype, m, n, width, 64, 128 // out_dtype.itemsize),
        )
        tiles = -(-m // (TILE_M * config.cluster)) * -(-n // config.tile_n)
        kernel(
            torch.cuda.current_stream().cuda_stream,
            min(tiles, multiprocessors // config.cluster) * config.cluster,
            THREADS,
            *(one.getPtr() for one in maps),
            *(a_scale.data_ptr(), b_scale.data_ptr(), 0 if bias is None else bias.data_ptr()),
            *(int(a_scale.numel() > 1), int(b_scale.numel() > 1), m, n, -(-k // TILE_K)),
        )
    return out if width == n else out[:, :n].contiguous()


def source(config: Config, out: torch.dtype, bias: torch.dtype | None) -> str:
    """The CUDA C++ to compile."""
    defines = {field.name.upper(): getattr(config, field.name) for field in fields(config)}
    defines |= {"OUT": FLOATS[out], "BIAS": FLOATS[bias] if bias else "NONE"}
    folder = Path(__file__).parent
    ptx, hopper, mm = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("ptx.cuh", "hopper.cuh", "scaled_mm.cu")
    )
    lines = [f"#define {name} {value}" for name, value in defines.items()]
    return "\n".join([*lines, ptx, hopper, _multiply(config.tile_n), mm])


def _multiply(columns: int) -> str:
    """The instruction that adds the product of 64 x 32 bytes of a and `columns` x 32 of b to a warpgroup's sums: too
    many operands to write by hand."""
    sums = columns // 2
    names = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+r"(sums[{i}])' for i in range(sums))
    a, b, add, high = (f"%{sums + i}" for i in range(4))
    return f"""
// sums = a * b, plus sums if `add`
DEVICE void multiply(int (&sums)[{sums}], uint32 a, uint32 b, int add) {{
    asm volatile(
        "{{\\n.reg .pred p;\\n.reg .b64 x, y;\\n"
        "setp.ne.b32 p, {add}, 0;\\n"
        "mov.b64 x, {{{a}, {high}}};\\n"
        "mov.b64 y, {{{b}, {high}}};\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.s8.s8 {{{names}}}, x, y, p;\\n}}"
        : {operands}
        : "r"(a), "r"(b), "r"(add), "n"(OPERAND_HIGH));
}}
"""


@functools.cache
def _kernel(
    config: Config, out: torch.dtype, bias: torch.dtype | None, device: int
) -> nvrtc.Kernel:
    assert config.shared <= SHARED_LIMIT
    module = nvrtc.Module(nvrtc.compiled(source(config, out, bias), "sm_90a"))
    return module.kernel("int8_mm", 11, structs=3, shared=config.shared)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=4096)
def _map(
    address: int, dtype: torch.dtype, rows: int, columns: int, stride: int, box: int, width: int
) -> Any:
    """A tensor map of `rows` x `columns` elements at `address`, copied in boxes of `box` rows of `width` elements (128
    bytes), swizzled. It holds no memory and depends on nothing else, so that it may be kept."""
    from cuda.bindings import driver

    types = {
        torch.int8: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.float32: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }
    error, encoded = driver.cuTensorMapEncodeTiled(
        types[dtype],
        2,
        address,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(stride * dtype.itemsize)],
        [driver.cuuint32_t(width), driver.cuuint32_t(box)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error) != 0:
        raise RuntimeError(
            f"CUDA cannot describe {rows} x {columns} of {dtype} at {address:#x}, {stride} elements a row: {error!r}"
        )
    return encoded


def _is_readable(x: Tensor) -> bool:
    """By the TMA: rows without gaps, each beginning at a multiple of 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0

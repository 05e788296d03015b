"""Launches ``quantize_tokens.cu``: rows of bfloat16 and float16, on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from lowbit_kernels import nvrtc

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "FP16",
    torch.int8: "INT8",
    torch.float8_e4m3fn: "E4M3",
}
VECTOR = 8  # elements that a thread loads at once
MAX_THREADS = 1024
MAX_VECTORS = 8  # of a thread; more don't fit its registers


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for; the head of ``quantize_tokens.cu`` says what each means."""

    x: str
    codes: str
    out: str
    vectors: int


def takes(x: Tensor) -> bool:
    """Whether `quantize` takes x [M, K], M and K > 0: rows that begin at multiples of 16 bytes, K a multiple of 16."""
    m, k = x.shape
    return (
        nvrtc.runs_on_hopper(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and k % 16 == 0
        and k <= VECTOR * MAX_THREADS * MAX_VECTORS
        and x.stride(1) == 1
        and (m == 1 or x.stride(0) % VECTOR == 0)
        and x.data_ptr() % 16 == 0
    )


def plan(k: int) -> tuple[int, int]:
    """Vectors of a thread, and threads of a block. Four, measured on an H200: with fewer, the warps of a block take
    longer to meet, with one of many rows up to 1.5 times as long."""
    vectors, own = k // VECTOR, 4
    while vectors > own * MAX_THREADS:
        own *= 2
    return own, -(-vectors // (own * 32)) * 32


def quantize(x: Tensor, codes: Tensor, scale: Tensor, format: str) -> None:
    """Writes codes [M, K] and scale [M] of an x for which `takes` holds. Codes of `format`, "int8" or "e4m3", are of
    its dtype, or numbers of float16, those of "int8" also of bfloat16."""
    m, k = x.shape
    own, threads = plan(k)
    variant = Variant(DTYPES[x.dtype], format.upper(), DTYPES[codes.dtype], own)
    with torch.cuda.device_of(x):
        stream = torch.cuda.current_stream().cuda_stream
        addresses = (x.data_ptr(), x.stride(0), codes.data_ptr(), scale.data_ptr())
        _kernel(variant, torch.cuda.current_device())(stream, m, threads, *addresses, k // VECTOR)


def source(variant: Variant, primitives: str | None = None) -> str:
    """The CUDA C++ to compile; `primitives` takes the place of ptx.cuh and hopper.cuh."""
    defines = [f"#define {f.name.upper()} {getattr(variant, f.name)}" for f in fields(variant)]
    own = [primitives] if primitives else [_file("ptx.cuh"), _file("hopper.cuh")]
    return "\n".join([*defines, *own, _file("quantize_tokens.cu")])


def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@functools.cache
def _kernel(variant: Variant, device: int) -> nvrtc.Kernel:
    module = nvrtc.Module(nvrtc.compiled(source(variant), "sm_90a"))
    return module.kernel("quantize_tokens", 5, overlaps=True)

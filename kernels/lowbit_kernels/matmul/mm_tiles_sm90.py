"""The parts that launchers of ``mm_tiles_sm90.cuh`` share: the ring of its tiles, and the wgmma instruction."""

from __future__ import annotations

import torch

from lowbit_kernels.runtime import nvrtc

TILE_M, TILE_K, CLUSTER, THREADS = 128, 128, 2, 384
MAX_STAGES = 10
FORMATS = {
    torch.int8: "s8",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float16: "f16",
}
"""The names of the operands' formats in instructions."""
Formats = tuple[torch.dtype, torch.dtype]


def ring(width: int) -> tuple[int, int]:
    """Stages of the ring of tiles of `width` columns, and bytes of shared memory of a block."""
    stage = (TILE_M + width) * TILE_K
    fixed = 4 * 64 * 128 + 2 * 4 * width + 2 * 8 * MAX_STAGES
    stages = min((nvrtc.SHARED_LIMIT - fixed) // stage, MAX_STAGES)
    return stages, fixed + stages * stage


def instruction(formats: Formats, width: int) -> str:
    """The wgmma instruction for 64 x 32 bytes of a and `width` x 32 of b; generated, with an operand for each sum."""
    sums, size = width // 2, formats[0].itemsize
    names = ", ".join(f"%{i}" for i in range(sums))
    is_int8 = formats[0] == torch.int8
    # signs of both operands of floats, and their orders if they have 16 bits
    signs = "" if is_int8 else ", 1, 1" if size == 1 else ", 1, 1, 0, 0"
    kind, letter = ("s32", "r") if is_int8 else ("f32", "f")
    operands = ", ".join(f'"+{letter}"(sums[{i}])' for i in range(sums))
    a, b, add, high = (f"%{sums + i}" for i in range(4))
    name = f"m64n{width}k{32 // size}.{kind}.{FORMATS[formats[0]]}.{FORMATS[formats[1]]}"
    return f"""
// sums = a * b, plus sums if `add`
DEVICE void multiply(SUM (&sums)[{sums}], uint32 a, uint32 b, int add) {{
    asm volatile(
        "{{\\n.reg .pred p;\\n.reg .b64 x, y;\\n"
        "setp.ne.b32 p, {add}, 0;\\n"
        "mov.b64 x, {{{a}, {high}}};\\n"
        "mov.b64 y, {{{b}, {high}}};\\n"
        "wgmma.mma_async.sync.aligned.{name} {{{names}}}, x, y, p{signs};\\n}}"
        : {operands}
        : "r"(a), "r"(b), "r"(add), "n"(OPERAND_HIGH));
}}
"""

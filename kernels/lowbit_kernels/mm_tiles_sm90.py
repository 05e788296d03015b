"""The parts that launchers of ``mm_tiles_sm90.cuh`` share: the ring of its tiles, and the wgmma instruction."""

from __future__ import annotations

from lowbit_kernels import nvrtc

TILE_M, TILE_K, CLUSTER, THREADS = 128, 128, 2, 384
MAX_STAGES = 10
NAMES = {"int8": "s8", "e4m3": "e4m3", "e5m2": "e5m2"}
"""Formats of operands as the instruction names them."""


def ring(width: int) -> tuple[int, int]:
    """Stages of the ring of tiles of `width` columns, and bytes of shared memory of a block."""
    stage = (TILE_M + width) * TILE_K
    fixed = 4 * 64 * 128 + 2 * 4 * width + 2 * 8 * MAX_STAGES
    stages = min((nvrtc.SHARED_LIMIT - fixed) // stage, MAX_STAGES)
    return stages, fixed + stages * stage


def multiply(width: int, a: str = "int8", b: str = "int8") -> str:
    """The wgmma instruction for 64 x 32 bytes of a and `width` x 32 of b; generated, with an operand for each sum.

    int32 sums wrap, float32 sums have the precision of the hardware.
    """
    sums = width // 2
    is_int8 = a == "int8"
    constraint, type_of_sums = ("+r", "int") if is_int8 else ("+f", "float")
    names = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"{constraint}"(sums[{i}])' for i in range(sums))
    at_a, at_b, add, high = (f"%{sums + i}" for i in range(4))
    types = f"{'s32' if is_int8 else 'f32'}.{NAMES[a]}.{NAMES[b]}"
    signs = "" if is_int8 else ", 1, 1"  # a and b are not negated
    return f"""
// sums = a * b, plus sums if `add`
DEVICE void multiply({type_of_sums} (&sums)[{sums}], uint32 a, uint32 b, int add) {{
    asm volatile(
        "{{\\n.reg .pred p;\\n.reg .b64 x, y;\\n"
        "setp.ne.b32 p, {add}, 0;\\n"
        "mov.b64 x, {{{at_a}, {high}}};\\n"
        "mov.b64 y, {{{at_b}, {high}}};\\n"
        "wgmma.mma_async.sync.aligned.m64n{width}k32.{types} {{{names}}}, x, y, p{signs};\\n}}"
        : {operands}
        : "r"(a), "r"(b), "r"(add), "n"(OPERAND_HIGH));
}}
"""

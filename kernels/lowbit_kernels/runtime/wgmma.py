"""The wgmma instructions of compute capability 9.0 with the first operand in registers, as CUDA C++."""

from __future__ import annotations


def multiply_from_registers(tokens: int, step: int, types: str) -> str:
    """``multiply``: 64 x `step` elements in registers times `tokens` x `step` in shared memory; generated, with an
    operand for each sum.

    Args:
        tokens: a multiple of 8, at most 256.
        step: of K: 16 for numbers of 16 bits, 32 for 8 bits.
        types: of the sums and of the operands, such as "f32.bf16.bf16" or "s32.s8.s8".
    """
    sums, is_integer = tokens // 2, types.startswith("s32")
    kind, letter = ("int", "r") if is_integer else ("float", "f")
    # signs of both operands of floats, and the order of the second if it has 16 bits
    signs = "" if is_integer else ", 1, 1" if step == 32 else ", 1, 1, 0"
    names = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+{letter}"(sums[{i}])' for i in range(sums))
    first = ", ".join(f"%{sums + i}" for i in range(4))
    b, add = (f"%{sums + 4 + i}" for i in range(2))
    return f"""
// sums = a * b, plus sums if `add`
DEVICE void multiply({kind} (&sums)[{sums}], const uint32 *a, uint64 b, int add) {{
    asm volatile(
        "{{\\n.reg .pred p;\\n"
        "setp.ne.b32 p, {add}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{tokens}k{step}.{types} {{{names}}}, {{{first}}}, {b}, p{signs};\\n}}"
        : {operands}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}}
"""

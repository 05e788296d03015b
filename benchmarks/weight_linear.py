"""Linears of low-bit weights at the shapes of Llama 3 layers, 1 to 4,096 tokens, against bf16 and PyTorch's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.cases.dynamic_linear import Case as DynamicCase
from benchmarks.cases.formats import FORMATS, Format
from benchmarks.cases.weight_linear import Case
from benchmarks.registry import Candidate, Problem, Result, Row, Table, benchmark
from benchmarks.report import readable
from benchmarks.timing import Timing, measure_over
from lowbit_kernels.composed import dynamic_linear
from lowbit_kernels.weight_only import weight_linear

TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
LAYERS = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192))
TOKENS_OF_FORMATS = (1, 4, 16, 64, 512, 2048)
CHECKED_TOKENS = (1, 16, 64)  # the reference decodes the whole weight in float64
PRESETS = (
    *("int4", "int8", "int1-value", "int2-value", "int3-value", "int3", "uint3", "int5", "int6"),
    *("int7", "uint8", "float8_e4m3fn", "nf4", "mxfp4", "mxfp8", "nvfp4"),
)
GROUP = 128
ROTATED_BYTES = 2**28  # of weights used in turn, so that none is in the L2 cache
MOST_TINYGEMM_TOKENS = 256  # more tokens take it tens of milliseconds
LARGEST_ERROR = 1e-2
MOST_CHECKED_OPERATIONS = 2**37


@dataclass(frozen=True)
class Linear(Candidate):
    """``moved_bytes`` counts the weight and its scales, ``operations`` multiplications and additions. The result is
    compared with the ``reference``'s before timing."""

    operations: int = 0
    reference: Callable | None = None


def _measure(candidate: Linear, repeats: int) -> Timing:
    if candidate.reference is not None:
        given = candidate.arguments()
        expected = candidate.reference(*given).float()
        error = (candidate.run(*given).float() - expected).norm() / expected.norm()
        if not error < LARGEST_ERROR:
            raise ValueError(
                f"wrong: its error is {error:.1e}, at most {LARGEST_ERROR:.0e} is accepted"
            )
        del given, expected
    return measure_over(candidate, -(-ROTATED_BYTES // candidate.moved_bytes), repeats)


def _cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    seconds, bf16 = row.measured.median, result.reference.measured
    floor = row.candidate.moved_bytes / bandwidth
    speed = f"{row.candidate.operations / seconds / 1e12:.0f}"
    ratio = "" if bf16 is None else f"{seconds / bf16.median:.2f}"
    return [readable(seconds), ratio, f"{seconds / floor:.2f}", speed]


TABLE = Table(
    columns=("time", "time / bf16", "time / floor", "TFLOP/s or TOPS"),
    measure=_measure,
    cells=_cells,
    legend=f"Medians, in CUDA graphs, over at least {ROTATED_BYTES >> 20} MiB of weights in turn. *time / bf16*: of "
    "cuBLAS's in the same run. *floor*: reading the weight and its scales once at the speed of the copy. Dynamic "
    "products include the quantization of their activations.",
)


def _bf16(m: int, n: int, k: int) -> tuple:
    return tuple(torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") for rows in (m, n))


def _weight_only(bits: int, m: int, n: int, k: int) -> tuple:
    group = GROUP if bits == 4 else k
    return Case("", m, n, k, group, bits).arguments("cuda")


def _dynamic(format: str, m: int, n: int, k: int, group: int = 0) -> tuple:
    scales = torch.bfloat16 if group else torch.float32
    return DynamicCase("", m, n, k, format, scale_dtype=scales, group=group).arguments("cuda")


def _tinygemm_arguments(m: int, n: int, k: int) -> tuple:
    x, _ = _bf16(m, 16, k)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    weight = torch.ops.aten._convert_weight_to_int4pack(packed, 8)
    scales = torch.rand(k // GROUP, n, 2, dtype=torch.bfloat16, device="cuda") * 0.02
    return x, weight, GROUP, scales


def _scaled_mm(x, codes, scale, bias, residual, *others) -> torch.Tensor:
    """The code of a user with torch alone, for torch.compile: quantization in one pass, then the product."""
    t = (x.float().abs().amax(1, keepdim=True) / 448).clamp(min=2.0**-126)
    q = (x.float() / t).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch._scaled_mm(
        q, codes.t(), t, scale[None], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _candidates(m: int, n: int, k: int) -> Iterator[Linear]:
    shape, operations = (m, n, k), 2 * m * n * k
    by_row, by_group = 4 * n, 2 * n * -(-k // GROUP)
    ops = torch.ops.lowbit
    scaled = torch.compile(_scaled_mm, fullgraph=True, dynamic=False)
    only, dynamic = weight_linear.reference, dynamic_linear.reference
    candidates: list[tuple[str, Callable, Callable[[], tuple], int, Callable | None]] = [
        ("int4", ops.weight_linear, partial(_weight_only, 4, *shape), n * k // 2 + by_group, only),
        ("int8", ops.weight_linear, partial(_weight_only, 8, *shape), n * k + 2 * n, only),
        (
            "int8 dynamic",
            ops.dynamic_linear,
            partial(_dynamic, "int8", *shape),
            n * k + by_row,
            dynamic,
        ),
        *(
            (
                f"int8 x int4, groups of {group}",
                ops.dynamic_linear,
                partial(_dynamic, "int4", *shape, group),
                n * k // 2 + 2 * n * -(-k // group),
                dynamic,
            )
            for group in (GROUP, 32)
        ),
        (
            "float8",
            ops.dynamic_linear,
            partial(_dynamic, "e4m3", *shape),
            n * k + by_row,
            dynamic,
        ),
        (
            "torch._scaled_mm, float8, compiled",
            scaled,
            partial(_dynamic, "e4m3", *shape),
            n * k + by_row,
            dynamic,
        ),
        ("bf16", F.linear, partial(_bf16, *shape), 2 * n * k, None),
    ]
    if m <= MOST_TINYGEMM_TOKENS and n % 8 == 0 and k % 1024 == 0:
        tinygemm = torch.ops.aten._weight_int4pack_mm
        arguments = partial(_tinygemm_arguments, *shape)
        candidates.append(
            ("torch tinygemm, int4", tinygemm, arguments, n * k // 2 + 2 * by_group, None)
        )
    for name, run, made, moved, reference in candidates:
        checked = reference if operations <= MOST_CHECKED_OPERATIONS else None
        yield Linear(name, run, made, moved, operations=operations, reference=checked)


def _of_format(format: Format, m: int, n: int, k: int) -> tuple:
    weight = format.weight(n, k, device="cuda")
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    parts = (weight["codes"], weight["scale"], weight["zero_point"], None, None)
    last = (weight["group_size"], weight["global_scale"], weight["bits"], [*weight["table"]])
    return (x, *parts, *last)


def _bytes_of(format: Format, n: int, k: int) -> int:
    """Bytes of the codes, scales and zero points of a weight."""
    row = format.weight(1, k)
    tensors = (row["codes"], row["scale"], row["zero_point"])
    return n * sum(t.nbytes for t in tensors if t is not None)


def shapes_of(file: Path) -> list[tuple[int, int, int]]:
    """The distinct M, N, K of the forward products that ran, in a file that ``lowbit.trace`` wrote."""
    products = json.loads(file.read_text(encoding="utf-8"))["products"]
    ran = [p for p in products if p["product"] == "output" and p["calls"]]
    return sorted({(p["m"], p["n"], p["k"]) for p in ran}, key=lambda s: s[::-1])


@benchmark("weight_formats", "linears of weights in every format", table=TABLE)
def weight_formats() -> Iterator[Problem]:
    """The formats of presets at two shapes, in the group sizes in which models have them."""
    run, reference = torch.ops.lowbit.weight_linear, weight_linear.reference
    for n, k in LAYERS[:2]:
        for m in TOKENS_OF_FORMATS:
            candidates: list[Candidate] = []
            operations = 2 * m * n * k
            for format in FORMATS:
                if format.name in PRESETS:
                    made, moved = partial(_of_format, format, m, n, k), _bytes_of(format, n, k)
                    checked = reference if m in CHECKED_TOKENS else None
                    one = Linear(
                        format.name, run, made, moved, operations=operations, reference=checked
                    )
                    candidates.append(one)
            bf16 = partial(_bf16, m, n, k)
            candidates.append(Linear("bf16", F.linear, bf16, 2 * n * k, operations=operations))
            yield Problem(f"{n} x {k}, {m} tokens", candidates, reference="bf16")


@benchmark(
    "weight_linear", "linears of int4, int8 and float8 weights", table=TABLE, takes_shapes=True
)
def weight_linears(file: Path | None = None) -> Iterator[Problem]:
    """The products at the shapes in a file, or at those of Llama 3 layers and 8192 cubed."""
    shapes = [(m, n, k) for n, k in LAYERS for m in TOKENS] + [(8192, 8192, 8192)]
    for m, n, k in shapes if file is None else shapes_of(file):
        torch.compiler.reset()
        yield Problem(f"{n} x {k}, {m} tokens", list(_candidates(m, n, k)), reference="bf16")

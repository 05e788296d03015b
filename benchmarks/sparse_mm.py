"""torch's products of 2:4 sparse weights beside dense ones, on a GPU: int8, float8 and bfloat16.

    python -m benchmarks.sparse_mm [--shapes 4096x4096,14336x4096] [--rows 16,64,256,1024,4096]

y = x wᵀ with w [N, K], two of each four neighbours 0. Dense: cuBLAS in bfloat16, lowbit's `scaled_mm` in int8 and
float8, with a scale for each token and each output. Sparse: cuSPARSELt (`torch._cslt_sparse_mm`, with the algorithm
that its search finds, and in int8 a scale for each output), the same followed by the scales that it does not take, of
tokens, in float8 of outputs too, and CUTLASS (`torch._sparse_semi_structured_linear`; bare int32 sums for int8, no
float8). The second table has inputs in bfloat16 and weights of lowbit: dense, and with `Prune24(compressed=True)`.

Each is compared with the product in float32 before it is timed. GPU times of a CUDA graph with cold caches; a "*" marks
a product that no graph captures, and then the time holds the host's part.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit
from benchmarks.cases.operands import codes_of_normals
from benchmarks.registry import Candidate
from benchmarks.timing import measure
from lowbit.inference.calibration.columns import two_of_four
from lowbit.tensor.frozen.sparse24_tensor import Sparse24Tensor

E4M3 = torch.float8_e4m3fn
KINDS = {"int8": torch.int8, "float8": E4M3, "bf16": torch.bfloat16}
STORED = {
    "int4": lowbit.IntxWeightOnly(4, 128, "symmetric"),
    "int8": lowbit.Int8WeightOnly(),
    "float8": lowbit.Float8WeightOnly(),
}
Made = tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], tuple[Any, ...]]]
"""The product, and what makes its arguments of x and w."""


def operands(n: int, k: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [M, K], and w [N, K] with two zeros of each four."""
    if dtype is torch.bfloat16:
        x, w = (torch.randn(rows, k, dtype=dtype, device="cuda") for rows in (m, n))
    else:
        x, w = (codes_of_normals((rows, k), dtype, "cuda") for rows in (m, n))
    kept = two_of_four(w.float().abs().T).T
    return x, (w.float() * kept).to(dtype)


def dense(x: Tensor, w: Tensor) -> Made:
    if x.dtype is torch.bfloat16:
        return F.linear, lambda x, w: (x, w)
    ones = [torch.ones(len(t), device="cuda") for t in (x, w)]
    return torch.ops.lowbit.scaled_mm, lambda x, w: (x, w, *ones, None, torch.bfloat16)


def cusparselt(x: Tensor, w: Tensor) -> Made:
    options: dict[str, Any] = {"transpose_result": True}
    if x.dtype is not torch.bfloat16:  # it takes no out_dtype
        options["out_dtype"] = torch.bfloat16
    if x.dtype is torch.int8:
        options["alpha"] = torch.ones(len(w), device="cuda")
    found = torch._cslt_sparse_mm_search(torch._cslt_compress(w), x.T, **options)

    def run(packed: Tensor, x: Tensor) -> Tensor:
        return torch._cslt_sparse_mm(packed, x.T, alg_id=found, **options)

    return run, lambda x, w: (torch._cslt_compress(w), x)


def scaled_cusparselt(x: Tensor, w: Tensor) -> Made:
    """What a layer needs: the product, then the scale of each token, and in float8 of each output."""
    if x.dtype is torch.bfloat16:
        raise ValueError("16 bits have no scales")
    run, pack = cusparselt(x, w)
    scale, of_outputs = torch.ones(len(x), 1, device="cuda"), torch.ones(len(w), device="cuda")
    if x.dtype is E4M3:
        return lambda packed, x: _by_both(run(packed, x), scale, of_outputs), pack
    return lambda packed, x: run(packed, x).mul_(scale), pack


@torch.compile(dynamic=True)
def _by_both(y: Tensor, of_tokens: Tensor, of_outputs: Tensor) -> Tensor:
    return (y * of_tokens * of_outputs).to(y.dtype)


def cutlass(x: Tensor, w: Tensor) -> Made:
    from torch.sparse import SparseSemiStructuredTensorCUTLASS

    def run(x: Tensor, values: Tensor, meta: Tensor) -> Tensor:
        out = torch.int32 if x.dtype is torch.int8 else None
        return torch._sparse_semi_structured_linear(x, values, meta, out_dtype=out)

    def pack(x: Tensor, w: Tensor) -> tuple[Any, ...]:
        packed = SparseSemiStructuredTensorCUTLASS.from_dense(w)
        return x, packed.packed, packed.meta

    return run, pack


WAYS = dense, cusparselt, scaled_cusparselt, cutlass


def timed(make: Callable[[Tensor, Tensor], Made], sizes: tuple[int, int, int], kind: str) -> str:
    """Microseconds as text, or why there are none."""
    n, k, m = sizes
    try:
        x, w = operands(n, k, m, KINDS[kind])
        run, pack = make(x, w)
        expected = x.float() @ w.float().T
        error = float((run(*pack(x, w)).float() - expected).norm() / expected.norm())
        if not error < 1e-2:
            return f"wrong: {error:.1e}"
    except (RuntimeError, ValueError, KeyError, NotImplementedError, TypeError) as reason:
        torch.cuda.synchronize()
        return f"no: {str(reason).splitlines()[0][:60]}"

    def fresh() -> tuple[Any, ...]:
        return pack(*operands(n, k, m, KINDS[kind]))

    return microseconds(run, fresh, x.element_size() * (x.numel() + w.numel()) + 2 * m * n)


def microseconds(run: Callable[..., Tensor], fresh: Callable[[], Any], moved: int) -> str:
    for graph in (True, False):
        try:
            candidate = Candidate("", run, fresh, moved, graph=graph)
            return f"{measure(candidate, 10).median * 1e6:.1f}{'' if graph else '*'}"
        except RuntimeError:
            torch.cuda.synchronize()
    return "not timed"


def stored(sizes: tuple[int, int, int], scheme: lowbit.Scheme) -> list[str]:
    """Microseconds of a linear with the dense weight, and with the compressed one."""
    n, k, m = sizes

    def made(compressed: bool) -> tuple[Tensor, Any]:
        x, w = operands(n, k, m, torch.bfloat16)
        layer = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        layer.weight = torch.nn.Parameter(w)
        lowbit.quantize_(layer, scheme, scales="minmax")
        weight: Any = layer.weight
        return x, Sparse24Tensor.of_dense(weight) if compressed else weight

    cells = []
    for fresh in (functools.partial(made, False), functools.partial(made, True)):
        x, weight = fresh()
        expected = x.float() @ weight.dequantize().float().T
        error = float((F.linear(x, weight).float() - expected).norm() / expected.norm())
        if error < 1e-2:
            cells.append(microseconds(F.linear, fresh, n * k + 2 * m * (n + k)))
        else:
            cells.append(f"wrong: {error:.1e}")
    return cells


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.sparse_mm", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="4096x4096,14336x4096", help="N x K of weights")
    parser.add_argument("--rows", default="16,64,256,1024,4096", help="M, the rows of x")
    options = parser.parse_args(arguments)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds")
    print("| N x K | M | kind | dense | cuSPARSELt | with token scales | CUTLASS |")
    print("|---|--:|---|--:|--:|--:|--:|")
    for shape in options.shapes.split(","):
        n, k = map(int, shape.split("x"))
        for kind in KINDS:
            for m in map(int, options.rows.split(",")):
                cells = [timed(make, (n, k, m), kind) for make in WAYS]
                print(f"| {n} x {k} | {m} | {kind} | {' | '.join(cells)} |", flush=True)
    print("| N x K | M | weights | dense | compressed |")
    print("|---|--:|---|--:|--:|")
    for shape in options.shapes.split(","):
        n, k = map(int, shape.split("x"))
        for kind, scheme in STORED.items():
            for m in map(int, options.rows.split(",")):
                cells = stored((n, k, m), scheme)
                print(f"| {n} x {k} | {m} | {kind} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

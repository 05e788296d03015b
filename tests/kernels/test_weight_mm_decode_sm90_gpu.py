"""The decode kernel against float64, on a GPU of compute capability 9.0."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit_kernels.quantize import quantize_rowcol
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.weight_only import weight_mm_decode_sm90
from lowbit_kernels.weight_only.weight_mm_decode_sm90 import DecodeDivision, DecodeProduct, plan
from lowbit_kernels.weight_only.weight_operands import WeightOperands

BOUND = {torch.bfloat16: 2e-3, torch.float16: 3e-4}  # of norms, against float64
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192)]


def operands(
    m: int,
    n: int,
    k: int,
    bits: int = 4,
    group: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype | None = None,
    zero: bool = False,
    extras: bool = False,
    device: str = "cuda",
) -> dict:
    """A random product; group 0: one scale a row. The padding of k to whole groups holds random codes."""
    generator = torch.Generator().manual_seed(m * 7 + n * 3 + k)
    step = group or 32
    padded = -(-k // step) * step
    group = group or padded
    width, groups = padded * bits // 8, padded // group

    def randint(low: int, high: int, shape: tuple, to: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, dtype=to, generator=generator).to(device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    codes = randint(0, 256, (n, width), torch.uint8)
    half = 1 << (bits - 1)
    scale = (torch.rand(n, groups, generator=generator) + 0.5) * 0.02
    scale.flatten()[::3] *= -1  # scales may be negative
    return {
        "x": normal(m, k),
        "codes": codes if bits == 4 else codes.view(torch.int8),
        "scale": scale.to(device, scale_dtype or dtype),
        "zero_point": randint(-half, half, (n, groups), torch.int8) if zero else None,
        "bias": normal(n) if extras else None,
        "residual": normal(m, n) if extras else None,
        "token_scale": torch.rand(m, generator=generator).to(device) + 0.5 if extras else None,
        "bits": bits,
        "group_size": group,
    }


def float8_operands(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    extras: bool = False,
    device: str = "cuda",
) -> dict:
    """The same for e4m3 by e4m3 with one scale a row and results of `dtype`; k is a multiple of 32."""
    case = operands(m, n, k, 8, 0, dtype, torch.float32, extras=extras, device=device)
    nan = case["codes"].bitwise_and(127) == 127
    numbers = (case["x"].float() * 112).clamp(-448, 448).to(torch.float8_e4m3fn).half()
    codes = case["codes"].masked_fill(nan, 0).view(torch.float8_e4m3fn)
    return {**case, "x": numbers, "codes": codes, "dtype": dtype}


def exact(
    x,
    codes,
    scale,
    zero_point,
    bias,
    residual,
    token_scale,
    *,
    bits,
    group_size,
    dtype=None,
    rounds=None,
) -> Tensor:
    if rounds is not None:
        format = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}[rounds]
        k = x.shape[1]
        x, token_scale, _, _ = quantize_rowcol.reference(x, format, True, False)
        x = x[:, :k]
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1).double() - 8
    codes = codes.double().unflatten(1, (-1, group_size))
    if zero_point is not None:
        codes = codes - zero_point.double()[..., None]
    weight = (codes * scale.double()[..., None]).flatten(1)[:, : x.shape[1]]
    out = x.double() @ weight.T
    if token_scale is not None:
        out = out * token_scale.double()[:, None]
    for one in (bias, residual):
        out = out if one is None else out + one.double()
    return out


def tensors_of(case: dict) -> tuple:
    named = ("x", "codes", "scale", "zero_point", "bias", "residual", "token_scale")
    return *(case[name] for name in named), None


def operands_of(case: dict) -> WeightOperands:
    return WeightOperands.of(
        *tensors_of(case),
        group_size=case["group_size"],
        out=case.get("dtype"),
        rounds=case.get("rounds"),
    )


def run_planned(case: dict, chosen: DecodeDivision, own: WeightOperands | None = None) -> Tensor:
    return DecodeProduct(own or operands_of(case), chosen)(tensors_of(case))


def run(case: dict) -> Tensor:
    product = weight_mm_decode_sm90.product(operands_of(case))
    if torch.cuda.get_device_capability() != (9, 0):
        assert product is None
        pytest.skip(f"compute capability 9.0, got {torch.cuda.get_device_capability()}")
    assert product is not None
    return product(tensors_of(case))


def check(case: dict) -> None:
    out, expected = run(case), exact(**case)
    assert (
        out.dtype == case.get("dtype", case["x"].dtype)
        and out.is_contiguous()
        and out.shape == expected.shape
    )
    assert torch.isfinite(out).all()
    error = (out.double() - expected).norm() / expected.norm()
    # With few numbers the largest rounding counts: half of 2**-7, or of 2**-10.
    bound = BOUND[out.dtype] if out.numel() >= 64 else torch.finfo(out.dtype).eps / 2 * 1.03
    assert error <= bound, f"relative error {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 96, 128, 256, 0])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups(bits: int, group: int, dtype: torch.dtype, zero: bool) -> None:
    check(operands(5, 272, 1536, bits, group, dtype, zero=zero, extras=zero))


@pytest.mark.cover("pairs")
@pytest.mark.gpu
@pytest.mark.parametrize("k", [32, 96, 100, 128, 160, 4096, 4224, 14336])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128, 0])
@pytest.mark.parametrize("m", [3, 16])
def test_lengths(m: int, group: int, bits: int, k: int) -> None:
    check(operands(m, 65, k, bits, group, zero=True))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 17, 1000, 4097])
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16])
def test_tokens_and_rows(m: int, n: int) -> None:
    check(operands(m, n, 1024, extras=True))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_layers(n: int, k: int, m: int, bits: int) -> None:
    check(operands(m, n, k, bits))


@pytest.mark.cover("pairs")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 16])
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (65, 32), (1, 96), (1000, 1440)])
def test_float8(n: int, k: int, m: int, dtype: torch.dtype) -> None:
    case = float8_operands(m, n, k, dtype, extras=True)
    case["scale"] /= 64  # results within float16
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_scales(scale_dtype: torch.dtype) -> None:
    check(operands(4, 130, 640, 4, 64, torch.float16, scale_dtype))
    check(operands(12, 130, 640, 8, 64, torch.bfloat16, scale_dtype, zero=True))


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("height", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_divisions(bits: int, height: int, split: int) -> None:
    """More tiles than clusters and stages, so that every barrier changes its phase several times."""
    case = operands(11, 12_000, 2048 + 128, bits, extras=True)
    run(case)
    chosen = plan(11, 12_000, 2176, bits, 64, scale_bytes=34, splits=(split,), heights=(height,))
    if chosen is None:
        assert bits == 8 and split < 4 and height == 2  # too large for shared memory
        return
    out = run_planned(case, chosen)
    expected = exact(**case)
    assert (out.double() - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("m", [8, 16])
def test_stages_where_x_was(m: int, split: int) -> None:
    """Fewer stages than planned, and more of them over the memory of x, give the same sums."""
    case = operands(m, 14_336, 4096)
    run(case)
    chosen = plan(m, 14_336, 4096, 4, 132, scale_bytes=64, splits=(split,), heights=(1,))
    assert chosen is not None and chosen.box > 0
    expected = run_planned(case, chosen)
    for stages in range(1, chosen.stages + 1):
        for apart in range(1, min(stages, chosen.apart) + 1):
            changed = replace(chosen, stages=stages, apart=apart)
            out = run_planned(case, changed)
            assert torch.equal(out, expected), (stages, apart)


@pytest.mark.gpu
def test_strided_rows() -> None:
    case = operands(6, 80, 512)
    wide = torch.zeros(80, 512, dtype=torch.uint8, device="cuda")
    wide[:, 32:288] = case["codes"]
    x = torch.zeros(6, 519, dtype=torch.bfloat16, device="cuda")
    x[:, 3:515] = case["x"]
    expected = run(case)
    assert torch.equal(run({**case, "codes": wide[:, 32:288]}), expected)
    assert torch.equal(run({**case, "x": x[:, 3:515]}), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [-90, -30, 30, 100])
def test_magnitudes(exponent: int) -> None:
    case = operands(4, 64, 512, scale_dtype=torch.float32)
    case["scale"] *= 2.0**exponent
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [1.0, -1e30])
def test_equal_tokens_lose_nothing_to_the_codes_offset(bits: int, value: float) -> None:
    case = operands(8, 256, 4096, bits)
    case["x"].fill_(value)
    check(case)


@pytest.mark.gpu
def test_nan_and_infinity_stay_in_their_outputs() -> None:
    case = operands(9, 40, 288, 4, 32)
    clean = run(case)
    case["x"][2, 5], case["x"][8, 287] = float("nan"), float("inf")
    case["scale"][7, 1], case["scale"][33, 8] = float("nan"), float("nan")
    out = run(case)
    assert out[2].isnan().all() and not out[8].isfinite().any()
    assert out[:, 7].isnan().all() and out[:, 33].isnan().all()
    rows, columns = [0, 1, 3, 4, 5, 6, 7], [i for i in range(40) if i not in (7, 33)]
    assert torch.equal(out[rows][:, columns], clean[rows][:, columns])


@pytest.mark.gpu
def test_an_infinite_scale_of_the_last_group_is_infinite() -> None:
    case = operands(2, 16, 96, 4, 32)
    case["scale"][3, 2] = float("inf")
    assert run(case)[:, 3].isinf().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_two_runs_are_equal(n: int, k: int) -> None:
    case = operands(13, n, k)
    first = run(case)
    for _ in range(5):
        assert torch.equal(run(case), first)


@pytest.mark.gpu
def test_plans_of_one_variant_do_not_take_each_others_shared_memory() -> None:
    """CUDA keeps the limit for each function: a plan with less must not lower it for one with more."""
    long, short = operands(8, 14336, 4096), operands(8, 16, 4096)
    expected = run(long)
    assert run(short).shape == (8, 16)
    assert torch.equal(run(long), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(3, 512), (1, 4096)])
def test_in_a_graph_after_the_kernel_that_writes_its_operands(m: int, n: int) -> None:
    """One token of 4,096 rows reads its codes before the previous kernel is known to be done."""
    case = operands(m, n, 4096)
    run(case)
    source_codes, source_x = case["codes"].clone(), case["x"].clone()
    case["codes"].zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case["codes"].copy_(source_codes)
        case["x"].copy_(source_x)
        outs = [run(case)]
        case["codes"].bitwise_not_()
        outs.append(run(case))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    inverted = exact(**case)
    assert (outs[1].double() - inverted).norm() <= 2e-3 * inverted.norm()
    case["codes"].copy_(source_codes)
    expected = exact(**case)
    assert (outs[0].double() - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.gpu
def test_in_a_graph_after_two_streams_that_join() -> None:
    """An overlapping launch waits for all previous work, not only for the previous kernel."""
    case = operands(3, 512, 4096)
    run(case)
    kept = case["codes"].clone()
    case["codes"].zero_()
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            case["codes"].copy_(kept)
        case["bias"] = torch.ones(512, device="cuda", dtype=torch.bfloat16) * 2
        torch.cuda.current_stream().wait_stream(other)
        out = run(case)
    graph.replay()
    torch.cuda.synchronize()
    expected = exact(**case)
    assert (out.double() - expected).norm() <= 2e-3 * expected.norm()


# This kernel lets the next launch start before it writes anything.
WRITER = """
extern "C" __global__ void write_late(uint4 *to, const uint4 *from, long long count) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    for (const long long start = clock64(); clock64() - start < 100000;) {}
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("k", [4096, 14336])
@pytest.mark.parametrize("name", ["codes", "scale", "x"])
def test_late_writes_of_the_previous_kernel_are_seen(name: str, k: int) -> None:
    """Codes and scales are prefetched into the L2 cache while the previous kernel is still running."""
    case = operands(1, 4096, k)
    expected = run(case)
    writer = nvrtc.Module(nvrtc.compiled(WRITER, "sm_90a")).kernel("write_late", 3)
    right = case[name].clone()
    for _ in range(5):
        case[name].zero_()
        torch.cuda.synchronize()
        addresses = case[name].data_ptr(), right.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        writer(stream, 64, 256, *addresses, right.numel() * right.element_size() // 16)
        assert torch.equal(run(case), expected)


# This kernel does not wait for the launches before it.
READER = """
extern "C" __global__ void read_early(uint4 *to, const uint4 *from, long long count) {
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1024, 4096])
def test_the_next_launch_may_read_what_the_previous_one_wrote(n: int) -> None:
    """Before its own wait, as attention reads the cache: this launch lets it start after it has waited itself."""
    case = operands(1, n, 4096)
    run(case)
    writer = nvrtc.Module(nvrtc.compiled(WRITER, "sm_90a")).kernel("write_late", 3)
    reader = nvrtc.Module(nvrtc.compiled(READER, "sm_90a")).kernel("read_early", 3, overlaps=True)
    right = torch.arange(8192, device="cuda")
    for _ in range(5):
        written, read = torch.zeros_like(right), torch.zeros_like(right)
        torch.cuda.synchronize()
        stream, count = torch.cuda.current_stream().cuda_stream, right.nbytes // 16
        writer(stream, 64, 256, written.data_ptr(), right.data_ptr(), count)
        run(case)
        reader(stream, 8, 256, read.data_ptr(), written.data_ptr(), count)
        assert torch.equal(read, right)


@pytest.mark.cover("pairs")
@pytest.mark.gpu
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4097, 14336), (65, 100), (33, 4104)])
@pytest.mark.parametrize("m", [1, 3, 8, 16])
def test_rounds_x_to_int8(m: int, n: int, k: int, bits: int, group: int, zero: bool) -> None:
    case = operands(m, n, k, bits, group, zero=zero, extras=True)
    check({**case, "token_scale": None, "rounds": torch.int8})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 5, 16])
def test_rounds_x_to_e4m3(m: int, dtype: torch.dtype) -> None:
    case = float8_operands(m, 1000, 4096, dtype, extras=True)
    x = torch.randn(m, 4096, device="cuda").to(dtype)
    case["scale"] /= 64
    check({**case, "x": x, "token_scale": None, "rounds": torch.float8_e4m3fn})


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_blocks_of_a_cluster_round_alike(split: int) -> None:
    case = {**operands(11, 12_000, 2176), "rounds": torch.int8}
    run(case)
    sizes = {"scale_bytes": 34, "splits": (split,), "heights": (1,), "rounding": True}
    chosen = plan(11, 12_000, 2176, 4, 64, **sizes)
    assert chosen is not None
    out, expected = run_planned(case, chosen), exact(**case)
    assert (out.double() - expected).norm() <= 2e-3 * expected.norm()

"""The small-batch kernel for CPUs: the products that it takes; it reads the weight's present values."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from benchmarks.cases.weight_linear import Case
from lowbit.tensor import AffineTensor
from lowbit.testing.comparison import relative_error
from lowbit_kernels.runtime import host_compiler, launches, warned
from lowbit_kernels.weight_only import codes_cpu, weight_linear, weight_mm_cpu
from lowbit_kernels.weight_only.weight_linear import run
from tests.kernels.test_weight_linear import error, limit, op

needs_compiler = pytest.mark.skipif(not host_compiler.compiler(), reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("bits", [4, 8])
def test_the_kernel_takes_any_number_of_tokens(bits: int) -> None:
    for m in (1, 3, 4, 33):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            arguments = Case("", m, 32, 64, 32, bits, dtype).arguments()
            with launches.counted() as calls:
                op(*arguments)
            assert calls["weight_linear", "cpu"] == 1, (bits, m, dtype)


@needs_compiler
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("group", [1, 4, 7, 8, 24, 32, 64, 128, 192, 256, 384, 768])
def test_layouts(bits: int, zero_point: bool, group: int) -> None:
    """Groups within words, of whole chunks, and across both; ragged rows and tokens; columns in the padding."""
    for m, n, k in ((1, 4, 768), (2, 5, 768), (3, 1, 768), (7, 9, 768), (5, 6, 765), (16, 2, 12)):
        scale_dtype = torch.float32 if m == 1 else torch.bfloat16
        options = {"scale_dtype": scale_dtype, "zero_point": zero_point, "bias": True}
        case = Case("", m, n, k, group, bits, **options)
        arguments = case.arguments()
        out = run(*arguments, implementation="cpu")
        assert error(out, arguments) <= limit(out), case


MAPPINGS = ("symmetric", "asymmetric", "float_zero_point", "half_integer")


@needs_compiler
@pytest.mark.cover("values")
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize(
    "bits",
    [
        b if b in (2, 3, 5, 8) else pytest.param(b, marks=pytest.mark.exhaustive)
        for b in range(2, 9)
    ],
)
@torch.no_grad()
def test_whole_words_and_the_columns_after_them(
    bits: int, mapping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words hold at most 8 codes, so 16 of them end at multiples of 128 columns, or of 64; columns follow or not."""
    found: list[Tensor | None] = []
    multiply = weight_mm_cpu.Multiplier.multiply
    monkeypatch.setattr(
        weight_mm_cpu.Multiplier,
        "multiply",
        lambda *args: found.append(multiply(*args)) or found[-1],
    )
    shapes = ((64, 32), (128, None), (192, 64), (257, None), (320, None), (384, 128))
    kinds = ((1, torch.float32), (2, torch.bfloat16), (3, torch.float32))
    for (k, group), (m, dtype) in itertools.product(shapes, kinds):
        layer = torch.nn.Linear(k, 7, bias=False, dtype=dtype)
        lowbit.quantize_(layer, lowbit.IntxWeightOnly(bits, group, mapping))
        x = torch.randn(m, k, dtype=dtype)
        out = layer(x)
        assert found[-1] is out, "another product"
        weight: Any = layer.weight
        values = weight.float().double() if dtype is torch.bfloat16 else weight.dequantize()
        error = relative_error(out, x.double() @ values.double().T)
        assert error <= (3e-7 if dtype is torch.float32 else 3e-3), (k, group, m)


@needs_compiler
@pytest.mark.parametrize("bits", [4, 8])
def test_threads_give_the_same(bits: int) -> None:
    arguments = Case("", 3, 4099, 256, 64, bits).arguments()
    assert arguments[1].shape[0] * 256 >= codes_cpu.GRAIN
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(*arguments, implementation="cpu"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert error(results[0], arguments) <= limit(results[0])


# ---- every write to a weight counts at the next product ------------------------------------------------------------


def bytes_of(t: Tensor) -> Tensor:
    return t.detach().view(torch.uint8)


def write_by_memoryview(t: Tensor, new: Tensor) -> None:
    buffer = (ctypes.c_char * t.nbytes).from_address(t.data_ptr())
    memoryview(buffer).cast("B")[:] = bytes_of(new).numpy().tobytes()


def write_to_numpy(t: Tensor, new: Tensor) -> None:
    bytes_of(t).numpy()[...] = bytes_of(new).numpy()


def write_over_numpy(t: Tensor, new: Tensor) -> None:
    torch.from_numpy(bytes_of(t).numpy()).copy_(bytes_of(new))


def write_by_dlpack(t: Tensor, new: Tensor) -> None:
    torch.from_dlpack(bytes_of(t)).copy_(bytes_of(new))


def write_to_the_storage(t: Tensor, new: Tensor) -> None:
    t.untyped_storage().copy_(new.contiguous().untyped_storage())


WRITERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda t, new: t.copy_(new),
    "copy_ to .data": lambda t, new: t.data.copy_(new),
    "assigned to .data": lambda t, new: setattr(t, "data", new),
    "set_": lambda t, new: t.set_(new),
    "a view": lambda t, new: t.detach().view(-1)[:].copy_(new.view(-1)),
    "NumPy": write_to_numpy,
    "from_numpy": write_over_numpy,
    "memoryview": write_by_memoryview,
    "DLPack": write_by_dlpack,
    "storage": write_to_the_storage,
}
over_writers = pytest.mark.parametrize("write", list(WRITERS.values()), ids=list(WRITERS))


@pytest.mark.cover("pairs")
@over_writers
@pytest.mark.parametrize("part", [1, 2], ids=["codes", "scale"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 64)])
def test_every_write_counts_at_the_next_product(
    write: Callable[[Tensor, Tensor], object], part: int, bits: int, group: int
) -> None:
    arguments = Case("", 2, 32, 64, group, bits).arguments()
    for _ in range(2):
        first = op(*arguments)
        new = Case("", 2, 32, 64, group, bits).arguments()[part]
        write(arguments[part], new)
        out = op(*arguments)
        assert error(out, arguments) <= limit(out) and not torch.equal(out, first)


SCHEMES = {
    "int4": lowbit.Int4WeightOnly(32),
    "int4-asymmetric": lowbit.Int4WeightOnly(32, "asymmetric"),
    "int8": lowbit.Int8WeightOnly(),
    "int3": lowbit.IntxWeightOnly(3),
    "float8": lowbit.Float8WeightOnly(),
}


@pytest.mark.cover("pairs")
@over_writers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", list(SCHEMES.values()), ids=list(SCHEMES))
@torch.no_grad()
def test_every_write_to_a_weight_counts(
    write: Callable[[Tensor, Tensor], object], scheme: lowbit.Scheme, dtype: torch.dtype
) -> None:
    layer, other = (torch.nn.Linear(64, 32, bias=False, dtype=dtype) for _ in range(2))
    x = torch.randn(1, 64, dtype=dtype)
    for module in (layer, other):
        lowbit.quantize_(module, scheme)
        module(x), module(x)
    new = other.weight.inner_tensors()
    for name, t in layer.weight.inner_tensors().items():
        write(t, new[name].clone())
    assert torch.equal(layer(x), other(x))


def load(layer: torch.nn.Linear, other: torch.nn.Linear) -> None:
    layer.load_state_dict(other.state_dict())


def assign(layer: torch.nn.Linear, other: torch.nn.Linear) -> None:
    layer.load_state_dict(other.state_dict(), assign=True)


def replace_inner(layer: torch.nn.Linear, other: torch.nn.Linear) -> None:
    for name, t in other.weight.inner_tensors().items():
        setattr(layer.weight, name, t.clone())


def swap_inner(layer: torch.nn.Linear, other: torch.nn.Linear) -> None:
    for name, t in other.weight.inner_tensors().items():
        torch.utils.swap_tensors(getattr(layer.weight, name), t.clone())


def copy_weight(layer: torch.nn.Linear, other: torch.nn.Linear) -> None:
    layer.weight.copy_(other.weight)


@pytest.mark.parametrize("take", [load, assign, replace_inner, swap_inner, copy_weight])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.no_grad()
def test_other_values_for_a_weight_count(
    take: Callable[[torch.nn.Linear, torch.nn.Linear], None], dtype: torch.dtype
) -> None:
    x = torch.randn(1, 64, dtype=dtype)
    for scheme in SCHEMES.values():
        layer, other = (torch.nn.Linear(64, 32, bias=False, dtype=dtype) for _ in range(2))
        for module in (layer, other):
            lowbit.quantize_(module, scheme)
            module(x), module(x)
        expected = other(x)
        take(layer, other)
        assert isinstance(layer.weight, AffineTensor) and torch.equal(layer(x), expected)


# ---- other kinds of memory -----------------------------------------------------------------------------------------


def test_inference_tensors() -> None:
    with torch.inference_mode():
        arguments = Case("", 2, 16, 64, 32).arguments()
        out = op(*arguments)
        assert error(out, arguments) <= limit(out)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("off", [1, 4, 8, 32])
def test_memory_that_is_not_aligned(bits: int, off: int) -> None:
    """As in a mapped file."""
    m, n, k = 4, 48, 128
    width = k * bits // 8
    codes = torch.randint(0, 127, (n * width + 64,)).to(torch.uint8 if bits == 4 else torch.int8)
    x = torch.randn(m * k + 64).bfloat16()
    own, x = codes[off : off + n * width].view(n, width), x[off : off + m * k].view(m, k)
    scale = torch.rand(n, 1).bfloat16()
    linear = partial(weight_linear.weight_linear, scale=scale, group_size=k)
    assert torch.equal(linear(x, own), linear(x.clone(), own.clone()))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning; the product is computed all the same."""

    def no_library(source: str, *options: str) -> None:
        raise RuntimeError("no C++ compiler was found")

    monkeypatch.setattr(host_compiler, "library", no_library)
    caches = (
        weight_linear.planned,
        weight_mm_cpu._planned,
        weight_mm_cpu._functions,
    )
    for cache in caches:
        cache.cache_clear()
    warned.forget()
    try:
        with pytest.warns(UserWarning, match=r"several times slower.*no C\+\+ compiler") as seen:
            for n in (16, 32):
                arguments = Case("", 2, n, 64, 32).arguments()
                with launches.counted() as calls:
                    out = op(*arguments)
                assert not calls["weight_linear", "cpu"] and error(out, arguments) <= limit(out)
        assert len(seen) == 1
    finally:
        for cache in caches:
            cache.cache_clear()

"""float32 products of low-bit weights on a CPU: few operations, the bits of plain products where gradients are enabled,
no stale decision."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import lowbit as lb
from lowbit.linear.frozen.dequantized import plain_linear
from lowbit_kernels.runtime import host_compiler
from recipes.llama import KVCache, Llama, LlamaConfig
from tests.schemes import WEIGHT_ONLY, over

needs_compiler = pytest.mark.skipif(not host_compiler.compiler(), reason="no C++ compiler")
CONFIG = LlamaConfig(64, dim=32, layers=2, heads=2, kv_heads=1, hidden=48, context=16)
EVERYDAY = {
    "int4": lb.IntxWeightOnly(4),
    "int3": lb.IntxWeightOnly(3),
    "int4-g16": lb.Int4WeightOnly(16),
    "int8": lb.Int8WeightOnly(),
    "float8": lb.Float8WeightOnly(),
}


def layer(
    scheme: lb.Scheme = EVERYDAY["int4"], bias: bool = False, shape: tuple[int, int] = (48, 24)
) -> nn.Linear:
    linear = nn.Linear(shape[0], shape[1], bias=bias)
    lb.quantize_(linear, scheme)
    return linear


def operations_of_a_token(model: Llama) -> int:
    """ATen operations, nested ones included, for the second token after a prompt."""
    tokens, cache = torch.tensor([[1, 2, 3]]), KVCache(CONFIG, 1)
    with torch.no_grad():
        model(tokens, cache)
        for _ in range(2):
            model(tokens[:, :1], cache)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            model(tokens[:, :1], cache)
    return sum(event.count for event in seen.key_averages() if event.key.startswith("aten::"))


@needs_compiler
@over(EVERYDAY)
def test_a_token_takes_no_more_operations_than_in_high_precision(scheme: lb.Scheme) -> None:
    """Count operations: on small models they take the time, and other programs disturb a clock."""
    plain = Llama(CONFIG).eval()
    low = copy.deepcopy(plain)
    report = lb.quantize_(low, scheme)
    assert report.converted
    assert operations_of_a_token(low) <= operations_of_a_token(plain)


@pytest.mark.cover("values")
@over(WEIGHT_ONLY)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(48, 24), (45, 7), (1, 1)], ids=str)
def test_the_bits_of_a_plain_product(scheme: lb.Scheme, bias: bool, shape: tuple[int, int]) -> None:
    linear = layer(scheme, bias, shape)
    values = linear.weight.dequantize()
    for leading in ((1, 1), (3,), (), (2, 5), (0,)):
        x = torch.randn(*leading, shape[0])
        expected = F.linear(x, values, linear.bias)
        for _ in range(3):
            assert torch.equal(linear(x), expected)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                for _ in range(3):
                    assert is_close(linear(x), expected)


def is_close(found: Tensor, expected: Tensor) -> bool:
    """float32 sums in another order."""
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_alternating_shapes() -> None:
    first, second = layer(), layer(shape=(64, 40))
    values = {module: module.weight.dequantize() for module in (first, second)}
    for m in (1, 1, 5, 1, 2, 2):
        for module in (first, second, first):
            x = torch.randn(m, module.in_features)
            assert is_close(module(x), F.linear(x, values[module]))


def test_gradients_are_of_the_values_at_forward() -> None:
    linear, other = layer(bias=True), layer(bias=True)
    x = torch.randn(2, 48, requires_grad=True)
    y = linear(x)
    with torch.no_grad():
        other(x)
        other(x)
    y.sum().backward()
    assert torch.allclose(x.grad, linear.weight.dequantize().sum(0).expand(2, 48))
    kept = plain_linear(
        x, linear.weight, None
    )  # as autograd keeps it, without lowbit's own backward
    plain_linear(torch.randn(2, 48), other.weight, None)
    (grad,) = torch.autograd.grad(kept.sum(), x)
    assert torch.equal(grad, x.grad)


# ---- the remembered decision: more in test_decisions.py ------------------------------------------------------------


@pytest.fixture
def expected() -> Iterator[tuple[nn.Linear, Tensor, Tensor]]:
    """A layer after a first product, its input, and the result."""
    linear, x = layer(), torch.randn(1, 48)
    with torch.no_grad():
        linear(x)
        yield linear, x, linear(x)


@torch.no_grad()
def test_traces_contain_the_codes() -> None:
    """Results do not share the memory that the next product overwrites."""
    from torch.fx.experimental.proxy_tensor import make_fx

    linear, x = layer(lb.Int8WeightOnly()), torch.randn(1, 48)
    linear(x)
    y = linear(x)
    graph = make_fx(linear)(x)
    layer()(torch.randn(1, 48))
    assert is_close(graph(x), y)


def test_compiled_and_exported(expected: tuple[nn.Linear, Tensor, Tensor]) -> None:
    linear, x, y = expected
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(linear, backend="aot_eager", fullgraph=True)(x), y)
    assert torch.allclose(torch.export.export(linear, (x,)).module()(x), y)


def test_copied_saved_and_moved(expected: tuple[nn.Linear, Tensor, Tensor]) -> None:
    linear, x, y = expected
    copied = copy.deepcopy(linear)
    assert torch.equal(copied(x), y)
    file = io.BytesIO()
    torch.save(linear.weight, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(F.linear(x, loaded), y)
    copied.to(torch.float64).to(torch.float32)
    assert torch.equal(copied(x), y)
    copied.to(torch.bfloat16)
    assert copied(x.bfloat16()).dtype is torch.bfloat16


def test_threads_have_memory_of_their_own() -> None:
    layers = [layer() for _ in range(4)]
    wrong = []

    def work(linear: nn.Linear) -> None:
        values = linear.weight.dequantize()
        with torch.no_grad():
            for _ in range(200):
                x = torch.randn(1, 48)
                if not is_close(linear(x), F.linear(x, values)):
                    wrong.append(linear)

    threads = [threading.Thread(target=work, args=(linear,)) for linear in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- embeddings ------------------------------------------------------------------------------------------------------


@over(EVERYDAY)
def test_rows_of_an_embedding(scheme: lb.Scheme) -> None:
    table = nn.Embedding(20, 32, padding_idx=3)
    lb.quantize_(table, scheme, lambda m, n: True)
    values = table.weight.dequantize()
    index = torch.tensor([[0, 19, 3], [7, 7, 1]])
    for given in (index, index.int(), index[:, :0], index[0, 1], index.t()):
        for _ in range(2):
            assert torch.equal(table(given), values[given.long()])
    for bad in (-1, 20):
        with pytest.raises((IndexError, RuntimeError)):
            table(torch.tensor([0, bad]))
    table.weight.codes.data.copy_(table.weight.codes.flip(0))
    assert torch.equal(table(index), table.weight.dequantize()[index])

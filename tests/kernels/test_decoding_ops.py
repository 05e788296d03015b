"""The ops between the linears of a decode step, against float64: on a CPU, in Triton's interpreter, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases import argmax_rows as choices
from benchmarks.cases import decode_attention as attentions
from benchmarks.cases import gated_activation as gates
from benchmarks.cases import rms_norm as norms
from benchmarks.cases import token_input as inputs
from lowbit_kernels.decoding.argmax_rows import argmax_rows
from lowbit_kernels.decoding.decode_attention import attention, decode_attention
from lowbit_kernels.decoding.gated_activation import gated_activation
from lowbit_kernels.decoding.rms_norm import rms_norm
from lowbit_kernels.runtime import launches
from tests.kernels.interpreted import interpreted
from tests.schemes import relative_error

ops: Any = torch.ops.lowbit


def small(module: Any) -> list[Any]:
    return [case for case in module.CASES if not case.large]


def over(module: Any, large: bool = False) -> Any:
    cases = module.CASES if large else small(module)
    return pytest.mark.parametrize("case", cases, ids=lambda c: c.name)


def factor(x: Tensor | None, eps: float) -> Any:
    """1 / rms of x [B, 1, D], float64."""
    return 1.0 if x is None else (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()


def rotated(z: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None or sin is None:
        return z
    first, second = z.chunk(2, -1)
    cos, sin = (t.double()[:, None, :, : z.shape[-1] // 2] for t in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def exact_attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The formula, one sequence and head after the other: the result, and the slots that it writes, in float64."""
    query, key, value, keys, values, position, start, cos, sin, sinks, x, *numbers = arguments
    scale, window, softcap, eps = numbers
    times = factor(x, eps) if x is None else factor(x, eps)[:, None]
    dtype, last = query.dtype, int(position)
    query, key = (rotated(t.double() * times, cos, sin) for t in (query, key))
    # rounded as the caches are
    query, key, value = (t.to(dtype).double() for t in (query, key, value.double() * times))
    result = torch.empty_like(query)
    group = query.shape[1] // keys.shape[1]
    for b in range(query.shape[0]):
        first = 0 if start is None else int(start[b])
        first = max(first, last - window + 1) if window else first
        for h in range(query.shape[1]):
            own = h // group
            k = torch.cat([keys[b, own, first:last].double(), key[b, own]])
            v = torch.cat([values[b, own, first:last].double(), value[b, own]])
            s = k @ query[b, h, 0] * scale
            s = softcap * torch.tanh(s / softcap) if softcap else s
            if sinks is not None:
                s = torch.cat([s, sinks[h : h + 1].double()])
            result[b, h, 0] = s.softmax(0)[: len(k)] @ v
    return result, key[:, :, 0], value[:, :, 0]


def check_attention(case: Any, device: str, dtype: torch.dtype, bound: float) -> None:
    """The result; the one slot that the op writes; later slots are not read."""
    arguments = case.arguments(device, dtype)
    last, keys, values = case.position, arguments[3], arguments[4]
    keys[:, :, last:], values[:, :, last:] = 1e4, 1e4
    before = keys.clone(), values.clone()
    result, *written = exact_attention(*arguments)
    if device == "cuda":  # the caches must be older than the previous launch
        torch.cuda.synchronize()
    got = ops.decode_attention(*arguments)
    assert got.dtype == dtype and got.is_contiguous() and got.shape == result.shape
    assert got.numel() == 0 or relative_error(got, result) < bound, case.name
    for cache, old, new in zip((keys, values), before, written, strict=True):
        assert new.numel() == 0 or relative_error(cache[:, :, last], new) < bound, case.name
        cache[:, :, last] = old[:, :, last]
        assert torch.equal(cache, old), case.name


def check_norm(case: Any, device: str, dtype: torch.dtype, bound: float) -> None:
    x, weight, eps, offset = case.arguments(device, dtype)
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    expected = expected * (weight.double() + offset)
    got = ops.rms_norm(x, weight, eps, offset)
    assert got.dtype == dtype and got.is_contiguous() and got.shape == x.shape
    for row, wanted in zip(
        got.reshape(-1, x.shape[-1]), expected.reshape(-1, x.shape[-1]), strict=True
    ):
        assert (not wanted.any() and not row.any()) or relative_error(row, wanted) < bound, (
            case.name
        )
    if x.numel():
        x[(-1,) * (x.ndim - 1)][0] = torch.nan
        rows = ops.rms_norm(x, weight, eps, offset).reshape(-1, x.shape[-1])
        assert rows[-1].isnan().all() and not rows[:-1].isnan().any()


def check_gate(case: Any, device: str, dtype: torch.dtype, bound: float) -> None:
    gate, up, x, activation, eps = case.arguments(device, dtype)
    g = gate.double() * factor(x, eps)
    turned = F.silu(g) if activation == "silu" else F.gelu(g, approximate="tanh")
    expected = turned * up.double() * factor(x, eps)
    if device == "cuda":  # x must be older than the previous launch
        torch.cuda.synchronize()
    got = ops.gated_activation(gate, up, x, activation, eps)
    assert got.dtype == dtype and got.is_contiguous() and got.shape == gate.shape
    assert got.numel() == 0 or relative_error(got, expected) < bound, case.name
    if gate.numel():
        gate[..., -1] = torch.nan
        got = ops.gated_activation(gate, up, x, activation, eps)
        assert got[..., -1].isnan().all() and not got[..., :-1].isnan().any()


def check_choice(case: Any, device: str, dtype: torch.dtype, bound: float = 0) -> None:
    """The first of equal scores is chosen, a NaN before all of them."""
    (scores,) = case.arguments(device, dtype)
    assert torch.equal(ops.argmax_rows(scores), scores.cpu().argmax(-1).to(device))
    if len(scores):
        scores[-1, case.width // 2] = torch.nan
        assert int(ops.argmax_rows(scores)[-1]) == case.width // 2
    found = ops.argmax_rows(torch.full_like(scores, torch.nan))
    assert found.dtype == torch.int64 and bool(((found >= 0) & (found < case.width)).all())


def check_input(case: Any, device: str, dtype: torch.dtype, bound: float = 0) -> None:
    token, position, embedding, cos, sin = case.arguments(device, dtype)
    for _ in range(2):
        x, *angles = ops.token_input(token, position, embedding, cos, sin)
        assert torch.equal(x, embedding[token])
        for table, found in zip((cos, sin), angles, strict=True):
            assert torch.equal(found, table[position].repeat(1, 2).to(dtype)[None])
        scores = torch.randint(-9, 9, (len(token), case.tokens), device=device).to(dtype)
        before = int(position)
        chosen = ops.next_token(scores, token, position)
        assert torch.equal(chosen, scores.cpu().argmax(-1).to(device))
        assert torch.equal(token[:, 0], chosen) and int(position) == before + 1
        position.zero_()
    token.fill_(case.tokens), position.fill_(case.positions)
    for found in ops.token_input(token, position, embedding, cos, sin):
        assert found.isnan().all(), "no such row"


def check_start() -> None:
    """A kernel reads `start` in order, so it refuses one with gaps."""
    query, keys, position = torch.randn(2, 1, 1, 16), torch.zeros(2, 1, 8, 16), torch.tensor([3])
    start = torch.tensor([[1, 9], [2, 9]])[:, 0]
    with pytest.raises(ValueError, match="start must be contiguous"):
        decode_attention(query, query, query, keys, keys.clone(), position, start, scale=0.25)


CHECKS = [
    (attentions, check_attention),
    (norms, check_norm),
    (gates, check_gate),
    (choices, check_choice),
    (inputs, check_input),
]
EVERY = [(case, check) for module, check in CHECKS for case in small(module)]
every_case = pytest.mark.parametrize(("case", "check"), EVERY, ids=lambda v: getattr(v, "name", ""))


@every_case
def test_the_formulas(case: Any, check: Any) -> None:
    check(case, "cpu", torch.float32, 2e-6)
    check(case, "cpu", torch.bfloat16, 6e-3)


@pytest.mark.parametrize(
    ("op", "module"),
    [("decode_attention", attentions), ("rms_norm", norms), ("gated_activation", gates), ("argmax_rows", choices),
     ("token_input", inputs)],
)  # fmt: skip
def test_the_ops_are_sound(op: str, module: Any) -> None:
    for case in small(module)[::3]:
        torch.library.opcheck(getattr(ops, op).default, case.arguments())


def test_the_next_token_is_sound() -> None:
    token, position = torch.zeros(3, 1, dtype=torch.int64), torch.tensor([4])
    torch.library.opcheck(ops.next_token.default, (torch.randn(3, 9), token, position))
    with pytest.raises(ValueError, match="token must be contiguous"):
        ops.next_token(torch.randn(3, 9), torch.zeros(3, 2, dtype=torch.int64)[:, :1], position)
    ops.next_token(torch.randn(0, 9), token[:0], position)
    assert int(position) == 5, "without rows too"


INTERPRETED = """
import torch
from tests.kernels.test_decoding_ops import EVERY, check_start

torch.manual_seed(0)
for case, check in EVERY:
    check(case, "cpu", torch.float32, 2e-6)
check_start()
print("true")
"""


def test_the_kernels_in_the_interpreter() -> None:
    """In a separate process, because Triton reads TRITON_INTERPRET when it is imported."""
    assert interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("module", "check"), CHECKS, ids=["attention", "norm", "gate", "choice", "input"]
)
def test_the_kernels_on_a_gpu(module: Any, check: Any, dtype: torch.dtype) -> None:
    with launches.counted() as calls:
        for case in module.CASES:
            check(case, "cuda", dtype, 1e-5 if dtype == torch.float32 else 3e-3)
    assert calls.total() and {how for _, how in calls} >= {"triton"}


def test_attention_of_several_queries_is_that_of_each() -> None:
    """`attention`, which reads prompts, with all that the op has."""
    query, keys, values = (torch.randn(2, n, 9, 16) for n in (4, 2, 2))
    seen = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3)
    sinks = torch.randn(4)
    found = attention(query, keys, values, seen, 0.25, 5.0, sinks)
    for t in range(9):
        position = torch.tensor([t])
        caches = keys.clone(), values.clone()
        new = (query[:, :, t : t + 1], keys[:, :, t : t + 1], values[:, :, t : t + 1])
        y = decode_attention(
            *(*new, *caches, position), sinks=sinks, scale=0.25, window=4, softcap=5.0
        )
        torch.testing.assert_close(y[:, :, 0], found[:, :, t])


def test_wrong_arguments() -> None:
    arguments = list(small(attentions)[1].arguments())
    names = ("scale", "window", "softcap", "eps")
    numbers = dict(zip(names, arguments[11:], strict=True))
    for at, value, error, match in (
        (0, torch.randn(2, 5, 1, 32), ValueError, "multiple of the key/value heads, got 5 and 2"),
        (3, arguments[3].transpose(1, 2).contiguous().transpose(1, 2), ValueError, "contiguous"),
        (5, torch.tensor([3], dtype=torch.int32), TypeError, "position of torch.int64"),
        (8, None, ValueError, "cos and sin go together"),
        (8, torch.randn(1, 1, 32), ValueError, r"one shape, got \(2, 1, 32\) and \(1, 1, 32\)"),
        (7, torch.randn(1, 1, 32), ValueError, r"one shape, got \(1, 1, 32\) and \(2, 1, 32\)"),
        (4, arguments[4].half(), TypeError, "must be of query's dtype"),
    ):
        wrong = [*arguments[:at], value, *arguments[at + 1 : 11]]
        with pytest.raises(error, match=match):
            decode_attention(*wrong, **numbers)
    with pytest.raises(ValueError, match=r"activation must be one of .*, got relu"):
        gated_activation(torch.randn(3), torch.randn(3), activation="relu")
    with pytest.raises(
        ValueError, match=r"takes x .*, got \(1, 8\)"
    ):  # the kernel reads a row of x for each
        gated_activation(torch.randn(4, 3), torch.randn(4, 3), torch.randn(1, 8))
    with pytest.raises(ValueError, match="rows must have a score, got 0"):
        argmax_rows(torch.randn(3, 0))
    token, position = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([0])
    for rows, positions in ((0, 3), (3, 0)):
        tables = torch.randn(rows, 8), *torch.randn(2, positions, 4)
        with pytest.raises(
            ValueError, match=f"must have a row, got {rows} embeddings and {positions}"
        ):
            ops.token_input(token, position, *tables)
    with pytest.raises(ValueError, match="rms_norm takes weight"):
        rms_norm(torch.randn(3, 4), torch.randn(3), eps=1e-5)

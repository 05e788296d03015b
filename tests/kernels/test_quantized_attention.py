"""quantized_attention: the formula, the kernel in an emulator and on a GPU, NaN, masks, rings, wrong arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.cases.quantized_attention import CASES, Case
from lowbit_kernels.decoding import quantized_attention as module
from lowbit_kernels.decoding import quantized_attention_sm90
from lowbit_kernels.decoding.quantize_to_cache import dequantized
from lowbit_kernels.runtime import launches
from tests.kernels.quantized_attention_emulator import emulated

SMALL = [case for case in CASES if not case.large]
every_case = pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
BOUND = 2e-3
"""Relative error of a bf16 output; its rounding alone costs 1.7e-3."""


def attended(arguments: tuple) -> Tensor:
    """The attention in float64, head by head, from the tokens in their order."""
    query, key_codes, key_scale, value_codes, value_scale, length, zero, mask, first, sinks = (
        arguments[:10]
    )
    scale, window, softcap = arguments[10:13]
    batch, heads, _, width = query.shape
    keys = dequantized(key_codes, key_scale, None, width).double()
    values = dequantized(value_codes, value_scale, zero, width).double()
    y = torch.zeros(batch, heads, 1, width, dtype=torch.float64)
    for b in range(batch):
        tokens = int(length[b if len(length) > 1 else 0])
        positions = torch.arange(max(tokens - window, 0), tokens)
        age = positions - positions[0] if len(positions) else positions
        if mask is not None:
            positions = positions[mask[b, age]]
        if first is not None:
            positions = positions[positions >= first[b]]
        slots = positions % window
        for h in range(heads):
            own = h // (heads // keys.shape[1])
            scores = scale * (keys[b, own, slots] @ query[b, h, 0].double())
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[h].double().exp())
            if len(slots):
                y[b, h, 0] = weights @ values[b, own, slots] / total
    return y


def error_of(found: Tensor, expected: Tensor) -> float:
    expected = expected.to(found.device)
    norm = expected.norm()
    return (
        float((found.double() - expected).norm() / norm) if norm else float(found.double().norm())
    )


@every_case
def test_the_formula(case: Case) -> None:
    arguments = case.arguments()
    found = torch.ops.lowbit.quantized_attention(*arguments)
    assert found.dtype == case.dtype and found.shape == arguments[0].shape
    assert error_of(found, attended(arguments)) < (1e-6 if case.dtype == torch.float32 else BOUND)


@pytest.mark.parametrize("name", ["full", "float16", "ring", "many-queries", "no-sequences"])
def test_operator_is_registered_well(name: str) -> None:
    arguments = next(case for case in SMALL if case.name == name).arguments()
    torch.library.opcheck(torch.ops.lowbit.quantized_attention, arguments)


EMULATED = [
    *("typical", "full", "float8", "float16", "ring", "ring-not-full", "wide", "many-queries"),
    *("narrow", "no-tokens"),
]


@pytest.mark.parametrize("name", EMULATED)
@pytest.mark.parametrize("multiprocessors", [1, 16])
@pytest.mark.cover(
    "values", name=lambda name: {"typical": "full", "many-queries": "wide"}.get(name, name)
)
def test_the_kernel_in_the_emulator(name: str, multiprocessors: int) -> None:
    arguments = next(case for case in SMALL if case.name == name).arguments()
    with emulated(multiprocessors), launches.counted() as calls:
        found = module._launch(*arguments)
    assert calls["quantized_attention", "sm90"] == 1 and found is not None
    assert error_of(found, attended(arguments)) < BOUND


def test_copies_that_arrive_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_DELAY", "40,3")
    arguments = Case("", 300, slots=320, batch=1, heads=1).arguments()
    with emulated():
        found = module._launch(*arguments)
    assert error_of(found, attended(arguments)) < BOUND


def test_nan_and_infinity_stay_with_their_sequence() -> None:
    for place in (0, 2, 4):  # a query, a key's scale, a value's scale
        arguments = CASES[0].arguments()
        arguments[place].reshape(2, -1)[0, 3] = torch.nan
        with emulated():
            found = module._launch(*arguments)
        expected = module.reference(*arguments)
        assert found is not None and torch.equal(found.isnan(), expected.isnan()), place
        assert found[0].isnan().any() and not found[1].isnan().any()


def test_unseen_slots_may_hold_anything() -> None:
    arguments = CASES[0].arguments()
    expected = attended(arguments)
    for scale in (arguments[2], arguments[4]):
        scale[:, :, 50:] = torch.nan
    with emulated():
        assert error_of(module._launch(*arguments), expected) < BOUND
    assert error_of(module.reference(*arguments), expected) < BOUND


def test_zeros_have_a_scale() -> None:
    arguments = Case("", 9, batch=1).arguments()
    for codes in (arguments[1], arguments[3]):
        codes.zero_()
    for scale in (arguments[2], arguments[4]):
        scale.fill_(2.0**-100)
    with emulated():
        assert not module._launch(*arguments).any()


def test_scales_of_any_size_keep_the_weights_exact() -> None:
    """A value with a small scale and all of the attention, as the first token of many models has it."""
    arguments = Case("", 50, batch=1, heads=1, group=1).arguments()
    arguments[4].fill_(1.0)
    arguments[4][:, :, 0] = 1e-7
    arguments[1][:, :, 0] = 127 * arguments[0][:, :, 0].sign().to(torch.int8)
    with emulated():
        assert error_of(module._launch(*arguments), attended(arguments)) < BOUND


def test_tokens_beyond_the_cache_give_nan() -> None:
    arguments = CASES[0].arguments()
    arguments[5].fill_(65)
    with emulated():
        assert module._launch(*arguments).isnan().all()
    assert module.reference(*arguments).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gpu(case: Case) -> None:
    arguments = case.arguments("cuda")
    with launches.counted() as calls:
        found = torch.ops.lowbit.quantized_attention(*arguments)
    takes = quantized_attention_sm90.takes(arguments[1], arguments[3], case.dtype, case.width)
    assert calls["quantized_attention", "sm90" if takes else "torch"] == 1
    on_cpu = tuple(x.cpu() if isinstance(x, Tensor) else x for x in arguments)
    if case.large:
        wide = (arguments[0].float(), *arguments[1:])
        assert error_of(found, module.reference(*wide).double()) < BOUND
    else:
        assert error_of(found.cpu(), attended(on_cpu)) < BOUND


@pytest.mark.gpu
def test_one_graph_serves_all_lengths() -> None:
    arguments = Case("", 2048, slots=2048, masked=True).arguments("cuda")
    length = arguments[5]
    module._launch(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.ops.lowbit.quantized_attention(*arguments)
    for tokens in (1, 40, 2048):
        length.fill_(tokens)
        graph.replay()
        expected = module.reference(arguments[0].float(), *arguments[1:])
        assert error_of(found, expected.double()) < BOUND


def test_splits_fill_the_gpu() -> None:
    splits = quantized_attention_sm90.splits_for
    assert splits(128, 32768, 264) == 2 and splits(8, 32768, 264) in (32, 33)
    assert splits(8, 64, 264) == 1 and splits(1024, 4096, 264) == 1


def test_wrong_arguments() -> None:
    arguments = CASES[0].arguments()

    def changed(place: int, value: object) -> tuple:
        return (*arguments[:place], value, *arguments[place + 1 :])

    for wrong, error, message in (
        (changed(0, arguments[0].double()), TypeError, "query of torch.float32"),
        (changed(0, torch.cat([arguments[0]] * 2, 2)), ValueError, "one token of each sequence"),
        (
            changed(0, arguments[0][:, :7]),
            ValueError,
            "multiple of the key/value heads, got 7 and 2",
        ),
        (changed(5, arguments[5].int()), TypeError, "length of torch.int64"),
        (changed(7, torch.ones(2, 63, dtype=torch.bool)), ValueError, "entry for each of the 64"),
        (changed(11, 65), ValueError, "window must be from 1 to the 64 slots"),
        (changed(1, arguments[1].mT.contiguous().mT), ValueError, "must be contiguous"),
    ):
        with pytest.raises(error, match=message):
            torch.ops.lowbit.quantized_attention(*wrong)


@pytest.mark.parametrize("shift", [0, 1])
def test_caches_that_the_tma_cannot_read_take_the_formula(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    monkeypatch.setattr(quantized_attention_sm90, "takes", lambda *_: True)
    monkeypatch.setattr(quantized_attention_sm90, "attend", lambda q, *_: ran.append(1) or q + 0)
    codes, scale = torch.zeros(1, 2, 32, 16, dtype=torch.int8), torch.ones(1, 2, 32).bfloat16()
    keys = torch.zeros(codes.numel() + 16, dtype=torch.int8)[shift:][: codes.numel()]
    parts = (torch.randn(1, 2, 1, 16), keys.view(codes.shape), scale, codes, scale.clone())
    module.quantized_attention(*parts, torch.tensor([3]), scale=0.25, window=32)
    assert len(ran) == (shift == 0)

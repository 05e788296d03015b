"""Grouped products of experts in training: int8 and float8, int8 weights, QAT; against float64, expert by expert."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit import Int4Weight, Int8Weight, trace, train
from lowbit.schemes.least_sizes import LeastExperts
from lowbit.tensor.trained.gathered import GatheredTensor
from lowbit_kernels.matmul import scaled_mm
from lowbit_kernels.runtime import launches
from tests.as_sent import as_sent
from tests.traced import ran_in, reasons
from tests.train.problems import snr, values

TOKENS = {
    "ragged": (5, 30, 1, 12),
    "empty-experts": (0, 17, 0, 31),
    "one-gets-all": (0, 0, 48, 0),
    "tokens-beyond": (9, 0, 20, 3),
}
N, K, ROWS = 40, 72, 48
FORMATS = {
    "int8": train.Int8MixedPrecision(always=True),
    "float8": train.Float8MixedPrecision(always=True),
    "float8-e5m2": train.Float8MixedPrecision(backward="e5m2", always=True),
    "blocks": train.Float8BlockMixedPrecision(always=True),
    "blocks-power-of-two": train.Float8BlockMixedPrecision(always=True, power_of_two=True),
    "int8-stochastic": train.Int8MixedPrecision(stochastic_rounding=True, always=True),
    "int8-weight": Int8Weight(True, True, True, always=True),
    "int4-weight": Int4Weight(24, output=True, grad_input=True, grad_weight=True, always=True),
}
LEAST = {"int8": 33, "float8": 24, "float8-e5m2": 19, "int8-stochastic": 28}
LEAST |= {"int8-weight": 33, "int4-weight": 33, "blocks": 24, "blocks-power-of-two": 24}
"""Decibels between a result and the exact one."""


class Experts(nn.Module):
    """Weights [E, N, K]; the rows of x are sorted by expert."""

    def __init__(self, experts: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Parameter(values(experts, N, K, seed=1).to(dtype))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return F.grouped_mm(x, self.up.transpose(-2, -1), offs=offsets)


def prepared(model: Experts, scheme) -> Experts:
    low = copy.deepcopy(model)
    report = train.prepare_(low, scheme, lambda module, name: isinstance(module, Experts))
    assert report.converted == ["up"]
    return low


def offsets_of(tokens: tuple[int, ...]) -> Tensor:
    return torch.tensor(tokens).cumsum(0).to(torch.int32)


def outcome(model: Experts, x: Tensor, offsets: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x, offsets)
    y.backward(grad)
    return {"output": y.detach(), "input": x.grad, "weight": model.up.grad}


def exact(weight: Tensor, x: Tensor, tokens: tuple[int, ...], grad: Tensor) -> dict[str, Tensor]:
    w, x, grad = (t.double() for t in (weight, x, grad))
    y, dx, dw = grad.new_zeros(grad.shape), torch.zeros_like(x), torch.zeros_like(w)
    start = 0
    for e, count in enumerate(tokens):
        own = slice(start, start + count)
        y[own], dx[own], dw[e] = x[own] @ w[e].T, grad[own] @ w[e], grad[own].T @ x[own]
        start += count
    return {"output": y, "input": dx, "weight": dw}


def calls_of(ran: Counter) -> dict[str, int]:
    ops = ("grouped_scaled_mm", "grouped_block_mm")
    return {name: n for (op, name), n in ran.items() if op in ops}


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("name", FORMATS)
def test_all_three_products(name: str, tokens: tuple[int, ...]) -> None:
    model = Experts()
    low = prepared(model, FORMATS[name])
    x, grad = values(ROWS, K, seed=2), values(ROWS, N, seed=3)
    with launches.counted() as ran:
        found = outcome(low, x, offsets_of(tokens), grad)
    kind = "float8 " if name.startswith("float8") else "int8 "
    assert calls_of(ran) == {f"{'' if name.startswith('blocks') else kind}torch": 3}
    weight = low.up.dequantize() if name.endswith("weight") else model.up.detach()
    for key, expected in exact(weight, x, tokens, grad).items():
        assert found[key].shape == expected.shape and found[key].dtype == torch.float32
        assert snr(found[key], expected.float()) > LEAST[name], key
    empty = [e for e, count in enumerate(tokens) if count == 0]
    assert not found["weight"][empty].any()
    assert not found["output"][sum(tokens) :].any() and not found["input"][sum(tokens) :].any()


@pytest.mark.parametrize("name", ["int8", "float8", "blocks", "int4-weight"])
def test_the_weight_is_rounded_once(name: str) -> None:
    """The gradient of the input is that of the codes of the output, but for the rounding of the gradient."""
    low = prepared(Experts(), FORMATS[name])
    codes, scale = low.up.expert_codes()
    codes_t, scale_t = low.up.expert_codes_t()
    assert torch.equal(codes[..., :K].float().mT, codes_t[..., :N].float())
    assert torch.equal(scale, scale_t.mT if name == "blocks" else scale_t)
    gathered = as_sent(low.up)
    assert isinstance(gathered, GatheredTensor) == (name != "int4-weight")
    for own, other in zip(gathered.expert_codes_t(), (codes_t, scale_t), strict=True):
        assert torch.equal(own.float(), other.float())


@pytest.mark.parametrize("name", ["int8", "float8", "float8-e5m2", "blocks"])
def test_the_gathered_form_gives_the_same_bits(name: str) -> None:
    low = prepared(Experts(), FORMATS[name])
    x, grad, offsets = values(ROWS, K), values(ROWS, N, seed=3), offsets_of(TOKENS["ragged"])
    expected = outcome(low, x, offsets, grad)
    whole = as_sent(low.up.detach())
    turned = whole.transpose(-2, -1)
    assert type(turned) is type(whole) and turned.shape == (4, K, N)
    assert torch.equal(turned.dequantize(), whole.dequantize().mT)
    low.up = nn.Parameter(whole)
    for key, value in outcome(low, x, offsets, grad).items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("product", ["output", "grad_input", "grad_weight"])
def test_each_product_can_stay_in_high_precision(product: str) -> None:
    scheme = train.Int8MixedPrecision(**{product: False}, always=True)
    model = Experts(dtype=torch.bfloat16)
    low = prepared(model, scheme)
    x, grad = values(ROWS, K).bfloat16(), values(ROWS, N, seed=3).bfloat16()
    with launches.counted() as ran:
        found = outcome(low, x, offsets_of(TOKENS["ragged"]), grad)
    assert calls_of(ran) == {"int8 torch": 2}
    expected = exact(model.up.detach(), x, TOKENS["ragged"], grad)
    for key, value in expected.items():
        assert snr(found[key].float(), value.float()) > 30, key
    traced = ran_in(trace(low, x.requires_grad_(), offsets_of(TOKENS["ragged"])), "up")
    assert traced[product] == {"bfloat16": 1}


def test_the_trace_shows_grouped_products() -> None:
    x, offsets = values(ROWS, K, dtype=torch.bfloat16).requires_grad_(), offsets_of((9, 0, 20, 3))
    model = Experts(dtype=torch.bfloat16)
    for scheme, ran in (
        (FORMATS["int8"], ("int8", "int8", "int8")),
        (FORMATS["float8-e5m2"], ("e4m3", "e5m2", "e5m2")),
        (FORMATS["int8-weight"], ("int8", "int8", "int8")),
        (FORMATS["blocks"], ("e4m3", "e4m3", "e4m3")),
    ):
        found = trace(prepared(model, scheme), x, offsets)
        products = ("output", "grad_input", "grad_weight")
        expected = {key: {fmt: 1} for key, fmt in zip(products, ran, strict=True)}
        assert ran_in(found, "up") == expected and not reasons(found, "up")
        assert all((p.m, p.n, p.k) == (ROWS, N, K) for p in found.products)
        op = "grouped_block_mm" if scheme.in_blocks else "grouped_scaled_mm"
        assert all(op in p.implementation for p in found.products)
    plain = prepared(model, train.Int8MixedPrecision(always=True, output=True))
    assert "grouped_scaled_mm" in str(trace(plain, x, offsets))
    tensorwise = prepared(model, train.Float8MixedPrecision(tensorwise=True, always=True))
    assert reasons(trace(tensorwise, x, offsets), "up") == {
        "grouped products take a scale a row, and the scheme one a tensor"
    }
    microscaled = prepared(model, train.MXFP8MixedPrecision(always=True))
    assert reasons(trace(microscaled, x, offsets), "up") == {
        "grouped products take no scales of 32 elements"
    }
    # torch's grouped product takes contiguous gradients only
    trace(Experts(), x.detach().float().requires_grad_(), offsets)


def test_long_sums_of_int8_run_in_high_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of float8 do not overflow."""
    monkeypatch.setattr(scaled_mm, "MOST_TERMS", max(N, K) - 1)
    x, model = values(ROWS, K, dtype=torch.bfloat16).requires_grad_(), Experts(dtype=torch.bfloat16)
    for name in ("int8", "float8", "blocks"):
        found = trace(prepared(model, FORMATS[name]), x, offsets_of(TOKENS["tokens-beyond"]))
        why = {f"sums over more than {max(N, K) - 1} products may overflow"}
        assert reasons(found, "up") == (why if name == "int8" else set())


def test_which_sizes_gain() -> None:
    scheme = train.Int8MixedPrecision()
    cuda = torch.device("cuda")
    assert scheme.grouped_plain_because(torch.device("cpu"), 8, 4, 4096, 4096)
    assert "too small to gain" in scheme.grouped_plain_because(cuda, 64, 8, 4096, 4096)
    assert "too small to gain" in scheme.grouped_plain_because(cuda, 131072, 8, 256, 4096)
    assert scheme.grouped_plain_because(cuda, 0, 8, 4096, 4096) == "there is nothing to multiply"
    assert scheme.least_experts.gains(32768, 8, 14336, 4096)
    least = train.Float8BlockMixedPrecision().least_experts  # as measured on an H200
    gain = {
        (32768, 8, 14336, 4096): True,
        (32768, 8, 4096, 14336): True,
        (65536, 32, 2880, 2880): True,
    }
    gain |= {(131072, 128, 1536, 2048): False, (131072, 128, 2048, 768): False}
    assert {sizes: least.gains(*sizes) for sizes in gain} == gain
    assert scheme.obstacle((128, 1536, 2048), ["other"]) is None
    assert "too small" in scheme.obstacle((128, 256, 2048), ["other"])


def test_experts_may_gain_exactly_where_enough_rows_gain() -> None:
    least = LeastExperts()
    sizes = [(n, k) for n in range(420, 2048, 101) for k in (512, 1024, 8192)]
    found = [least.may_gain(n, k) for n, k in sizes]
    assert found == [least.gains(2**60, 1, n, k) for n, k in sizes]
    assert True in found and False in found


@pytest.mark.parametrize("name", ["int8", "float8", "blocks", "int8-weight"])
def test_compiled_without_a_break_or_recompilation(name: str) -> None:
    """20 steps of changing token counts, of which the graph knows nothing; then other numbers of rows."""
    torch._dynamo.reset()
    low = prepared(Experts(dtype=torch.bfloat16), FORMATS[name])
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    eager = copy.deepcopy(low)
    compiled = torch.compile(low, backend="aot_eager", fullgraph=True)
    counted = torch.compile(copy.deepcopy(low), backend=backend, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        tokens = torch.multinomial(torch.ones(4), ROWS, True, generator=generator).bincount(
            minlength=4
        )
        offsets = tokens.cumsum(0).to(torch.int32)
        x, grad = values(ROWS, K, seed=step).bfloat16(), values(ROWS, N).bfloat16()
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            counted(x.clone().requires_grad_(), offsets)
            found = outcome(compiled, x, offsets, grad)
        for key, value in outcome(eager, x, offsets, grad).items():
            assert torch.equal(found[key], value), key
    assert len(graphs) == 1
    for rows in (50, 61, 75):
        x, offsets = values(rows, K).bfloat16(), offsets_of((rows - 40, 0, 30, 10))
        with torch._dynamo.config.patch(error_on_recompile=rows > 50):
            y = compiled(x.requires_grad_(), offsets)
        assert snr(y.detach().float(), eager(x, offsets).detach().float()) > 60


def test_layers_that_read_the_same_rows_quantize_them_once() -> None:
    low = prepared(Experts(), FORMATS["int8"])
    x = values(ROWS, K).requires_grad_() * 1.0
    offsets = offsets_of(TOKENS["ragged"])
    with launches.counted() as ran:
        for _ in range(2):
            low(x, offsets)
    assert ran["quantize_grouped", "torch"] == 1
    with launches.counted() as ran:
        low(x, offsets.clone())
        offsets += 0
        low(x, offsets)
    assert ran["quantize_grouped", "torch"] == 2


def test_the_experts_of_torchtitan() -> None:
    """w1, w2 and w3 [E, hidden, dim] in float32, cast where they are multiplied; groups with rows to spare."""

    class GroupedExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w3 = (nn.Parameter(values(4, N, K, seed=s) / 8) for s in (1, 3))
            self.w2 = nn.Parameter(values(4, K, N, seed=2) / 6)

        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
            x = x.bfloat16()
            gate, up = (
                torch._grouped_mm(x, w.bfloat16().transpose(-2, -1), offs=offsets)
                for w in (self.w1, self.w3)
            )
            h = F.silu(gate) * up
            return torch._grouped_mm(h, self.w2.bfloat16().transpose(-2, -1), offs=offsets)

    plain, counts = GroupedExperts(), torch.tensor([16, 0, 24, 8])
    low = copy.deepcopy(plain)
    train.prepare_(low, FORMATS["int8"], lambda module, name: isinstance(module, GroupedExperts))
    grads = []
    for model in (low, plain):
        x = values(56, K, seed=7).requires_grad_()
        y = model(x * 1.0, counts)[:48]
        y.float().square().sum().backward()
        grads.append({"y": y.detach(), "x": x.grad[:48], "w1": model.w1.grad, "w2": model.w2.grad})
    for key, expected in grads[1].items():
        assert snr(grads[0][key].float(), expected.float()) > 25, key
    layers = {p.layer for p in trace(low, values(56, K).requires_grad_(), counts).products}
    assert layers <= {"w1", "w2", "w3", ""}


def test_refusals() -> None:
    weight = prepared(Experts(), FORMATS["int8"]).up.mT
    x, offsets = values(ROWS, K), offsets_of(TOKENS["ragged"])
    with pytest.raises(ValueError, match=r"accepted: \[M, K\] and \[E, K, N\] with offs"):
        torch._grouped_mm(x[:, :8], weight, offs=offsets)
    with pytest.raises(ValueError, match=r"must be int32 \[4\]"):
        torch._grouped_mm(x, weight, offs=offsets.long())
    with pytest.raises(NotImplementedError, match="with a bias"):
        torch._grouped_mm(x, weight, offs=offsets, bias=x)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        rows = x.requires_grad_()
        y = torch._grouped_mm(rows, weight, offs=offsets)
        torch.autograd.grad(y.sum(), rows, create_graph=True)


# ---- fake quantization -------------------------------------------------------------------------------------------

QAT = {
    "int4-g24": lb.Int4WeightOnly(group_size=24),
    "int8-row": lb.Int8WeightOnly(),
    "int8-token-int8-row": lb.Int8DynamicActivationInt8Weight(),
}


@pytest.mark.parametrize("name", QAT)
def test_fake_quantized_experts(name: str) -> None:
    """As the products of the values that the converted experts will have."""
    scheme, model = QAT[name], Experts(dtype=torch.bfloat16)
    low = copy.deepcopy(model)
    lb.qat.prepare_(low, scheme, lambda module, name: isinstance(module, Experts))
    x, grad, offsets = (
        values(ROWS, K).bfloat16(),
        values(ROWS, N, seed=3).bfloat16(),
        offsets_of(TOKENS["empty-experts"]),
    )
    found = outcome(low, x, offsets, grad)
    rounded = x if scheme.activation is None else scheme.activation.fake_quantize(x)
    expected = exact(low.up.dequantize(), rounded, TOKENS["empty-experts"], grad)
    for key in ("output", "input"):
        assert snr(found[key].float(), expected[key].float()) > 35, key
    inside = found["weight"] != 0
    assert inside.float().mean() > 0.4, "the gradient passes where nothing clips"
    assert snr(found["weight"][inside].float(), expected["weight"][inside].float()) > 35
    traced = trace(low, x.requires_grad_(), offsets)
    assert reasons(traced, "up") == {"rounded values, multiplied in high precision"}
    assert {p.weight for p in traced.products} == {low.up.stored_format()}
    batched = values(4, 5, K).bfloat16()
    assert torch.equal(
        torch.stack([batched[e] @ low.up.dequantize()[e].T for e in range(4)])
        if scheme.activation is None
        else torch.bmm(batched, low.up.mT),
        torch.bmm(batched, low.up.mT),
    )
    converted = copy.deepcopy(low)
    lb.qat.convert_(converted)
    assert torch.equal(converted.up.dequantize(), low.up.dequantize())
    if scheme.activation is None:
        assert torch.equal(converted(x, offsets), low(x, offsets))


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme",
    [
        lb.Int8DynamicActivationInt8Weight(),
        lb.Int8DynamicActivationInt4Weight(group_size=16),
        lb.Float8DynamicActivationFloat8Weight(),
    ],
    ids=["int8-int8", "int8-int4", "float8-float8"],
)
@pytest.mark.parametrize("stacked", [False, True], ids=["grouped", "bmm"])
def test_converted_experts_round_their_inputs_as_in_qat(scheme, stacked: bool) -> None:
    low, is_experts = Experts(), lambda module, name: isinstance(module, Experts)
    lb.qat.prepare_(low, scheme, is_experts)
    x, offsets = values(ROWS, K), offsets_of((9, 0, 20, ROWS - 29))
    if stacked:
        x = values(4, 7, K)
        expected = torch.bmm(x, low.up.transpose(-2, -1))
    else:
        expected = low(x, offsets)
    lb.qat.convert_(low)
    assert isinstance(low.up, lb.AffineTensor)
    found = torch.bmm(x, low.up.transpose(-2, -1)) if stacked else low(x, offsets)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_converted_bitnet_experts_compute_as_in_training() -> None:
    low, is_experts = Experts(), lambda module, name: isinstance(module, Experts)
    train.prepare_(low, train.BitNet(), is_experts)
    x, offsets = values(ROWS, K), offsets_of((9, 0, 20, ROWS - 29))
    expected = low(x, offsets)
    train.convert_(low)
    assert torch.equal(low(x, offsets), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens", [(300, 0, 171, 229), (0, 0, 700, 0)], ids=["ragged", "one-gets-all"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_all_three_products_on_a_gpu(name: str, tokens: tuple[int, ...]) -> None:
    model = Experts(dtype=torch.bfloat16)
    model.up = nn.Parameter(values(4, 264, 400, seed=1, dtype=torch.bfloat16))
    low = prepared(model, FORMATS[name]).cuda()
    x, grad = (values(700, k, seed=2, dtype=torch.bfloat16).cuda() for k in (400, 264))
    offsets = offsets_of(tokens).cuda()
    with launches.counted() as ran:
        found = outcome(low, x, offsets, grad)
    assert sum(calls_of(ran).values()) == 3 and not any("torch" in kind for kind in calls_of(ran))
    weight = low.up.dequantize()
    for key, expected in exact(weight, x, tokens, grad).items():
        assert snr(found[key].float(), expected.float()) > LEAST[name], key

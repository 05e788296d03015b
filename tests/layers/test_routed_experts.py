"""The forward of frozen stacked experts, on modules with transformers' interface of experts, without transformers."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit as lb
import lowbit_kernels as kernels
from lowbit.linear.frozen import experts
from lowbit_kernels.runtime import launches
from tests.schemes import relative_error

TOKENS, EXPERTS, HIDDEN, INNER, TOP = 5, 4, 64, 32, 2


def wrapped(forward: Any) -> Any:
    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return forward(self, *args, **kwargs)

    return run


def _default_apply_gate(self: Any, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return self.act_fn(gate) * up


class Experts(nn.Module):
    """As transformers' decorator leaves a module of experts."""

    _apply_gate = _default_apply_gate

    def __init__(
        self, act: nn.Module, has_gate: bool = True, has_bias: bool = False, norm: bool = False
    ) -> None:
        super().__init__()
        self.act_fn, self.has_gate, self.has_bias = act, has_gate, has_bias
        self.is_transposed, self.has_post_expert_norm = False, norm
        self.up = "gate_up_proj" if has_gate else "up_proj"
        rows = INNER * (2 if has_gate else 1)
        for name, shape in ((self.up, (rows, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
            self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, *shape) * 0.1, False))
            if has_bias:
                bias = nn.Parameter(torch.randn(EXPERTS, shape[0]), False)
                self.register_parameter(f"{name}_bias", bias)
        if norm:
            self.post_expert_norm = nn.RMSNorm(HIDDEN)

    @wrapped
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for token in range(len(x)):
            for slot in range(ids.shape[1]):
                out[token] += weights[token, slot] * self.one(x[token], int(ids[token, slot]))
        return out

    def one(self, x: Tensor, expert: int) -> Tensor:
        h = self.product(self.up, x, expert)
        h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
        y = self.product("down_proj", h, expert)
        return self.post_expert_norm(y) if self.has_post_expert_norm else y

    def product(self, name: str, x: Tensor, expert: int) -> Tensor:
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else 0
        return nn.functional.linear(x[None], getattr(self, name)[expert])[0] + bias


class Clamped(Experts):
    """A gate of its own, as gpt-oss has."""

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both[..., ::2].clamp(max=1), both[..., 1::2].clamp(-1, 1)
        return (up + 1) * gate * torch.sigmoid(gate)


MADE = {
    "silu": lambda: Experts(nn.SiLU()),
    "gelu": lambda: Experts(nn.GELU()),
    "no gate": lambda: Experts(nn.ReLU(), has_gate=False),
    "bias": lambda: Experts(nn.SiLU(), has_bias=True),
    "norm": lambda: Experts(nn.SiLU(), norm=True),
    "own gate": lambda: Clamped(nn.SiLU(), has_bias=True),
}


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.rand(TOKENS, EXPERTS).topk(TOP).indices
    return torch.randn(TOKENS, HIDDEN).to(dtype), ids, torch.rand(TOKENS, TOP).to(dtype)


def frozen(name: str, scheme: lb.Scheme, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": MADE[name]()}).to(dtype)
    lb.quantize_(model, scheme)
    return model.experts


@pytest.mark.parametrize("name", MADE)
def test_it_computes_what_the_stock_forward_does(name: str) -> None:
    experts = frozen(name, lb.Int4WeightOnly(32))
    plain = copy.deepcopy(experts)
    lb.dequantize_(plain)
    x, ids, weights = inputs()
    expected = plain.float()(x.float(), ids, weights.float())
    again = pickle.loads(pickle.dumps(experts))
    for one in (experts, copy.deepcopy(experts), again):
        with launches.counted() as calls:
            found = one(x, ids, weights)
        assert calls["expert_linear", "loop"] == 2
        assert relative_error(found.float(), expected) < 2e-2
    assert type(plain) is type(MADE[name]())


FORMATS = [
    *(lb.IntxWeightOnly(bits, 32) for bits in (1, 2, 3, 5, 6, 7, 8)),
    *(lb.NF4WeightOnly(32), lb.NF4WeightOnly(32, double_quantization=True)),
    *(lb.MXFP4WeightOnly(), lb.Float8WeightOnly()),
]


@pytest.mark.cover("values")
@pytest.mark.parametrize("scheme", FORMATS, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_every_format(scheme: lb.Scheme, compiled: bool) -> None:
    experts = frozen("silu", scheme)
    plain = copy.deepcopy(experts)
    lb.dequantize_(plain)
    x, ids, weights = inputs()
    expected = plain.float()(x.float(), ids, weights.float())
    torch._dynamo.reset()
    run = torch.compile(experts, backend="aot_eager", fullgraph=True) if compiled else experts
    with launches.counted() as calls:
        found = run(x, ids, weights)
    assert calls["expert_linear", "loop"] == 2
    assert relative_error(found.float(), expected) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 300])
@pytest.mark.parametrize("scheme", FORMATS, ids=str)
@torch.no_grad()
def test_every_format_on_a_gpu(
    scheme: lb.Scheme, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for nothing, whether a kernel takes the format or the stock forward."""
    monkeypatch.setitem(globals(), "HIDDEN", 256)
    monkeypatch.setitem(globals(), "INNER", 128)
    experts = frozen("silu", scheme).cuda()
    plain = copy.deepcopy(experts)
    lb.dequantize_(plain)
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP).indices
    weights = torch.rand(tokens, TOP, device="cuda", dtype=torch.bfloat16)
    expected = plain.float()(x.float(), ids, weights.float())
    with launches.counted() as calls:
        found = experts(x, ids, weights)
    assert relative_error(found.float(), expected) < 2e-2
    assert not calls["expert_linear", "loop"]
    if torch.cuda.get_device_capability() == (9, 0):
        assert sum(n for (op, _), n in calls.items() if op == "expert_linear") == 2


@pytest.mark.parametrize("how", ["float32", "a gradient", "groups of 16", "an input in keywords"])
def test_other_calls_take_the_stock_forward(how: str) -> None:
    scheme = lb.Int4WeightOnly(16 if how == "groups of 16" else 32)
    dtype = torch.float32 if how == "float32" else torch.bfloat16
    experts = frozen("silu", scheme, dtype)
    x, ids, weights = inputs(dtype)
    with launches.counted() as calls:
        if how == "an input in keywords":
            experts(x, ids=ids, weights=weights)
        else:
            experts(x.requires_grad_(how == "a gradient"), ids, weights)
    assert not calls["expert_linear", "loop"]


def test_other_modules_keep_their_forward() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(2, 64, 64), False)
            self.down_proj = nn.Parameter(torch.randn(2, 64, 32), False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.gate_up_proj[0]

    model = nn.ModuleDict({"experts": Plain()})
    lb.quantize_(model, lb.Int4WeightOnly(32))
    assert type(model.experts).forward is Plain.forward


@pytest.mark.parametrize("flow", [lb.quantize_, lb.qat.prepare_])
def test_no_filter_takes_the_biases_of_experts(flow: Any) -> None:
    model = nn.ModuleDict({"experts": MADE["bias"]()}).to(torch.bfloat16)
    report = flow(model, lb.Int4WeightOnly(32), lambda module, name: True)
    names = {"experts.gate_up_proj", "experts.down_proj"}
    assert {*report.converted} == names
    assert report.left == {f"{name}_bias": "the biases of stacked experts" for name in names}
    assert all(type(p) is nn.Parameter for n, p in model.named_parameters() if n.endswith("bias"))
    with torch.no_grad():
        assert model.experts(*inputs()).isfinite().all()
    with pytest.raises(ValueError, match="the biases of stacked experts"):
        flow(nn.ModuleDict({"experts": MADE["bias"]()}), {"*_bias": lb.Int4WeightOnly(32)})


class _Ops(TorchDispatchMode):
    """The names of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(op._schema.name)
        return op(*args, **(kwargs or {}))


def test_what_a_call_costs_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ops between two views, and no attribute of a weight that is read through its `__torch_function__`."""
    experts = frozen("silu", lb.Int4WeightOnly(32))
    x, ids, weights = inputs()
    with torch.no_grad():
        with _Ops() as ran:
            expected = experts(x, ids, weights)
        op = "lowbit::expert_linear"
        assert ran.names == ["aten::view", op, op, "aten::view", "lowbit::weighted_sum"]

        results = {"expert_linear": expected.repeat(TOP, 1), "weighted_sum": expected}
        for name, result in results.items():
            module = getattr(kernels, name)
            monkeypatch.setattr(module, name, lambda *a, result=result, **k: result)
        called: list[str] = []

        def profile(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                called.append(frame.f_code.co_name)

        experts(x, ids, weights)
        sys.setprofile(profile)
        try:
            experts(x, ids, weights)
        finally:
            sys.setprofile(None)
    assert "__torch_function__" not in called
    assert len(called) <= 60, called


@pytest.mark.parametrize(
    "scheme", [lb.Int4WeightOnly(32), lb.MXFP4WeightOnly(), lb.NF4WeightOnly(32)]
)
def test_sorted_rows_of_experts_by_kernels(scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU runs lowbit's kernels in place of `torch._grouped_mm`. Here a CPU does: rows that no expert has are 0."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
    monkeypatch.setattr(experts, "has_expert_kernel", lambda *facts: True)
    torch.manual_seed(0)
    weight: Any = lb.AffineTensor.from_float(torch.randn(3, 24, 64).bfloat16(), scheme)
    x, offsets = torch.randn(12, 64).bfloat16(), torch.tensor([5, 5, 11], dtype=torch.int32)
    y = torch._grouped_mm(x.requires_grad_(), weight.transpose(-2, -1), offs=offsets)
    monkeypatch.undo()
    y[:11].sum().backward()
    each = weight.dequantize().double()
    wanted = torch.cat([x[:5].double() @ each[0].T, x[5:11].double() @ each[2].T])
    assert relative_error(y[:11], wanted) < 2**-7 and not y[11].any()
    assert x.grad is not None
    gradient = torch.cat([each[0].sum(0).expand(5, -1), each[2].sum(0).expand(6, -1)])
    assert relative_error(x.grad[:11], gradient) < 2**-6

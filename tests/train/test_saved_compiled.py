"""Saved activations in int8 in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from lowbit.train import save_in_int8, saved
from recipes.llama import Llama, SwiGLU
from tests.train.test_saved import CONFIG, NOTHING, _of


def test_compiled_code_rounds_in_its_graph() -> None:
    """Activations that the graph alone sees are codes, in one graph for all steps; weights and inputs are not."""
    torch.compiler.reset()
    model = SwiGLU(replace(CONFIG, hidden=256)).bfloat16()
    backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model.compile(backend=backend, dynamic=False)
    x = torch.randn(63, 128, dtype=torch.bfloat16, requires_grad=True)
    model(x).square().sum().backward()
    exact, x.grad = x.grad, None
    for _ in range(2):
        with save_in_int8(model, min_numel=1024):
            y = model(x)
        saved = y.grad_fn.saved_tensors
        codes = [tuple(t.shape) for t in saved if t.dtype is torch.int8]
        assert codes == [(126, 128)] * len(codes)
        assert len(codes) in (2, 3)  # gate, up, their product
        rest = [t for t in saved if t.dtype is not torch.int8 and t.shape != (126, 1)]
        assert all(_of(model, t) or t.data_ptr() == x.data_ptr() for t in rest)
        y.square().sum().backward()
        assert exact is not None and x.grad is not None
        assert 0 < (x.grad - exact).double().norm() / exact.double().norm() < 0.03
        x.grad = None
    assert backend.frame_count == 2  # without the context, and within


@pytest.mark.gpu
def test_compiled_code_rounds_within_other_kernels() -> None:
    """The forward pass of a SwiGLU is one kernel besides its products, with the codes of its inputs and without."""
    from torch._inductor import config, metrics

    found = []
    for saves in (False, True):
        torch.compiler.reset()
        metrics.reset()
        model = SwiGLU(replace(CONFIG, hidden=512)).bfloat16().cuda()
        model.compile(dynamic=False)
        x = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        caches = config.patch(force_disable_caches=True)
        with caches, save_in_int8(model, min_numel=1024 if saves else 10**9):
            y = model(x)
        assert any(t.dtype is torch.int8 for t in y.grad_fn.saved_tensors) == saves
        found.append(metrics.generated_kernel_count)
    assert found == [1, 1]


def test_compiled_code_keeps_small_values_where_a_derivative_compares_them() -> None:
    """0.001 beside 1 is less than half a code."""
    x = torch.cat([torch.full((64,), 0.001), torch.ones(64)]).bfloat16()

    def run(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The scale of what is saved, and the gradients of x and of the other factor."""
        torch.compiler.reset()
        product: Any = torch.compile(lambda x, w: function(x) * w, backend="aot_eager")
        leaves = x.clone().requires_grad_(), torch.ones_like(x).requires_grad_()
        with save_in_int8(NOTHING, min_numel=1):
            y = product(*leaves)
        (scale,) = (t for t in y.grad_fn.saved_tensors if t.shape == (1, 1))
        return scale, *torch.autograd.grad(y.sum(), leaves)

    scale, grad, _ = run(lambda x: (x * 2).relu())
    assert scale == -2 and (grad == 2).all()
    scale, _, grad = run(lambda x: (x * 2).tanh())
    assert scale > 0 and torch.equal(grad, (x * 2).tanh() * (x == 1))


def test_compiled_attention_keeps_queries_and_keys() -> None:
    torch.compiler.reset()
    block: Any = Llama(replace(CONFIG, layers=1)).bfloat16()
    block.compile(backend="aot_eager", dynamic=False)
    tokens = torch.randint(61, (4, 64))
    with save_in_int8(block, min_numel=1024):
        y = block(tokens)
    halves = [
        t.shape for t in y.grad_fn.saved_tensors if t.dtype is torch.bfloat16 and t.dim() == 4
    ]
    assert sorted(shape[1] for shape in halves) == [2, 4]  # keys, queries


def test_a_torch_that_does_not_show_its_graph_rounds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._functorch._aot_autograd, "graph_compile", SimpleNamespace())
    assert saved._uses_in_graph().exact


def test_compiled_code_leaves_the_copies_of_weights_under_autocast() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32))
    model.compile(backend="aot_eager", dynamic=False)
    x = torch.randn(7, 64, requires_grad=True)

    def grad_x(context: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), context:
            y = model(x)
        return torch.autograd.grad(y.float().sum(), x)[0]

    assert torch.equal(grad_x(save_in_int8(model, min_numel=1)), grad_x(torch.enable_grad()))

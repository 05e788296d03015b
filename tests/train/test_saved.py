"""Activations saved in int8: what is rounded, by how much, once for all that share it; and what stays exact."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit.train import save_in_int8
from recipes.llama import Llama, LlamaConfig
from tests.garbage import only_new

NOTHING = nn.Module()
CONFIG = LlamaConfig(61, dim=128, layers=2, heads=4, kv_heads=2, hidden=256, context=64)


class Count(save_in_int8):
    """Counts the codes that are made, and the bytes of what is saved, each storage once."""

    def __init__(self, model: nn.Module, min_numel: int = 1) -> None:
        super().__init__(model, min_numel=min_numel)
        self.made: dict[int, Any] = {}
        self.nbytes = 0
        self.kept: list[Tensor] = []
        pack = self.pack_hook

        def counting(t: Tensor) -> Any:
            saved = pack(t)
            codes = saved[0]
            if isinstance(codes, Tensor):
                self.kept.append(t)
            elif id(codes) not in self.made:
                self.made[id(codes)] = codes
                self.nbytes += codes.codes.nbytes + codes.scale.nbytes
            return saved

        self.pack_hook = counting


def round_trip(x: Tensor, view: Callable[[Tensor], Tensor] = lambda t: t) -> Tensor:
    """What backward reads of `view(x)`: the gradient of a product with it."""
    values, other = view(x.clone().requires_grad_() * 1), torch.ones((), dtype=x.dtype)
    other.requires_grad_()
    with save_in_int8(NOTHING, min_numel=1):
        y = values * other.expand(values.shape)
    return y.grad_fn._saved_self  # type: ignore[union-attr]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "columns": lambda t: t[:, 3:200],
    "piece": lambda t: t.split(100, 1)[1],
    "steps": lambda t: t[::2, ::3],
    "one row": lambda t: t[5:6],
    "repeated": lambda t: t[:, None].expand(-1, 4, -1),
    "row repeated": lambda t: t[2].expand(9, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_the_error_is_at_most_half_a_code(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(63, 257) * torch.logspace(-3, 3, 63)[:, None]).to(dtype)
    view = VIEWS[name]
    read, exact = round_trip(x, view), view(x)
    assert read.shape == exact.shape and read.dtype == dtype
    # blocks run over the ends of rows, so that both views have the same codes
    if name in ("whole", "transposed"):
        assert read.stride() == exact.stride()
        blocks = F.pad(x.double().flatten(), (0, -x.numel() % 128)).view(-1, 128)
        largest = blocks.abs().amax(1, keepdim=True).expand(-1, 128).flatten()
        bound = view(largest[: x.numel()].view(x.shape)) / 252 * (1 + 1e-5)
        bound += exact.double().abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
        assert ((read.double() - exact.double()).abs() <= bound).all()
    else:
        rows = read.double().flatten(0, -2), exact.double().flatten(0, -2)
        assert ((rows[0] - rows[1]).norm(dim=1).max() / rows[1].norm(dim=1).max()) < 0.02
    normal = torch.randn(64, 128).to(dtype)
    error = (round_trip(normal).double() - normal.double()).norm() / normal.double().norm()
    assert 0.005 < error < 0.0075


def test_special_values_cost_their_neighbours_nothing() -> None:
    x = torch.randn(4, 128)
    plain = round_trip(x)
    special = x.clone()
    at = x.abs().argmin(1)
    special[0, at[0]], special[1, at[1]], special[2, at[2]] = torch.nan, torch.inf, -torch.inf
    read = round_trip(special)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        torch.testing.assert_close(read[row, at[row]], torch.tensor(value), equal_nan=True)
    others = torch.ones(4, 128, dtype=torch.bool)
    others[range(3), at[:3]] = False
    assert torch.equal(read[others], plain[others])
    largest = plain.gather(1, x.abs().argmax(1, keepdim=True))
    assert torch.equal(largest, x.gather(1, x.abs().argmax(1, keepdim=True)))
    most = torch.full((2, 64), torch.finfo(torch.float32).min)
    assert torch.equal(round_trip(most), most)
    assert torch.equal(round_trip(torch.zeros(3, 50)), torch.zeros(3, 50))
    inf = torch.tensor([0.0, torch.inf, 0.0])
    assert torch.equal(round_trip(inf), inf)
    tiny = torch.tensor([1e-45, -1e-45, 0.0])
    assert torch.equal(round_trip(tiny), tiny)


def test_small_positive_values_do_not_become_zero() -> None:
    x = torch.cat([torch.tensor([0.0, 1e-6, 0.003, 1.0]), torch.rand(124)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for largest in (1.0, 2.0**-12):
            values = (x * largest).to(dtype)
            read = round_trip(values)
            assert torch.equal(read == 0, values == 0) and (read >= 0).all()
            bound = largest / 252 + values.double() * torch.finfo(dtype).eps
            bound += torch.finfo(dtype).smallest_normal
            assert ((read.double() - values.double()).abs() <= bound).all()
    special = x.clone()
    special[4:7] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    read = round_trip(special)
    torch.testing.assert_close(read[4:7], special[4:7], equal_nan=True)
    assert read[0] == 0 < read[1] < 1 / 252


def test_relu_keeps_its_derivative() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    x = torch.randn(128, 64)

    def gradient() -> Tensor:
        model.zero_grad()
        (model(x) * torch.linspace(-1, 1, 64)).sum().backward()
        return model[0].weight.grad.clone()

    plain = gradient()
    with save_in_int8(model, min_numel=1):
        rounded = gradient()
    assert (rounded - plain).norm() < 0.01 * plain.norm()


@pytest.mark.parametrize(
    "low", [-torch.inf, torch.finfo(torch.bfloat16).min], ids=["inf", "finite"]
)
def test_masks_and_sharp_attention(low: float) -> None:
    """Masks, queries and keys stay exact, so the probabilities do: the scores deviate by 8."""
    torch.manual_seed(0)
    mask = torch.randn(64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), low).bfloat16()
    q, k, v = (torch.randn(1, 2, 64, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    w, grads = torch.randn(1, 2, 64, 16), []
    for min_numel in (10**9, 1):
        count = Count(NOTHING, min_numel=min_numel)
        sharp = q * 8**0.5, k * 8**0.5
        with count:
            y = F.scaled_dot_product_attention(*sharp, v * 1, attn_mask=mask)
        grads.append(torch.autograd.grad((y.float() * w).sum(), (q, k, v)))
    assert len(count.made) in (1, 2)  # the value and, where backward reads it, the result
    for plain, rounded in zip(*grads, strict=True):
        assert (rounded - plain).norm() < 0.06 * plain.norm()
    assert torch.equal(grads[0][2], grads[1][2])  # from probabilities alone


def test_empty_tensors_and_small_ones_stay() -> None:
    x = torch.randn(0, 8).requires_grad_() * 1
    count = Count(NOTHING, min_numel=1)
    with count:
        y = (x * x).sum()
    y.backward()
    assert not count.made
    small = torch.randn(31).requires_grad_() * 1
    count = Count(NOTHING, min_numel=32)
    with count:
        (small * small).sum().backward()
    assert not count.made and len(count.kept) == 2


@only_new()
def test_tensors_that_save_the_same_elements_share_one_copy() -> None:
    x = torch.randn(4, 8, 128).requires_grad_() * 1
    linears = nn.ModuleList(nn.Linear(128, 64) for _ in range(3))
    count = Count(linears)
    with count:
        y = (
            sum(linear(x).sum() for linear in linears)
            + (x.transpose(0, 1) * x.transpose(0, 1)).sum()
        )
    assert len(count.made) == 1 and count.nbytes == 4 * 8 * (128 + 4)
    codes = weakref.ref(next(iter(count.made.values())))
    count.made.clear()
    y.backward()
    del y
    gc.collect(0)
    assert codes() is None and not count._rounding._made


def test_a_freed_address_is_not_taken_for_the_same_tensor() -> None:
    expected, kept = [], []
    leaf = torch.ones((), requires_grad=True)
    with save_in_int8(NOTHING, min_numel=1):
        for i in range(8):
            x = torch.full((1024,), float(i)) * leaf
            kept.append(x.exp().square())  # x itself is freed, and its address used again
            expected.append(x.detach().exp())
            del x
    for y, value in zip(kept, expected, strict=True):
        torch.testing.assert_close(y.grad_fn._saved_self, value)  # type: ignore[union-attr]


def test_an_activation_does_not_take_the_address_of_a_freed_parameter() -> None:
    """FSDP2 frees tensors within a sharded low-bit weight after the context has seen them."""
    x = torch.randn(64, 128, requires_grad=True)
    for _ in range(20):
        model = nn.Linear(64, 64)
        with save_in_int8(model, min_numel=1):
            del model.weight, model.bias
            y = x * 2.0
            (y * y).sum().backward()
        assert x.grad is not None and not torch.equal(x.grad, 8 * x)
        x.grad = None


def test_parameters_buffers_and_their_views_stay_exact() -> None:
    class Model(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 32))
            self.register_buffer("table", torch.randn(32, dtype=torch.bfloat16))
            self.frozen = nn.Parameter(torch.randn(32, 32), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            x = (x @ self.frozen.t()) * self.table[:32]
            return F.linear(x, self.weight[:16]) @ self.weight.detach()[:16, :8]

    model, x = Model(), torch.randn(5, 32, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    count = Count(model)
    with count:
        y = model(x)
    (read,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(read, plain)  # the gradient of x depends on the weights alone
    assert len(count.made) == 1  # the input of the trained product


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_autocast_leaves_the_copies_of_weights(trained: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32)).requires_grad_(trained)
    x = torch.randn(7, 64, requires_grad=True)

    def grad_x(context: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), context:
            y = model(x)
        return torch.autograd.grad(y.float().sum(), x)[0]

    assert torch.equal(grad_x(save_in_int8(model, min_numel=1)), grad_x(torch.enable_grad()))


class Within:
    """Stands for a tensor whose operation runs another function first."""

    def __init__(self, value: Tensor, first: Callable[[], Any]) -> None:
        self.value, self.first = value, first

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        args[0].first()
        return func(args[0].value)


def test_an_operation_keeps_tensors_exact_in_its_own_thread() -> None:
    """While one thread is within a logarithm, another squares, and opens the same model's context once more."""
    x = (torch.rand(256) + 0.01).requires_grad_()
    entered, begin = threading.Event(), threading.Event()
    found: list[Tensor] = []

    def other() -> None:
        y = x.detach().clone().requires_grad_()
        with save_in_int8(NOTHING, min_numel=1):
            entered.set()
            assert begin.wait(60)
            with save_in_int8(NOTHING, min_numel=1):
                z = (y * 1).square()
        found.append(torch.autograd.grad(z.sum(), y)[0])

    def meanwhile() -> None:
        begin.set()
        thread.join(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(60)
    with save_in_int8(NOTHING, min_numel=1):
        logarithm = torch.log(Within(x * 1, meanwhile))  # type: ignore[arg-type]
    assert torch.equal(torch.autograd.grad(logarithm.sum(), x)[0], 1 / x)
    (of_square,) = found
    assert not torch.equal(of_square, 2 * x)
    torch.testing.assert_close(of_square, 2 * x.detach(), rtol=0, atol=2 / 126)


def test_log_softmax_and_statistics_stay_exact() -> None:
    x = (torch.randn(9, 512) * 10).requires_grad_()
    norm = nn.LayerNorm(512)

    def gradient(context: Any) -> Tensor:
        with context:
            loss = F.cross_entropy(x * 1, torch.arange(9))
        return torch.autograd.grad(loss, x)[0]

    assert torch.equal(gradient(save_in_int8(norm, min_numel=1)), gradient(torch.enable_grad()))
    count = Count(norm)
    with count:
        norm(x * 1).sum().backward()
    assert len(count.made) == 1  # the input; mean and deviation stay
    q = (torch.randn(1, 2, 16, 32) * 1).requires_grad_()
    count = Count(norm)
    with count:
        F.scaled_dot_product_attention(q * 1, q * 1, q * 1, is_causal=True).sum().backward()
    assert {tuple(c.codes.shape) for c in count.made.values()} == {(8, 128)}


def test_one_value_a_row_stays_exact() -> None:
    """Statistics of norms in PyTorch operations: in a block with those of other rows, small ones would become 0."""
    x = (torch.randn(64, 128) * torch.tensor([1e3, 1e-3]).repeat(32)[:, None]).requires_grad_()
    norms: dict[str, Callable[[Tensor], Tensor]] = {
        "normalize": lambda x: F.normalize(x, dim=1),
        "rms": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True)),
    }
    for name, norm in norms.items():
        found = []
        for context in (torch.enable_grad(), save_in_int8(NOTHING, min_numel=1)):
            with context:
                y = norm(x * 1)
            found.append(torch.autograd.grad(y[:, 0].sum(), x)[0])
        rows = (found[1] - found[0]).norm(dim=1) / found[0].norm(dim=1)
        assert 0 < rows.max() < 0.05, name


DIVIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "power": lambda x: x**-2,
    "root": lambda x: x**0.5,
    "power of a tensor": lambda x: x ** torch.full_like(x, -2.0),
    "quotient": lambda x: x.flip(0) / x,
    "number over it": lambda x: 3 / x,
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", DIVIDING)
def test_what_is_divided_by_stays_exact(name: str, compiled: bool) -> None:
    """Rounded, values of 0.001 beside 100 would lose all their digits."""
    x = torch.cat([torch.tensor([100.0]), torch.logspace(-3, 0, 255)]).bfloat16().requires_grad_()
    torch.compiler.reset()

    def function(x: Tensor) -> Tensor:
        return DIVIDING[name](x * 2)

    run: Any = torch.compile(function, backend="aot_eager", dynamic=False) if compiled else function
    (exact,) = torch.autograd.grad(run(x).sum(), x)
    with save_in_int8(NOTHING, min_numel=1):
        y = run(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert (found - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_is_exponentiated_stays_exact(compiled: bool) -> None:
    """Rounded, logits up to 60 would be off by 0.2."""
    torch.manual_seed(0)
    x = (torch.randn(16, 256) * 10).bfloat16().requires_grad_()
    torch.compiler.reset()

    def function(x: Tensor) -> Tensor:
        return (x * 2).float().logsumexp(-1) if compiled else (x * 2).logsumexp(-1)

    run: Any = torch.compile(function, backend="aot_eager", dynamic=False) if compiled else function
    (exact,) = torch.autograd.grad(run(x).sum(), x)
    with save_in_int8(NOTHING, min_numel=1):
        y = run(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert (found - exact).norm() < 0.005 * exact.norm()


def gradients(model: Llama, tokens: Tensor, context: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with context:
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _of(model: nn.Module, t: Tensor) -> bool:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return t.untyped_storage().data_ptr() in own


@pytest.mark.parametrize("kind", ["eager", "checkpoint", "reentrant", "keep_products"])
def test_a_llama(kind: str) -> None:
    """The loss keeps its bits, the gradients come within 3%, and every large activation is rounded."""
    torch.manual_seed(0)
    model = Llama(CONFIG).bfloat16()
    tokens = torch.randint(61, (4, 65))
    if kind == "keep_products":
        for block in model.blocks:
            block.recompute = True  # type: ignore[assignment]
    elif kind != "eager":
        for block in model.blocks:
            forward = block.forward
            reentrant = {"use_reentrant": kind == "reentrant"}
            block.forward = lambda *a, f=forward, r=reentrant: checkpoint(f, *a, **r)  # type: ignore[method-assign]
    loss, exact = gradients(model, tokens, torch.enable_grad())
    count = Count(model, min_numel=1024)
    other, rounded = gradients(model, tokens, count)
    assert torch.equal(loss, other) and exact.keys() == rounded.keys()
    for name, grad in exact.items():
        error = (rounded[name] - grad).double().norm() / grad.double().norm()
        assert 0 < error < 0.03, name
    sizes = sorted(codes.count for codes in count.made.values())
    if kind != "eager":  # two boundaries, the last norm, the head
        assert sizes == [4 * 64 * 128] * 5
    else:
        assert len(sizes) >= 2 * 12
        left = [t for t in count.kept if t.numel() >= 4 * 64 * 64 and not _of(model, t)]
        assert [t.dim() for t in left] == [4] * 4  # queries and keys


def test_low_bit_weights_and_float64_stay() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    lowbit.train.prepare_(model, lowbit.Int8Weight())
    x = torch.randn(5, 64, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    with save_in_int8(model, min_numel=1):
        y = model(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain)
    wide = torch.randn(40, dtype=torch.float64, requires_grad=True) * 1
    assert torch.equal(round_trip(wide.detach()), wide)


def test_changes_in_place() -> None:
    leaf, w = torch.randn(200).requires_grad_(), torch.randn(200).requires_grad_()
    x, before = leaf * 1, round_trip(leaf.detach())
    with save_in_int8(NOTHING, min_numel=1):
        y = x * w
        x.zero_()
        z = x * w  # another version: not the codes of y
    assert torch.equal(torch.autograd.grad(y.sum(), w, retain_graph=True)[0], before)
    assert torch.equal(torch.autograd.grad(z.sum(), w, retain_graph=True)[0], torch.zeros(200))
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(
        RuntimeError, match=r"shape \(200,\) that save_in_int8 kept .* at version 1.* version 0"
    ):
        torch.autograd.grad(y.sum(), leaf)
    sigmoid = nn.Sigmoid()
    with save_in_int8(NOTHING, min_numel=10**6):
        out = sigmoid(torch.randn(8, requires_grad=True))
        out.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


@only_new()
def test_what_stays_makes_no_circle() -> None:
    """A result that a node saves refers to the node: held by it, neither would be freed."""
    with save_in_int8(NOTHING, min_numel=10**6):
        out = torch.randn(8, requires_grad=True).exp()
    held = nn.Module()
    out.grad_fn.metadata["held"] = held  # type: ignore[union-attr]
    alive = weakref.ref(held)
    del out, held
    gc.collect(0)
    assert alive() is None


def test_double_backward_and_a_graph_used_twice() -> None:
    x = torch.randn(64, dtype=torch.float32).requires_grad_()

    def second(context: Any) -> Tensor:
        with context:
            hidden = (x * 1).sin()
            y = (hidden * hidden * hidden).sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            (again,) = torch.autograd.grad(y, x, create_graph=True)
        assert torch.equal(first, again)
        return torch.autograd.grad(first.square().sum(), x)[0]

    exact, rounded = second(torch.enable_grad()), second(save_in_int8(NOTHING, min_numel=1))
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.05


def test_lazy_and_sparse_parameters_are_passed_over() -> None:
    model = nn.Sequential(nn.LazyLinear(8))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with save_in_int8(model, min_numel=1):
        y = model(torch.randn(4, 5))
    y.sum().backward()
    assert model[0].weight.grad.shape == (8, 5)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"nn.Module whose parameters .* got Tensor"):
        save_in_int8(torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"min_numel must be an int, got 1\.5"):
        save_in_int8(NOTHING, min_numel=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        save_in_int8(NOTHING, min_numel=0)

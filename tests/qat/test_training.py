"""Training a prepared model: gradients, optimizers, and everything that a training loop does to weights."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit import qat
from tests.schemes import SCHEMES, over, relative_error

SOME = {
    "int4-g16": lb.Int4WeightOnly(16),
    "int4-g16-asymmetric": lb.Int4WeightOnly(16, "asymmetric"),
    "int8xint4": lb.Int8DynamicActivationInt4Weight(16),
    "int3": lb.IntxWeightOnly(3, 16),
    "float8": lb.Float8WeightOnly(),
}
INT4 = SOME["int4-g16"]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "AdamW4bit": lambda p: lb.optim.AdamW4bit(p, lr=3e-3),
    "AdamW8bit": lambda p: lb.optim.AdamW8bit(p, lr=3e-3),
}


class Net(nn.Module):
    """Tokens to classes, through an embedding and two layers wide enough for low-bit optimizer states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)
        self.head = nn.Linear(64, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.down(F.silu(self.up(x))))


def net(scheme: lb.Scheme = INT4, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net()
    qat.prepare_(model, scheme, lambda m, name: isinstance(m, nn.Linear | nn.Embedding))
    return model


def batch(seed: int = 0, size: int = 48) -> tuple[Tensor, Tensor]:
    """The class of a token is a fixed permutation of it, so a model can learn it exactly."""
    tokens = torch.randint(32, (size,), generator=torch.Generator().manual_seed(seed))
    return tokens, (tokens * 7 + 3) % 32


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    tokens, target = batch(seed)
    loss = F.cross_entropy(model(tokens), target)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.cover("values")
@over(SOME)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_loss_goes_down(name: str, scheme: lb.Scheme) -> None:
    model = net(scheme)
    before = {n: p.master().clone() for n, p in model.named_parameters() if p.ndim == 2}
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = [step(model, optimizer, i) for i in range(40)]
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5]), losses
    for n, p in model.named_parameters():
        if p.ndim == 2:
            assert isinstance(p, lb.FakeQuantizedTensor)
            assert (p.master() != before[n]).float().mean() > 0.9, n
    tokens, _ = batch(99)
    y = model(tokens)
    qat.convert_(model)
    assert relative_error(model(tokens), y) < 1e-5


def straight_through(weight: Tensor, spec: lb.Spec) -> Tensor:
    """Rounded values whose gradient, by autograd's own rules, is the identity inside the clamp range."""
    padded = F.pad(weight, (0, -weight.shape[1] % spec.block_size(weight.shape)[1]))
    blocks = padded.view(weight.shape[0], -1, spec.block_size(weight.shape)[1])
    codes, scale, zero_point = spec.quantize(weight.detach(), weight.dtype)
    zero_point = torch.zeros_like(scale) if zero_point is None else zero_point
    del codes
    grid = blocks * (1 / scale[..., None]) + zero_point[..., None]
    grid = grid + (grid.round() - grid).detach()
    low, high = spec.format.quant_min, spec.format.quant_max
    values = (grid.clamp(low, high) - zero_point[..., None]) * scale[..., None]
    return values.reshape(weight.shape[0], -1)[:, : weight.shape[1]]


@pytest.mark.parametrize("mapping", ["symmetric", "symmetric_no_clipping_err", "asymmetric"])
@pytest.mark.parametrize("k", [64, 67])
def test_gradients_are_straight_through(mapping, k: int) -> None:
    """By name, against the formula written with autograd; the symmetric mapping clips some positive ends."""
    scheme = lb.Int4WeightOnly(16, mapping)
    weight, bias, x = torch.randn(24, k), torch.randn(24), torch.randn(9, k)
    linear = nn.Linear(k, 24)
    linear.weight.data, linear.bias.data = weight.clone(), bias.clone()
    qat.prepare_(linear, scheme)
    names = ("x", "weight", "bias")
    leaves = {n: t.clone().requires_grad_() for n, t in zip(names, (x, weight, bias), strict=True)}
    seen = straight_through(leaves["weight"], scheme.weight)
    upstream = torch.randn(9, 24)
    F.linear(leaves["x"], seen, leaves["bias"]).backward(upstream)
    own = x.clone().requires_grad_()
    linear(own).backward(upstream)
    found = {"x": own.grad, "weight": linear.weight.grad, "bias": linear.bias.grad}
    for name in names:
        assert type(found[name]) is Tensor, name
        assert relative_error(found[name], leaves[name].grad) < 1e-5, name
    clipped = (leaves["weight"].grad == 0).float().mean()
    assert (clipped > 0.001) == (mapping == "symmetric"), clipped


def test_gradients_of_quantized_activations() -> None:
    """Symmetric token scales clip nothing: the input's gradient is that of the rounded weight."""
    scheme = lb.Int8DynamicActivationInt4Weight(16)
    linear = nn.Linear(64, 24)
    qat.prepare_(linear, scheme)
    x, upstream = torch.randn(9, 64, requires_grad=True), torch.randn(9, 24)
    linear(x).backward(upstream)
    assert relative_error(x.grad, upstream @ linear.weight.dequantize()) < 1e-5
    plain = F.linear(x.detach(), linear.weight.dequantize(), linear.bias)
    assert 0 < relative_error(linear(x), plain) < 0.03


def test_regularisers_see_the_high_precision_weight() -> None:
    linear = nn.Linear(32, 8)
    qat.prepare_(linear, INT4)
    master = linear.weight.master()
    (linear.weight**2).sum().backward()
    assert torch.allclose(linear.weight.grad, 2 * master)
    assert torch.allclose(linear.weight.norm(), master.norm())
    assert torch.allclose(linear.weight.abs().mean(), master.abs().mean())


@over(SOME)
def test_clipping_gradients(scheme: lb.Scheme) -> None:
    model = net(scheme)
    tokens, target = batch()
    (100 * F.cross_entropy(model(tokens), target)).backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert torch.allclose(norm, grads.norm(), rtol=1e-5)
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(clipped, grads / norm, rtol=1e-4, atol=1e-7)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    assert max(p.grad.abs().max() for p in model.parameters()) <= 1e-3


def test_weight_decay_acts_on_the_high_precision_weight() -> None:
    model = net()
    before = {n: p.master().clone() for n, p in model.named_parameters() if p.ndim == 2}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.zeros(p.shape)
    optimizer.step()
    for n, old in before.items():
        assert torch.allclose(model.get_parameter(n).master(), old * 0.95)


@over(SOME)
def test_accumulating_gradients(scheme: lb.Scheme) -> None:
    tokens, target = batch(size=32)
    whole, parts = net(scheme), net(scheme)
    F.cross_entropy(whole(tokens), target).backward()
    for i in range(0, 32, 8):
        (F.cross_entropy(parts(tokens[i : i + 8]), target[i : i + 8]) / 4).backward()
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert relative_error(b.grad, a.grad) < 1e-4, name


def test_frozen_weights_stay() -> None:
    torch.manual_seed(0)
    model = Net()
    model.up.weight.requires_grad_(False)
    qat.prepare_(model, INT4)
    assert isinstance(model.up.weight, lb.FakeQuantizedTensor)
    assert not model.up.weight.requires_grad and model.down.weight.requires_grad
    before = model.up.weight.master().clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step(model, optimizer, 0)
    assert model.up.weight.grad is None and torch.equal(model.up.weight.master(), before)
    model.requires_grad_(False)
    assert not model(batch()[0]).requires_grad
    model.requires_grad_(True)
    model(batch()[0]).sum().backward()
    assert model.up.weight.grad is not None
    assert len(qat.convert_(model).converted) == 3


@over(SOME)
def test_a_deep_copy_trains_on_its_own(scheme: lb.Scheme) -> None:
    model = net(scheme)
    copied = copy.deepcopy(model)
    tokens, _ = batch()
    y = model(tokens).detach()
    step(copied, torch.optim.SGD(copied.parameters(), lr=0.1), 0)
    assert torch.equal(model(tokens), y) and not torch.equal(copied(tokens), y)


@pytest.mark.parametrize("way", [{"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_gives_the_same_each_way(kind, way) -> None:
    """On lists of weights and fused, as trainers ask for."""
    models = [net(), net()]
    for model, options in zip(models, [{"foreach": False}, way], strict=True):
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1, **options)
        torch.manual_seed(5)
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn(p.shape)
            optimizer.step()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        a, b = (p.master() if isinstance(p, lb.LowbitTensor) else p for p in (a, b))
        assert relative_error(b, a) < 1e-5, name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"avg_fn": torch.optim.swa_utils.get_ema_avg_fn(0.75)},
        {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)},
    ],
    ids=["mean", "ema", "ema-foreach"],
)
def test_averages_of_weights(options) -> None:
    """They average the high-precision weights."""
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = None
    for i in range(3):
        step(model, optimizer, i)
        average.update_parameters(model)
        weight = model.up.weight.master()
        share = 0.25 if options else 1 / (i + 1)
        expected = weight.clone() if expected is None else expected.lerp(weight, share)
    assert relative_error(average.module.up.weight.master(), expected) < 1e-6
    average.module.up(torch.randn(2, 64))
    qat.convert_(average.module)


@over(SOME)
@pytest.mark.parametrize("name", ["AdamW", "AdamW4bit", "SGD-momentum"])
def test_resuming_is_exact(name: str, scheme: lb.Scheme) -> None:
    model = net(scheme)
    optimizer = OPTIMIZERS[name](model.parameters())
    for i in range(3):
        step(model, optimizer, i)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    expected = [step(model, optimizer, i) for i in range(3, 6)]

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    for assign in (False, True):
        resumed = net(scheme, seed=1)
        resumed.load_state_dict(saved["model"], assign=assign)
        assert isinstance(resumed.up.weight, lb.FakeQuantizedTensor)
        assert resumed.up.weight.requires_grad
        again = OPTIMIZERS[name](resumed.parameters())
        again.load_state_dict(copy.deepcopy(saved["optimizer"]))
        resumed_losses = [step(resumed, again, i) for i in range(3, 6)]
        assert resumed_losses == expected
        for (n, a), b in zip(model.named_parameters(), resumed.parameters(), strict=True):
            assert torch.equal(a, b), n
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)


def test_a_checkpoint_of_the_plain_model_continues_in_a_prepared_one() -> None:
    torch.manual_seed(3)
    plain = Net()
    model = net()
    model.load_state_dict(plain.state_dict())
    assert isinstance(model.up.weight, lb.FakeQuantizedTensor)
    assert torch.equal(model.up.weight.master(), plain.up.weight)
    qat.prepare_(plain, INT4, lambda m, name: isinstance(m, nn.Linear | nn.Embedding))
    tokens, _ = batch()
    assert torch.equal(model(tokens), plain(tokens))


@over({**SOME, "int8xint8": SCHEMES["int8xint8"]})
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(scheme: lb.Scheme, reentrant: bool) -> None:
    model, same = net(scheme), net(scheme)
    tokens, target = batch()
    F.cross_entropy(model(tokens), target).backward()
    x = same.embedding(tokens)
    y = checkpoint(
        lambda v: same.head(v + same.down(F.silu(same.up(v)))), x, use_reentrant=reentrant
    )
    F.cross_entropy(y, target).backward()
    for (name, a), b in zip(model.named_parameters(), same.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


@over(SOME)
def test_autocast_and_a_loss_scale(scheme: lb.Scheme) -> None:
    model = net(scheme)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    losses = []
    for i in range(25):
        tokens, target = batch(i)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(tokens), target)
        scaler.scale(loss).backward()
        assert model.up.weight.grad.dtype is torch.float32
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_bfloat16_weights_train() -> None:
    torch.manual_seed(0)
    model = Net().bfloat16()
    qat.prepare_(model, INT4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer, i) for i in range(40)]
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    assert model.up.weight.grad is None and model.up.weight.master().dtype is torch.bfloat16


def test_fine_tuning_recovers_what_rounding_lost() -> None:
    """3-bit weights after QAT fit better than 3-bit weights rounded after training."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for i in range(150):
        step(model, optimizer, i)
    scheme = lb.IntxWeightOnly(2, 32)
    tokens, target = batch(999, size=256)

    def loss(m: nn.Module) -> float:
        with torch.no_grad():
            return F.cross_entropy(m(tokens), target).item()

    rounded_after = copy.deepcopy(model)
    lb.quantize_(rounded_after, scheme)
    qat.prepare_(model, scheme)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(60):
        step(model, optimizer, i)
    qat.convert_(model)
    assert loss(model) < 0.5 * loss(rounded_after)

"""`invariant_` of a plain decoder: batch, padding, chunks, training, tensor parallelism, and what it refuses."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import lowbit
from lowbit import Int8DynamicActivationInt8Weight
from lowbit.inference import invariant_, invariant_attention
from lowbit.testing.launch import launch
from tests.schemes import relative_error

WIDTH, HEAD, VOCABULARY = 64, 16, 37


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2, bias), nn.Linear(WIDTH, WIDTH // 2, bias)
        self.gate, self.up = nn.Linear(WIDTH, 96, bias), nn.Linear(WIDTH, 96, bias)
        self.down, self.act = nn.Linear(96, WIDTH, bias), nn.SiLU()
        self.attend: Any = invariant_attention

    def forward(self, x: Tensor, mask: Tensor, cache: list[Tensor] | None) -> Tensor:
        y = self.before(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        if cache is not None:
            k, v = (torch.cat([old, new], 2) for old, new in zip(cache, (k, v), strict=True))
            cache[:] = k, v
        x = x + self.o(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))
        y = self.after(x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A decoder without positions, of modules that `invariant_` knows."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(bias) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, VOCABULARY, False)

    def forward(self, ids: Tensor, seen: Tensor | None = None, caches: Any = None) -> Tensor:
        """Logits; `seen`: bool [B, all tokens so far], False for padding."""
        past = 0 if caches is None else caches[0][0].shape[2]
        mask = torch.ones(ids.shape[1], past + ids.shape[1], dtype=torch.bool).tril(past)[
            None, None
        ]
        mask = mask if seen is None else mask & seen[:, None, None]
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x = block(x, mask, None if caches is None else caches[number])
        return self.head(self.norm(x))


def decoder(dtype: torch.dtype = torch.float32, bias: bool = True) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(bias).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def frozen(dtype: torch.dtype, bias: bool = True) -> Decoder:
    model = decoder(dtype, bias).eval()
    lowbit.quantize_(model, Int8DynamicActivationInt8Weight())
    invariant_(model, torch.zeros(1, 3, dtype=torch.long))
    return model


MODELS = {dtype: frozen(dtype) for dtype in (torch.float32, torch.bfloat16)}


def chunked(model: Decoder, ids: Tensor, seen: Tensor, cuts: list[int]) -> Tensor:
    empty = torch.empty(len(ids), WIDTH // 2 // HEAD, 0, HEAD, dtype=model.norm.weight.dtype)
    caches, found = [[empty, empty] for _ in model.blocks], []
    for begin, end in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        found.append(model(ids[:, begin:end], seen[:, :end], caches))
    return torch.cat(found, 1)


@settings(max_examples=20, deadline=None)
@given(st.data())
@torch.no_grad()
def test_batch_padding_and_chunks_leave_no_trace(data: st.DataObject) -> None:
    model = MODELS[data.draw(st.sampled_from([*MODELS]))]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    length, others = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 3))
    left, right = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
    width = left + length + right
    own = torch.randint(0, VOCABULARY, (1, length))
    alone = model(own)
    ids = torch.randint(0, VOCABULARY, (others + 1, width))
    ids[-1:, left : left + length] = own
    seen = torch.rand(others + 1, width) > 0.2
    seen[-1] = False
    seen[-1, left : left + length] = True
    cuts = sorted(data.draw(st.sets(st.integers(1, width - 1), max_size=4)) if width > 1 else [])
    found = chunked(model, ids, seen, cuts)
    assert torch.equal(found[-1:, left : left + length], alone)


@torch.no_grad()
def test_the_error_is_that_of_int8() -> None:
    ids = torch.randint(0, VOCABULARY, (2, 30))
    for dtype, model in MODELS.items():
        plain = decoder(dtype)
        for block in plain.blocks:
            block.attend = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
        exact = copy.deepcopy(plain).double()(ids)
        ordinary = copy.deepcopy(plain)
        lowbit.quantize_(ordinary, Int8DynamicActivationInt8Weight())
        errors = [relative_error(m(ids), exact) for m in (ordinary, model)]
        assert 0.001 < errors[1] < 1.2 * errors[0] < 0.1, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_has_the_same_bits_and_the_usual_gradients(dtype: torch.dtype) -> None:
    ids = torch.randint(0, VOCABULARY, (3, 12))
    models = {name: decoder(dtype) for name in ("invariant", "usual")}
    grads = {}
    for name, model in models.items():
        lowbit.qat.prepare_(model, Int8DynamicActivationInt8Weight())
        if name == "invariant":
            invariant_(model, ids[:1])
        logits = model(ids)
        logits.float().log_softmax(-1)[..., 0].sum().backward()
        grads[name] = {key: p.grad.clone() for key, p in model.named_parameters()}
        if name == "invariant":
            assert all(module.training for module in model.modules())
            assert torch.equal(model(ids[1:2]), logits[1:2])
            lowbit.qat.convert_(model)
            assert torch.equal(model(ids), logits)  # the mode stays
            assert torch.equal(MODELS[dtype](ids), logits)  # quantize_ and invariant_
    for key, grad in grads["usual"].items():
        # a bias of keys moves all scores of a query alike: its gradient is rounding
        assert (grads["invariant"][key] - grad).norm() <= 0.1 * grad.norm() + 1e-4, key


def test_gradients_reach_the_inputs_of_frozen_layers() -> None:
    layer = MODELS[torch.float32].blocks[0].gate
    x = torch.randn(3, WIDTH, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).sum(), x)
    weight = layer.weight.dequantize()
    assert relative_error(grad, weight.sum(0).expand(3, -1)) < 1e-6


class Other(nn.Module):
    """A linear, an activation and an operation."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.act, self.function = nn.Linear(64, 64), nn.SiLU(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.act(self.first(x)))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (F.silu, r"the model \(Other\) calls aten.silu, .*; call a module nn.SiLU"),
        (lambda x: x @ x.T, r"calls aten.mm, .*quantize this layer too"),
        (lambda x: x.softmax(-1), r"calls aten._softmax, .*lowbit.inference.invariant_attention"),
        (lambda x: x.mean(-1), r"calls aten.mean, .*nn.RMSNorm"),
        (torch.cumsum, "TypeError"),
        (lambda x: x.sqrt(), r"calls aten.sqrt, .*leave invariant_ out"),
        (nn.LayerNorm(64), r"function \(LayerNorm\) calls aten.native_layer_norm"),
    ],
    ids=["silu", "mm", "softmax", "mean", "error", "sqrt", "layer-norm"],
)
def test_operations_without_a_fixed_order_are_refused_by_name(function: Any, message: str) -> None:
    model = Other(function)
    lowbit.quantize_(model, Int8DynamicActivationInt8Weight())
    before = [(type(module), {*vars(module)}) for module in model.modules()]
    error: Any = NotImplementedError
    if message == "TypeError":
        error, message = TypeError, ""
    with pytest.raises(error, match=message):
        invariant_(model, torch.randn(2, 64))
    assert [(type(module), {*vars(module)}) for module in model.modules()] == before


def test_linears_that_are_not_int8_are_refused_by_name() -> None:
    for scheme in (None, lowbit.Int8WeightOnly(), lowbit.Int8DynamicActivationInt4Weight()):
        model = decoder()
        lowbit.quantize_(model, {"head": scheme, "*": Int8DynamicActivationInt8Weight()})
        with pytest.raises(NotImplementedError, match=r"^head: its .*the head included"):
            invariant_(model, torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(TypeError, match="invariant_ of a Linear needs a batch"):
        model = nn.Linear(64, 64)
        lowbit.quantize_(model, Int8DynamicActivationInt8Weight())
        invariant_(model)
    with pytest.raises(TypeError, match=r"model must be an nn.Module"):
        invariant_(torch.zeros(2))  # type: ignore[arg-type]


def test_rounding_that_is_switched_off_is_refused() -> None:
    model = decoder()
    lowbit.qat.prepare_(model, Int8DynamicActivationInt8Weight())
    ids = torch.zeros(1, 3, dtype=torch.long)
    invariant_(model, ids)
    lowbit.qat.enable_(model, False)
    with pytest.raises(NotImplementedError, match=r"rounding is off.*lowbit.qat.enable_"):
        model(ids)


def test_norms_of_other_forms_are_left_to_the_watch() -> None:
    class Mean(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.amax(-1, keepdim=True))

    model = nn.Sequential(nn.Linear(64, 64), Mean(64, eps=1e-5))
    lowbit.quantize_(model, Int8DynamicActivationInt8Weight())
    with pytest.raises(NotImplementedError, match=r"1 \(Mean\) calls aten"):
        invariant_(model, torch.randn(2, 64))


def test_copies_and_pickles_keep_the_mode() -> None:
    model = MODELS[torch.float32]
    ids = torch.randint(0, VOCABULARY, (2, 5))
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(ids), model(ids)) and torch.equal(again(ids[:1]), again(ids)[:1])


def check_widths(rank: int, world_size: int) -> bool:
    """Split by columns and by rows, the layers have the bits of one process. Each has one head of keys."""
    globals()["WIDTH"] = 2 * HEAD * world_size
    mesh = init_device_mesh("cpu", (world_size,))
    for seed in range(4):
        dtype = (torch.float32, torch.bfloat16)[seed // 2]
        torch.manual_seed(seed)
        whole = frozen(dtype, bias=seed % 2 == 0)
        ids = torch.randint(0, VOCABULARY, (seed + 1, 3 + 5 * seed))
        with torch.no_grad():
            wanted = whole(ids)
            split = copy.deepcopy(whole)
            plan: dict[str, Any] = {}
            for i in (0, 1):
                columns, rows = ("q", "k", "v", "gate", "up"), ("o", "down")
                plan |= {f"blocks.{i}.{n}": ColwiseParallel() for n in columns}
                plan |= {f"blocks.{i}.{n}": RowwiseParallel() for n in rows}
            parallelize_module(split, mesh, plan)
            assert torch.equal(split(ids), wanted), (dtype, seed)
            assert torch.equal(split(ids[:1, :2]), wanted[:1, :2]), (dtype, seed)
    with pytest.raises(NotImplementedError, match="tensor parallelism has no gradients"):
        split(ids)
        x = torch.randn(2, WIDTH, requires_grad=True, dtype=dtype)
        split.blocks[0].q(x)
    return True


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_widths_of_tensor_parallelism_have_the_same_bits(ranks: int) -> None:
    assert launch(check_widths, ranks) == [True] * ranks


def printed_logits(threads: str) -> None:
    """Print digests of logits. PyTorch draws other random numbers with other instructions, so weights count up."""
    torch.set_num_threads(int(threads))
    for dtype in (torch.float32, torch.bfloat16):
        model = decoder(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                steps = torch.arange(parameter.numel()).view(parameter.shape) * 7919 % 1009 - 504
                parameter.copy_(steps / 2048 if parameter.ndim > 1 else steps / 2048 + 1)
        lowbit.quantize_(model, Int8DynamicActivationInt8Weight())
        invariant_(model, torch.zeros(1, 3, dtype=torch.long))
        with torch.no_grad():
            logits = model(torch.arange(60).view(4, 15) % VOCABULARY).float()
        print("logits", hashlib.sha256(logits.numpy().tobytes()).hexdigest())


@pytest.mark.exhaustive
def test_instruction_sets_and_threads_have_the_same_bits() -> None:
    """PyTorch without AVX, and with it, in one thread and in two."""
    found = set()
    for capability, threads in (("default", "1"), ("avx2", "2"), ("", "1")):
        own = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        own = own if capability else {k: v for k, v in own.items() if k != "ATEN_CPU_CAPABILITY"}
        program = f"from tests.inference.test_invariant import printed_logits as p; p({threads!r})"
        done = subprocess.run(
            [sys.executable, "-c", program], env=own, capture_output=True, text=True, check=True
        )
        found.add(tuple(re.findall(r"logits \w+", done.stdout)))
    assert len(found) == 1 and len(found.pop()) == 2


def test_scale_of_attention() -> None:
    q, k, v = (torch.randn(1, 2, 4, 16) for _ in range(3))
    y = invariant_attention(q, k, v, is_causal=True)
    assert torch.equal(y, invariant_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(16)))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert y.shape == wanted.shape and relative_error(y, wanted) < 0.02

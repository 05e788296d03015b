"""Selective checkpointing that keeps products: the same bits, fewer bytes, no product twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit import Float8MixedPrecision, Int8MixedPrecision, train
from recipes.llama import Llama, LlamaConfig
from tests.scaled_products import scaled_products

CONFIG = LlamaConfig(61, dim=64, layers=1, heads=4, kv_heads=2, hidden=96, context=16)
SCHEMES: dict[str, Any] = {
    "plain": None,
    "int8": Int8MixedPrecision(always=True),
    "float8": Float8MixedPrecision(always=True),
}


def model_of(scheme: Any, recompute: bool, compiled: bool) -> Llama:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Llama(replace(CONFIG, recompute=recompute))
    if scheme is not None:
        train.prepare_(model, scheme)
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager_decomp_partition", dynamic=False)
    return model


def loss_and_gradients(model: Llama) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


@pytest.mark.parametrize(
    "name,compiled", [("plain", False), ("int8", False), ("float8", False), ("int8", True)]
)
def test_the_same_bits_and_no_product_twice(name: str, compiled: bool) -> None:
    found = []
    for recompute in (False, True):
        model = model_of(SCHEMES[name], recompute, compiled)
        with scaled_products() as calls:
            found.append((*loss_and_gradients(model), sum(calls.values())))
    (loss, grads, products), (other_loss, other_grads, other_products) = found
    assert torch.equal(loss, other_loss) and grads.keys() == other_grads.keys()
    assert len(grads) == 9 + 2
    for key, grad in grads.items():
        assert torch.equal(grad, other_grads[key]), key
    assert products == other_products == (0 if name == "plain" else 3 * (7 + 1))


@pytest.mark.parametrize("name", ["plain", "float8"])
def test_a_compiled_block_keeps_no_codes(name: str) -> None:
    """Bytes a token that one block keeps, beside weights and angles: float32 products, codes of one byte."""
    kept: list[dict[torch.dtype, int]] = []
    for recompute in (False, True):
        model = model_of(SCHEMES[name], recompute, compiled=True)
        own = {p.data_ptr() for p in model.parameters() if type(p) is torch.nn.Parameter}
        sizes: dict[torch.dtype, int] = {}

        def pack(t: Tensor, own: set[int] = own, sizes: dict[torch.dtype, int] = sizes) -> Tensor:
            if t.dim() > 2 or t.shape[0] == 32 or t.dtype.itemsize == 1:
                sizes[t.dtype] = sizes.get(t.dtype, 0) + t.nbytes
            return t

        x = torch.randn(2, 16, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = model.blocks[0](x, model.cos[:16], model.sin[:16], None, 0)
        y.sum().backward()
        kept.append(sizes)
    one_byte = [sum(n for d, n in sizes.items() if d.itemsize == 1) for sizes in kept]
    codes = 0 if name == "plain" else 32 * (3 * 64 + 96)
    assert one_byte == [codes, 0]
    if name == "plain":  # norms and the SwiGLU's product are kept without checkpointing
        assert kept[0][torch.float32] - kept[1][torch.float32] >= 32 * 4 * (64 + 96)


def test_only_training_without_a_cache_recomputes() -> None:
    model = model_of(None, recompute=True, compiled=False)
    model.eval()
    assert model(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()
    prompt = torch.zeros(1, 3, dtype=torch.long)
    assert model.train().generate(prompt, 2, temperature=0.0).shape == (1, 5)

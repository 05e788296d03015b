"""qat.freeze_codes_: scales train alone, and the codes of the weights stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit import qat
from lowbit.numerics.learned_scales import (
    learned_fake_quantize,
    parameters_for,
    qparams,
    rate_of,
)
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.trained.learned_scales import LearnedScales
from tests.qat.test_learned_scales import CHOSEN, SPECS, model, moved, tokens, values


@pytest.mark.parametrize("name", [n for n in SPECS if not n.startswith("e5m2")])
def test_gradient_of_scales_of_constant_codes(name) -> None:
    """Against float64 with the codes as constants, for a weight of values of the grid."""
    spec = SPECS[name]
    w, grad = values(8, 64, seed=3), values(8, 64, seed=4)
    parameters = parameters_for(w, spec, torch.float32)
    w = learned_fake_quantize(w, *parameters, spec)
    scale, zero = (None if p is None else p.clone().requires_grad_() for p in parameters)
    assert scale is not None
    learned_fake_quantize(w, scale, zero, spec, constant_codes=True).backward(grad)
    codes, found, point = spec.quantize(w, qparams=qparams(spec, scale, zero))
    codes, grad = codes.double(), grad.double()
    if spec.mapping == "float_zero_point":
        steps = codes - 2 ** (spec.format.bits - 1) * (not spec.format.signed)
    elif spec.mapping == "half_integer":  # z is half a scale, so that steps count from the middle
        steps = codes + 0.5
    else:
        block = spec.block_size(w.shape)
        spread = torch.zeros_like(found) if point is None else point
        steps = codes - spread.double().repeat_interleave(block[0], 0).repeat_interleave(
            block[1], 1
        )
    rows, columns = found.shape
    blocks = (grad * steps).view(rows, 8 // rows, columns, 64 // columns)
    torch.testing.assert_close(
        scale.grad.double(), blocks.sum((1, 3)) * rate_of(spec), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_outputs_stay_and_only_scales_train(tied) -> None:
    found = model(tied)
    qat.prepare_(found, lb.IntxWeightOnly(3, 32), CHOSEN, scales="learned")
    before = found(tokens()).detach()
    scales = qat.freeze_codes_(found)
    assert torch.equal(found(tokens()), before)
    assert len(scales) == (3 if tied else 4)
    assert {n for n, p in found.named_parameters() if p.requires_grad} == {
        n for n, _ in found.named_parameters() if n.endswith("weight_scale")
    }
    state = {n: t.clone() for n, t in found.state_dict().items()}
    start = converted(found)
    optimizer, losses = torch.optim.AdamW(scales, lr=3e-4, weight_decay=0.0), []
    for _ in range(20):
        loss = (found(tokens()) - 0.1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    changed = {n for n, t in found.state_dict().items() if not torch.equal(t, state[n])}
    assert all(n.endswith("weight_scale") for n in changed) and len(changed) >= 3
    # a group of one value near zero has a scale so small that the steps of the others move it far
    same = [(a == b).float().mean() for a, b in zip(start, converted(found), strict=True)]
    assert min(same) > 0.99


def converted(found: nn.Module) -> list[torch.Tensor]:
    """The codes of the converted model."""
    made = copy.deepcopy(found)
    qat.convert_(made)
    return [p.codes for p in made.parameters() if isinstance(p, lb.AffineTensor)]


def test_errors() -> None:
    found = model()
    with pytest.raises(ValueError, match="has no learned scales"):
        qat.freeze_codes_(found)
    spec, dtype = SPECS["int8-asymmetric"], torch.bfloat16
    found = nn.Sequential(nn.Linear(96, 24, dtype=dtype))
    with torch.no_grad():
        found[0].weight.copy_(values(24, 96, seed=30, dtype=dtype))
    qat.prepare_(found, Scheme(spec), scales="learned")
    learned = moved(parameters_for(values(24, 96, seed=30, dtype=dtype), spec, dtype), 30)
    found[0].weight.quantizer = LearnedScales(absolute=True)
    with torch.no_grad():
        found[0].weight_scale.copy_(learned[0])
        found[0].weight_zero.copy_(learned[1])
    before = {n: t.clone() for n, t in found.state_dict().items()}
    with pytest.raises(ValueError, match="would change codes of Int"):
        qat.freeze_codes_(found)
    assert all(torch.equal(t, before[n]) for n, t in found.state_dict().items())
    assert all(p.requires_grad for p in found.parameters())

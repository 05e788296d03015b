"""Assignments that could only be lost, or mislead, are refused by name."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import lowbit
from lowbit import AffineTensor, FakeQuantizedTensor, Int4WeightOnly, quantize_affine
from lowbit.tensor import joined

SCHEME = Int4WeightOnly(group_size=16)


def test_a_trained_weight_takes_no_data_of_another_shape() -> None:
    layer = nn.Linear(32, 8)
    layer.weight = nn.Parameter(FakeQuantizedTensor(torch.randn(8, 32), SCHEME))
    before = layer.weight.dequantize()
    with pytest.raises(NotImplementedError, match=r"resize a model.*before it is prepared"):
        layer.weight.data = torch.zeros(9, 32)
    assert torch.equal(layer.weight.dequantize(), before)


def test_products_take_no_out() -> None:
    """As a fused loss asks for that multiplies by the weight of the head in a function of its own."""
    layer = nn.Sequential(nn.Linear(32, 8, bias=False))
    lowbit.train.prepare_(layer, lowbit.Int8Weight())
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match="does not support mm with out=; leave this"),
    ):
        torch.mm(torch.randn(2, 32), layer[0].weight.t(), out=torch.empty(2, 8))


def test_codes_take_no_gradient() -> None:
    weight = nn.Parameter(AffineTensor.from_float(torch.randn(8, 32), SCHEME), requires_grad=False)
    with pytest.warns(
        UserWarning, match=r"leaves AffineTensor frozen.*lowbit\.dequantize_\(module\)"
    ):
        assert not weight.requires_grad_().requires_grad
    with pytest.raises(NotImplementedError, match=r"codes have no gradient.*dequantize_\(module\)"):
        weight.requires_grad = True


def test_no_warning_without_a_request_for_gradients() -> None:
    """Only requires_grad=True on a frozen weight warns, once for a model."""
    model = nn.Sequential(*(nn.Linear(32, 8) for _ in range(20)))
    lowbit.quantize_(model, SCHEME)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.requires_grad_(False)
        model[0].weight.requires_grad = False
        model.eval().bfloat16().float()
        fresh = nn.Sequential(*(nn.Linear(32, 8) for _ in range(20)))
        fresh.load_state_dict(joined(model.state_dict()), assign=True)
        copy.deepcopy(model).load_state_dict(model.state_dict())
        lowbit.optim.AdamW8bit(
            [p for p in model.parameters() if p.requires_grad] or [fresh[0].bias]
        )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        model.requires_grad_(True)
    assert len(said) == 1 and not model[0].weight.requires_grad and model[0].bias.requires_grad


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_no_low_bit_tensor_of_integers(dtype: torch.dtype) -> None:
    weight = AffineTensor.from_float(torch.randn(8, 32), SCHEME)
    made = torch.zeros_like(weight, dtype=dtype)
    assert type(made) is torch.Tensor and made.dtype is dtype and not made.any()


def test_int32_does_not_wrap() -> None:
    x = torch.tensor([1e10, -1e10, 5.0])
    codes = quantize_affine(x, (3,), torch.ones(()), None, torch.int32)
    assert codes.tolist() == [2**31 - 1, -(2**31), 5]


@pytest.mark.parametrize("part", ["scale", "codes"])
def test_a_checkpoint_with_a_part_of_another_dtype(tmp_path, part: str) -> None:
    tensors, info = lowbit.checkpoint.to_plain(
        {"w": AffineTensor.from_float(torch.randn(8, 32), SCHEME)}
    )
    tensors[f"w.{part}"] = tensors[f"w.{part}"].to(torch.int32)
    with pytest.raises(lowbit.CheckpointError, match=rf"w.*{part}.*int32"):
        lowbit.checkpoint.from_plain(tensors, info)


def test_the_compilers_cache_tells_shapes_apart() -> None:
    """Keyed by the metadata alone, a graph compiled for one shape was taken from disk for another."""
    keys = {
        AffineTensor.from_float(torch.randn(shape), SCHEME)._stable_hash_for_caching()
        for shape in [(8, 32), (16, 32), (8, 64)]
    }
    assert len(keys) == 3

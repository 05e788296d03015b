"""One weight through a format and back, for the tests of formats of other programs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit import AffineTensor
from lowbit.formats.base import Format
from lowbit.formats.registry import FORMATS
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor

NAME = "layers.0.up_proj.weight"


def weight(scheme: Scheme, rows: int = 64, columns: int = 128, **options: object) -> AffineTensor:
    torch.manual_seed(0)
    values = torch.randn(rows, columns, dtype=torch.bfloat16) * 0.1
    return AffineTensor.from_float(values, scheme, **options)


def through(format: Format, w: LowbitTensor) -> LowbitTensor:
    """`w` encoded, and decoded again by the configuration of a model with one plain linear."""
    parts = format.encode(w)
    assert all(type(t) is Tensor and t.is_contiguous() for t in parts.values())
    config = format.config({NAME: w}, {"lm_head"})
    assert [f for f in FORMATS if f.reads(config)] == [format]
    config = format.settings(config, format.metadata({NAME: w}, {"lm_head.weight"}))
    stored = {format.stored_name(NAME, part): t for part, t in parts.items()}
    found = format.find([*stored, "lm_head.weight"], config)
    assert found.keys() == {NAME}
    parts = {part: stored[name] for part, name in found[NAME].items()}
    return format.read(parts, config, NAME, w.dtype)


def assert_same(a: LowbitTensor, b: LowbitTensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(a.dequantize().view(torch.uint8), b.dequantize().view(torch.uint8))


def assert_same_model(found: nn.Module, model: nn.Module) -> None:
    own = dict(found.named_parameters())
    for name, t in model.named_parameters():
        if isinstance(t, LowbitTensor):
            assert isinstance(own[name], type(t)), name
            assert own[name].activation == t.activation, name
            assert_same(own[name], t)
        else:
            assert torch.equal(own[name], t), name

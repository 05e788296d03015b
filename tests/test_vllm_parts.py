"""The layout of a weight's parts in vLLM, without vLLM: cut and merged as the layout says, they give the same values.

`tests/integrations/test_vllm.py` does the same by vLLM's own classes, where they import.
"""

from __future__ import annotations

import logging.handlers
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit as lb
from lowbit.interop.vllm.parts import LayerWeight, PartLayout, Stored
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from tests.tensor.cases import same_bits, values

SCHEMES = {
    "int4": lb.Int4WeightOnly(32),
    "int4 asymmetric": lb.Int4WeightOnly(32, "asymmetric"),
    "int4 float zeros": lb.Int4WeightOnly(32, "float_zero_point"),
    "int3": lb.IntxWeightOnly(3, 32),
    "int5 rows": lb.IntxWeightOnly(5),
    "int8": lb.Int8WeightOnly(),
    "int8 tensor": lb.Scheme(lb.Spec(lb.Int(8), lb.PerTensor())),
    "float8 blocks": lb.Float8WeightOnly(lb.PerBlock(8, 32)),
    "nf4 double": lb.NF4WeightOnly(32, double_quantization=True),
    "mxfp4": lb.MXFP4WeightOnly(),
    "nvfp4": lb.NVFP4WeightOnly(),
}
OUTPUTS, INPUTS = (48, 16, 32), 128
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def stored_as(weight: AffineTensor) -> Stored:
    return Stored(type(weight), weight.meta(), weight.dtype)


def cut(
    part: PartLayout, tensors: list[Tensor], rows: tuple[int, ...], inputs: bool, rank: int
) -> Tensor:
    """The parameter of one of two processes, filled from the parts of each merged layer. `inputs`: cut along them."""
    if part.per_layer:
        return torch.cat(tensors).view(part.shape).to(part.dtype)
    found = []
    for t, n in zip(tensors, rows, strict=True):
        if inputs:
            found.append(t.chunk(2, 1)[rank] if part.cuts_inputs else t)
        else:
            own = -(-n // part.rows)
            found.append(t[rank * own : (rank + 1) * own])
    return torch.cat(found).to(part.dtype)


@every_scheme
@pytest.mark.parametrize("inputs", [False, True], ids=["outputs", "inputs"])
def test_parts_cut_and_merged_give_the_values_of_the_weights(name: str, inputs: bool) -> None:
    weights = [
        AffineTensor.from_float(values((n, INPUTS), i).bfloat16(), SCHEMES[name])
        for i, n in enumerate(OUTPUTS)
    ]
    rows = OUTPUTS if inputs else tuple(n // 2 for n in OUTPUTS)
    for rank in (0, 1):
        layer = LayerWeight(
            stored_as(weights[0]), rows, INPUTS // 2 if inputs else INPUTS, INPUTS, "layer"
        )
        tensors = {
            part.name: cut(part, [getattr(w, part.name) for w in weights], rows, inputs, rank)
            for part in layer.parts
        }
        assert {p.name: p.shape for p in layer.parts} == {
            n: tuple(t.shape) for n, t in tensors.items()
        }
        made = layer.assembled(tensors, torch.bfloat16)
        assert len(made) == (3 if any(p.per_layer for p in layer.parts) else 1)
        expected = torch.cat([w.dequantize().chunk(2, 1 if inputs else 0)[rank] for w in weights])
        assert same_bits(torch.cat([w.dequantize() for w in made]), expected)


def test_inputs_that_fill_no_group_are_padded_as_in_the_folder() -> None:
    weight = AffineTensor.from_float(values((5, 50), 1), lb.Int4WeightOnly(32))
    layer = LayerWeight(stored_as(weight), [5], 50, 50, "layer")
    (made,) = layer.assembled(weight.inner_tensors(), torch.float32)
    assert same_bits(made.dequantize(), weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_keep_their_values(dtype: torch.dtype) -> None:
    """float32 scales of a bfloat16 weight stay, and those that bfloat16 holds exactly become bfloat16."""
    weight = values((16, 64), 1).bfloat16()
    spec = lb.Int4WeightOnly(32).weight
    made = AffineTensor.from_float(weight, spec, spec.search_qparams(weight, dtype))
    layer = LayerWeight(stored_as(made), [16], 64, 64, "layer")
    assert all(p.dtype is torch.float32 for p in layer.parts if p.name == "scale")
    staged = {**made.inner_tensors(), "scale": made.scale.float()}
    (again,) = layer.assembled(staged, torch.bfloat16)
    assert again.scale.dtype is dtype and same_bits(again.dequantize(), made.dequantize())


def test_another_dtype_for_the_products() -> None:
    weight = AffineTensor.from_float(values((16, 64), 1).bfloat16(), lb.Int8WeightOnly())
    layer = LayerWeight(stored_as(weight), [16], 64, 64, "layer")
    (made,) = layer.assembled(weight.inner_tensors(), torch.float16)
    assert made.dtype is torch.float16 and torch.equal(made.codes, weight.codes)


REFUSED: dict[str, Any] = {
    "group": (lb.Int4WeightOnly(128), [16], 64, r"64 of 128 inputs.*groups of 128.*divides 64"),
    "rows": (lb.Float8WeightOnly(lb.PerBlock(8, 32)), [16, 4], 128, "4 outputs.*blocks of 8"),
    "byte": (lb.IntxWeightOnly(3), [16], 4, "4 codes of 3 bits end inside a byte"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_cuts_that_are_refused(name: str) -> None:
    scheme, outputs, inputs, says = REFUSED[name]
    stored = stored_as(AffineTensor.from_float(values((16, 128), 1), scheme))
    with pytest.raises(ValueError, match=f"own.proj: {says}".replace("own.", r"own\.")):
        LayerWeight(stored, outputs, inputs, 128, "own.proj")


def test_the_entry_point_of_vllm() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"lowbit": "lowbit.vllm:register"}


def test_an_older_vllm_gets_a_warning(monkeypatch: Any) -> None:
    """vLLM calls the plug-ins of all installed packages, and an error would stop it, whatever it serves."""
    from lowbit.vllm import register

    for name in [n for n in sys.modules if n.startswith(("vllm", "lowbit.interop.vllm.config"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delattr(sys.modules["lowbit.vllm"], "config", raising=False)
    handler = logging.handlers.BufferingHandler(10)
    logger = logging.getLogger("vllm.lowbit")
    logger.addHandler(handler)
    try:
        register()
    finally:
        logger.removeHandler(handler)
    (record,) = handler.buffer
    assert record.levelno == logging.WARNING
    assert "interfaces of vLLM 0.32" in record.getMessage()

"""Programs of ExecuTorch, run by its own runtime with XNNPACK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import (
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8StaticActivationInt8Weight,
    Int8WeightOnly,
    IntxWeightOnly,
    Scheme,
    quantize_,
)
from lowbit.formats import FormatError
from tests.formats.programs import ASYMMETRIC_INPUT, LINEARS, beside, relative

pytest.importorskip("executorch.exir")
runtime = pytest.importorskip("executorch.runtime")

BATCH = ({0: torch.export.Dim("batch", min=1, max=64)},)
SERVED = {
    "int8 x int8": Int8WeightOnly().weight,
    "int8 x int4 g32": Int4WeightOnly(32).weight,
    "int8 x int4 g64": Int4WeightOnly(64).weight,
    "int8 x int4 rows": IntxWeightOnly(4).weight,
}
"""Weights whose products with asymmetric inputs are those of XNNPACK."""


def network(scheme: Any, bias: bool = True) -> nn.Module:
    """Quantized in bfloat16, so that its scales are numbers of bfloat16, and then in float32."""
    torch.manual_seed(0)
    layers = nn.Linear(128, 192, bias), nn.ReLU(), nn.Linear(192, 64), nn.GELU(), nn.Linear(64, 31)
    model = nn.Sequential(*layers).bfloat16().eval()
    if getattr(scheme, "activation", None) is not None and scheme.activation.static:
        with lowbit.calibrate(model, scheme):
            model(inputs(32).bfloat16())
    quantize_(model, scheme)
    return model.float()


def inputs(batch: int) -> Tensor:
    return torch.randn(batch, 128, generator=torch.Generator().manual_seed(batch))


def exported(model: nn.Module, path: Path, x: Tensor, **options: Any) -> Any:
    return lowbit.export(model, path, "executorch", example_inputs=(x,), **options)


def run(path: Path, x: Tensor) -> Tensor:
    program = runtime.Runtime.get().load_program(path)
    (y,) = program.load_method("forward").execute([x])
    return y


@pytest.mark.parametrize("name", ["int8 x int8"])
def test_plain_layers_stand_beside_quantized_ones(name: str, tmp_path: Path) -> None:
    model, given = beside(Scheme(SERVED[name], ASYMMETRIC_INPUT))
    path = tmp_path / "model.pte"
    with pytest.raises(FormatError, match="image_weight to be NCHW"):  # nor a plain model
        lowbit.export(model, path, "executorch", example_inputs=given, lossy=True)
    model.image.to(memory_format=torch.contiguous_format)
    lowbit.export(model, path, "executorch", example_inputs=given, lossy=True)
    method = runtime.Runtime.get().load_program(path).load_method("forward")
    expected = model(*given)
    found = dict(zip(expected, method.execute(given), strict=True))
    worst = {name: relative(found[name], expected[name]) for name in expected}
    assert max(worst.values()) < 2e-3, worst


@pytest.mark.cover("values")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name == "int8 x int4 g64" else ())
        for name in SERVED
    ],
)
def test_asymmetric_inputs_give_the_outputs_of_eager(name: str, bias: bool, tmp_path: Path) -> None:
    model = network(Scheme(SERVED[name], ASYMMETRIC_INPUT), bias)
    path = tmp_path / "model.pte"
    report = exported(model, path, inputs(4), dynamic_shapes=BATCH)
    assert report.converted == ["0.weight", "2.weight", "4.weight"] and not report.snr
    assert report.nbytes == path.stat().st_size
    written = path.read_bytes()  # XNNPACK runs all products: no op of ExecuTorch's own is named
    assert b"quantized_decomposed::" not in written and b"aten::addmm" not in written
    for batch in (1, 9):
        x = inputs(batch)
        found, expected = run(path, x), model(x)
        # A value in the middle of two codes may take the other one.
        assert relative(found, expected) < 2e-3, relative(found, expected)


@pytest.mark.parametrize(
    "scheme", [Int8DynamicActivationInt8Weight(), Int8DynamicActivationInt4Weight(32)], ids=str
)
def test_the_presets_differ_by_the_rounding_of_inputs(scheme: Scheme, tmp_path: Path) -> None:
    model, path = network(scheme), tmp_path / "model.pte"
    exported(model, path, inputs(4), dynamic_shapes=BATCH)
    x, high = inputs(9), network(scheme)
    lowbit.dequantize_(high)
    loss = relative(model(x), high(x))  # of the inputs' rounding in lowbit
    assert relative(run(path, x), high(x)) < 1.2 * loss
    assert relative(run(path, x), model(x)) < 2 * loss


def test_static_int8_inputs(tmp_path: Path) -> None:
    model, path = network(Int8StaticActivationInt8Weight()), tmp_path / "model.pte"
    exported(model, path, inputs(4), dynamic_shapes=BATCH)
    assert relative(run(path, inputs(9)), model(inputs(9))) < 5e-3


@pytest.mark.parametrize(("name", "bound"), [("int8 x int8", 1.1), ("int8 x int4 g32", 0.7)])
def test_weights_are_packed(name: str, bound: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 512)).bfloat16().eval()
    quantize_(model, Scheme(SERVED[name], ASYMMETRIC_INPUT))
    exported(model.float(), tmp_path / "model.pte", torch.randn(2, 1024))
    assert (tmp_path / "model.pte").stat().st_size < bound * 1024 * 512


def test_an_int8_embedding_stays_packed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 128), nn.Linear(128, 16)).bfloat16().eval()
    schemes = {"0": Int8WeightOnly(), "1": Scheme(SERVED["int8 x int8"], ASYMMETRIC_INPUT)}
    quantize_(model, schemes, filter_fn=lambda module, name: True)
    model.float()
    tokens = torch.randint(0, 1000, (3, 5))
    exported(model, tmp_path / "model.pte", tokens)
    assert (tmp_path / "model.pte").stat().st_size < 1.2 * 1000 * 128
    assert relative(run(tmp_path / "model.pte", tokens), model(tokens)) < 2e-3


def test_float32_scales_are_refused_or_rounded_with_the_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64)).eval()
    quantize_(model, Scheme(SERVED["int8 x int4 g32"], ASYMMETRIC_INPUT))
    path = tmp_path / "model.pte"
    with pytest.raises(FormatError, match=r"^0\.weight: XNNPACK has scales of bfloat16.*lossy=Tru"):
        exported(model, path, inputs(4))
    assert not path.exists()
    report = exported(model, path, inputs(4), lossy=True)
    assert 40 < report.snr["0.weight"] < 80  # dB
    assert relative(run(path, inputs(4)), model(inputs(4))) < 1e-2


REFUSED = sorted(set(LINEARS) - {"int8xint4", "int8xint8", "int8xint8_static"})


@pytest.mark.parametrize("name", REFUSED)
def test_other_presets_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    model = network({"2": LINEARS[name]} if not name.endswith("static") else LINEARS[name])
    with pytest.raises(FormatError, match=r"^\d\.weight: executorch holds Int8DynamicActiv") as e:
        exported(model, tmp_path / "model.pte", inputs(4))
    assert "\n" not in str(e.value) and list(tmp_path.iterdir()) == []


def test_what_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    served = Scheme(SERVED["int8 x int8"], ASYMMETRIC_INPUT)
    with pytest.raises(FormatError, match=r"compute in float32, got torch.bfloat16: call model\.f"):
        exported(network(served).bfloat16(), path, inputs(4).bfloat16())
    with pytest.raises(FormatError, match="groups of a multiple of 32"):
        exported(network(Int8DynamicActivationInt4Weight(16)), path, inputs(4))
    asymmetric = Scheme(IntxWeightOnly(8, None, "asymmetric").weight, ASYMMETRIC_INPUT)
    with pytest.raises(FormatError, match="got int8-row-asymmetric"):
        exported(network(asymmetric), path, inputs(4))
    table = nn.Sequential(nn.Embedding(9, 32)).eval()
    quantize_(table, Int4WeightOnly(32), filter_fn=lambda module, name: True)
    with pytest.raises(FormatError, match="used for its rows"):
        exported(table, path, torch.tensor([1, 2]))

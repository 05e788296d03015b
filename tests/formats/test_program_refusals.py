"""What `lowbit.export` refuses to write as a program, and formats of programs that a user registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import Int4WeightOnly, formats
from lowbit.formats import FormatError
from tests import forked
from tests.formats.programs import FEATURES
from tests.formats.test_programs import X, network, printed

PROGRAMS = ("aoti", "executorch", "onnx")


@pytest.mark.parametrize("format", PROGRAMS)
def test_calls_that_no_program_format_takes(format: str, tmp_path: Path) -> None:
    model, out = network(Int4WeightOnly(32)), tmp_path / "model.bin"
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (model, {}, r"give example_inputs=\(x, …\)"),
        (tmp_path, {"example_inputs": (X,)}, "give the module, which lowbit.load_pretrained makes"),
        (
            model,
            {"example_inputs": 3},
            "example_inputs is a tuple of the model's arguments.*got int",
        ),
        (network(), {"example_inputs": (X,)}, "no weight is in low bits: call lowbit.quantize_"),
        (model, {"example_inputs": (X,), "tokenizer": "x"}, r"takes no tokenizer="),
        (model, {"example_inputs": (X,), "scheme": Int4WeightOnly()}, r"takes no scheme="),
    ]
    for subject, options, message in cases:
        with pytest.raises(FormatError, match=message) as caught:
            lowbit.export(subject, out, format, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(FormatError, match=r"training mode: call model\.eval"):
        lowbit.export(network(Int4WeightOnly(32)).train(), out, format, example_inputs=(X,))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_programs_of_models_on_a_gpu(tmp_path: Path) -> None:
    """torch.export keeps lowbit's kernels; the formats are made on a CPU."""
    model = network(Int4WeightOnly(32)).bfloat16().cuda()
    x = torch.randn(4, FEATURES, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        assert torch.equal(program.module()(x), model(x))
    for format in PROGRAMS:
        with pytest.raises(FormatError, match=r"0\.weight is on cuda:0: call model\.cpu\(\) first"):
            lowbit.export(model, tmp_path / "model.bin", format, example_inputs=(x,))


def test_a_model_in_qat_is_refused(tmp_path: Path) -> None:
    model = network()
    lowbit.qat.prepare_(model, Int4WeightOnly(32))
    with pytest.raises(FormatError, match=r"still in training; lowbit.qat.convert_\(model\)"):
        lowbit.export(model.eval(), tmp_path / "m.pt2", "aoti", example_inputs=(X,))


def test_a_model_that_torch_export_cannot_trace(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(Int4WeightOnly(32))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if x.sum() > 0 else x

    with pytest.raises(
        FormatError, match=r"torch\.export cannot trace the model with these"
    ) as caught:
        lowbit.export(Branching().eval(), tmp_path / "m.pt2", "aoti", example_inputs=(X,))
    assert "\n" not in str(caught.value)


def test_outputs_that_exist_or_cannot_be_written(tmp_path: Path) -> None:
    model, out = network(Int4WeightOnly(32)), tmp_path / "model.onnx"
    options = {"format": "onnx", "example_inputs": (X,)}
    out.write_text("mine")
    with pytest.raises(FormatError, match="exists already; give another name, or overwrite=True"):
        lowbit.export(model, out, **options)
    assert out.read_text() == "mine"
    with pytest.raises(FormatError, match=r"is a folder; onnx is one file, such as model\.onnx"):
        lowbit.export(model, tmp_path, **options)
    with pytest.raises(FormatError, match="is not a folder; make it first"):
        lowbit.export(model, tmp_path / "none" / "model.onnx", **options)


def test_weight_formats_take_no_inputs(tmp_path: Path) -> None:
    with pytest.raises(
        FormatError, match="lowbit holds weights, not a program, and takes no example_"
    ):
        lowbit.export(network(Int4WeightOnly(32)), tmp_path / "m", "lowbit", example_inputs=(X,))


_WITHOUT_PACKAGES = """
import json, sys, torch
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("onnx", "onnxscript", "executorch"):
            raise ModuleNotFoundError("No module named " + name, name=name)
sys.meta_path.insert(0, Refuse())
import lowbit
model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16().eval()
lowbit.quantize_(model, lowbit.Int8DynamicActivationInt4Weight())
model.float()
found = []
for format, end in (("onnx", ".onnx"), ("executorch", ".pte")):
    try:
        lowbit.export(model, sys.argv[1] + end, format, example_inputs=(torch.randn(2, 64),))
    except lowbit.formats.FormatError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def test_missing_packages_are_named_with_their_extra(tmp_path: Path) -> None:
    found = printed(forked.run(_WITHOUT_PACKAGES, tmp_path / "model", folder=tmp_path))
    for message, package in zip(found, ("onnx", "executorch"), strict=True):
        missing = f"{package} programs need {package}, which is not installed"
        assert message.startswith(f"{missing}: pip install 'lowbit[{package}]'")
    assert list(tmp_path.iterdir()) == []


def test_program_formats_register(tmp_path: Path) -> None:
    class Counted(formats.ProgramFormat):
        name, suffix = "counted", ".txt"

        def write(self, call: Any, path: Path, lossy: bool) -> list[Any]:
            path.write_text(" ".join(call.weights))
            return []

    known = formats.registry.PROGRAMS
    formats.register(Counted())
    try:
        with pytest.raises(ValueError, match="there is a format 'counted' already"):
            formats.register(Counted())
        assert "counted" in formats.names()
        model = network(Int4WeightOnly(32))
        lowbit.export(model, tmp_path / "m.txt", "counted", example_inputs=(X,))
        assert (tmp_path / "m.txt").read_text() == "0.weight 2.weight"
    finally:
        known.pop()

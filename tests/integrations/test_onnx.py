"""ONNX files with packed weights, run by onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit
from lowbit import Int4WeightOnly, Int8WeightOnly, IntxWeightOnly, Scheme, Spec, quantize_
from lowbit.formats import FormatError
from lowbit.formats.programs.onnx_file import block_size
from lowbit.numerics.granularity import PerGroup, PerTensor
from lowbit.numerics.number_format import Int
from tests.formats.programs import LINEARS, beside, relative

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

ANY = torch.export.Dim.DYNAMIC
HELD: dict[str, Scheme] = {
    "int4": Int4WeightOnly(32),
    "int4 g128": Int4WeightOnly(128),
    "int4 rows": IntxWeightOnly(4),
    "int4 asymmetric": Int4WeightOnly(16, "asymmetric"),
    "int4 asymmetric rows": IntxWeightOnly(4, None, "asymmetric"),
    "uint4": Scheme(Spec(Int(4, signed=False), PerGroup(32), "asymmetric")),
    "int8": Int8WeightOnly(),
    "int8 g64": Int8WeightOnly(64),
    "int8 asymmetric": IntxWeightOnly(8, 32, "asymmetric"),
    "int8 tensor": Scheme(Spec(Int(8), PerTensor())),
}

OTHERS = sorted(set(LINEARS) - {"int4", "int4_row", "int4_asymmetric", "int8", "int8_groups"})


class Tiny(nn.Module):
    """A language model's shape, whose head is the embedding. One product is functional."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, width)
        self.up = nn.Linear(width, 256)
        self.norm = nn.LayerNorm(256)
        self.down = nn.Linear(256, width, bias=False)
        self.head = nn.Linear(width, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = h + F.linear(self.norm(F.gelu(self.up(h))), self.down.weight)
        return self.head(h)


def tiny(scheme: Scheme, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = Tiny().to(dtype).eval()
    quantize_(model, {"*": scheme}, filter_fn=lambda module, name: True)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(1))


def exported(model: nn.Module, path: Path, *inputs: Any, **options: Any) -> lowbit.Report:
    return lowbit.export(model, path, "onnx", example_inputs=inputs, **options)


def run(path: Path, *inputs: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    named = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    (y,) = session.run(None, named)
    return torch.from_numpy(y)


def ops(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", HELD)
def test_outputs_are_those_of_eager_for_any_batch_and_length(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, path = tiny(HELD[name], dtype), tmp_path / "model.onnx"
    shapes = {"tokens": {0: ANY, 1: ANY}}
    report = exported(model, path, tokens(2, 5), dynamic_shapes=shapes)
    assert report.converted == ["embed.weight", "up.weight", "down.weight"]
    assert ops(path).count("MatMulNBits") == 3
    assert ops(path).count("GatherBlockQuantized") == 1
    for shape in ((1, 1), (3, 11)):
        error = relative(run(path, tokens(*shape)), model(tokens(*shape)))
        assert error < (1e-6 if dtype is torch.float32 else 2e-3)


@pytest.mark.cover("values", scheme=lambda scheme: (scheme.weight.format, scheme.weight.mapping))
@pytest.mark.parametrize("scheme", HELD.values(), ids=HELD)
def test_plain_layers_stand_beside_quantized_ones(scheme: Scheme, tmp_path: Path) -> None:
    model, given = beside(scheme)
    exported(model, tmp_path / "model.onnx", *given)
    session = onnxruntime.InferenceSession(
        tmp_path / "model.onnx", providers=["CPUExecutionProvider"]
    )
    named = {i.name: x.numpy() for i, x in zip(session.get_inputs(), given, strict=True)}
    expected = model(*given)
    found = dict(zip(expected, map(torch.from_numpy, session.run(None, named)), strict=True))
    worst = {name: relative(found[name], expected[name]) for name in expected}
    assert max(worst.values()) < 1e-6, worst


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.6), (8, 1.1)])
def test_weights_are_packed_and_shared_in_the_file(bits: int, bound: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tiny(width=1024).eval()
    quantize_(model, {"*": IntxWeightOnly(bits, 128)}, filter_fn=lambda module, name: True)
    report = exported(model, tmp_path / "model.onnx", tokens(2, 5))
    size = (tmp_path / "model.onnx").stat().st_size
    elements = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert size < bound * elements and size == report.nbytes
    stored = onnx.load(tmp_path / "model.onnx").graph.initializer
    codes = [t for t in stored if t.data_type == onnx.TensorProto.UINT8]
    assert len(codes) == 3  # the head's are the embedding's


class Lengths(nn.Module):
    """A linear for each length of rows. Each takes the first columns of an input of the greatest length."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, 7) for k in lengths)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x[:, : layer.in_features]) for layer in self.layers])


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_any_length(bits: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Lengths([16, 17, 33, 100, 250, 257]).eval()
    quantize_(model, IntxWeightOnly(bits))
    x = torch.randn(3, 257)
    exported(model, tmp_path / "model.onnx", x)
    for found, expected in zip(run(tmp_path / "model.onnx", x), model(x), strict=True):
        assert relative(found, expected) < 1e-6


def test_blocks_of_rows_take_the_fewest_bytes() -> None:
    assert [block_size(k, 4) for k in (16, 17, 256, 4096, 300)] == [16, 32, 256, 256, 64]


@pytest.mark.parametrize("scheme", [Int8WeightOnly(), IntxWeightOnly(8, None, "asymmetric")])
def test_convolutions_keep_8_bits(scheme: Scheme, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.Conv2d(64, 32, 3)).eval()
    quantize_(model, scheme, filter_fn=lambda module, name: True)
    path, x = tmp_path / "model.onnx", torch.randn(2, 3, 16, 16)
    exported(model, path, x, dynamic_shapes=({0: ANY},))
    assert ops(path).count("DequantizeLinear") == 2 and path.stat().st_size < 40_000
    x = torch.randn(5, 3, 16, 16)
    assert relative(run(path, x), model(x)) < 1e-6


@pytest.mark.parametrize("name", OTHERS)
def test_other_presets_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128)).eval()
    x = torch.randn(2, 128)
    if name.endswith("static"):
        with lowbit.calibrate(model, LINEARS[name]):
            model(x)
    quantize_(model, LINEARS[name])
    with pytest.raises(FormatError, match=r"^0\.weight: onnx holds int4 and int8") as e:
        exported(model, tmp_path / "model.onnx", x)
    assert "\n" not in str(e.value)
    assert list(tmp_path.iterdir()) == []


def test_what_else_is_refused(tmp_path: Path) -> None:
    def refused(model: nn.Module, x: Tensor, message: str) -> None:
        with pytest.raises(FormatError, match=message):
            exported(model, tmp_path / "model.onnx", x)

    refused(tiny(Int4WeightOnly(32), torch.bfloat16), tokens(1, 2), r"bfloat16: call model\.float")
    linear = nn.Sequential(nn.Linear(96, 8)).eval()
    quantize_(linear, Int4WeightOnly(48))
    refused(linear, torch.randn(2, 96), "groups of 16, 32, 64, 128 or 256, got groups of 48")
    conv = nn.Sequential(nn.Conv1d(32, 8, 1)).eval()
    quantize_(conv, Int4WeightOnly(32), filter_fn=lambda module, name: True)
    refused(conv, torch.randn(2, 32, 4), "unpacks int4 in linears and embeddings only")
    table = nn.Sequential(nn.Embedding(9, 24)).eval()
    quantize_(table, Int8WeightOnly(), filter_fn=lambda module, name: True)
    refused(table, tokens(2).remainder(9), "a multiple of 16 columns, got 24")
    narrow = nn.Sequential(nn.Linear(32, 8)).eval()
    quantize_(narrow, Int4WeightOnly(32))
    refused(narrow, torch.randn(2, 32).half(), "float16 input meets a weight of torch.float32")
    assert not (tmp_path / "model.onnx").exists()


def test_a_bfloat16_model_in_float32_keeps_its_codes(tmp_path: Path) -> None:
    model = tiny(Int4WeightOnly(32), torch.bfloat16).float()
    exported(model, tmp_path / "model.onnx", tokens(2, 3))
    assert relative(run(tmp_path / "model.onnx", tokens(2, 3)), model(tokens(2, 3))) < 1e-6


def test_a_model_stays_as_it_was(tmp_path: Path) -> None:
    model = tiny(Int4WeightOnly(32))
    before = {k: id(v) for k, v in model.state_dict(keep_vars=True).items()}
    expected = model(tokens(2, 3))
    exported(model, tmp_path / "model.onnx", tokens(2, 3))
    assert before == {k: id(v) for k, v in model.state_dict(keep_vars=True).items()}
    assert torch.equal(model(tokens(2, 3)), expected)


def test_keyword_inputs(tmp_path: Path) -> None:
    model = tiny(Int4WeightOnly(32))
    path = tmp_path / "model.onnx"
    lowbit.export(model, path, "onnx", example_inputs={"tokens": tokens(2, 3)})
    assert relative(run(path, tokens(2, 3)), model(tokens(2, 3))) < 1e-6


def test_large_models_keep_tensors_in_a_file_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowbit.formats.programs.onnx_file._MOST_IN_ONE_FILE", 1000)
    model, path = tiny(Int4WeightOnly(32)), tmp_path / "model.onnx"
    report = exported(model, path, tokens(2, 3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert report.nbytes == sum(p.stat().st_size for p in tmp_path.iterdir())
    assert relative(run(path, tokens(2, 3)), model(tokens(2, 3))) < 1e-6


class Answering(nn.Module):
    """Writes to a buffer, and gives what `answer` makes of its input and its output."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.answer = answer
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, factor: int = 2, unused: Tensor | None = None) -> Any:
        self.calls.add_(1)
        return self.answer(x, self.linear(x) * factor)


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    "answer",
    [
        lambda x, y: (y, y),
        lambda x, y: (y, None),
        lambda x, y: (x, y.argmax(-1)),
        lambda x, y: {"b": y, "a": y + 1},
    ],
)
@pytest.mark.parametrize("more", [(), (3, torch.randn(5))], ids=["x", "all"])
def test_arguments_and_outputs_of_any_kind_are_compared(
    answer: Any, more: tuple[Any, ...], tmp_path: Path
) -> None:
    model = Answering(answer).eval()
    quantize_(model, Int4WeightOnly(32))
    exported(model, tmp_path / "model.onnx", torch.randn(2, 64), *more)
    assert model.calls.item() == 0


def test_a_file_that_computes_something_else_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the exporter had scaled one of four layers by 1.1."""

    def damage(made: Any) -> None:
        scale = next(v for n, v in made.graph.initializers.items() if n.endswith("scale"))
        scale.const_value = onnx_ir.tensor(scale.const_value.numpy() * 1.1)

    onnx_ir = pytest.importorskip("onnx_ir")
    model = tiny(Int4WeightOnly(32))
    monkeypatch.setattr("lowbit.formats.programs.onnx_file._share", damage)
    with pytest.raises(FormatError, match="computes something else than the model") as caught:
        exported(model, tmp_path / "model.onnx", tokens(2, 3))
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_what_the_exporter_cannot_translate_is_named(tmp_path: Path) -> None:
    model = Answering(lambda x, y: (y, 2)).eval()
    quantize_(model, Int4WeightOnly(32))
    with pytest.raises(FormatError, match=r"translate the program: 'int' object.*\(return .*, 2"):
        exported(model, tmp_path / "model.onnx", torch.randn(2, 64))

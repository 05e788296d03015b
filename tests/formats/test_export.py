"""lowbit.export and lowbit.load_pretrained: models in memory, folders, conversions, reports."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit
from lowbit import (
    AffineTensor,
    Float8DynamicActivationFloat8Weight,
    Float8Tensor,
    Int4WeightOnly,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    IntxWeightOnly,
    LowbitTensor,
    NVFP4WeightOnly,
    PerBlock,
    formats,
    progress,
    quantize_,
)
from lowbit.formats import FormatError, writing
from tests import forked
from tests.formats.models import SCHEMES, TOKENS, build, low_bit, plain_folder

safetensors = pytest.importorskip("safetensors.torch")
BLOCKS = Float8DynamicActivationFloat8Weight(PerBlock(128, 128))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Dequantized, also where a state dict would hand out parts."""
    found = model.state_dict(keep_vars=True).items()
    return {k: (v.dequantize() if isinstance(v, LowbitTensor) else v.detach()) for k, v in found}


def assert_same_values(a: nn.Module, b: nn.Module) -> None:
    first, second = values(a), values(b)
    assert first.keys() == second.keys()
    assert [k for k, v in first.items() if not torch.equal(v, second[k])] == []


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, 64))


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *((name, f) for name in ("int4 g64", "int8 x int8", "float8") for f in formats.names()[:2]),
        ("float8 blocks", "fp8"),
        ("float8 blocks", "compressed-tensors"),
    ],
)
def test_exported_and_loaded(name: str, format: str, tmp_path: Path) -> None:
    model = low_bit(SCHEMES[name])
    report = lowbit.export(model, tmp_path / "out", format)
    assert report.converted == ["up_proj.weight", "down_proj.weight"] and not report.snr
    other = lowbit.load_pretrained(tmp_path / "out", build(1))
    assert_same_values(other, model)
    assert torch.equal(other(TOKENS), model(TOKENS))
    assert type(other.up_proj.weight) is type(model.up_proj.weight)
    method = config_of(tmp_path / "out")["quantization_config"]["quant_method"]
    assert method == format
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_shards_have_the_size_that_was_asked_for(tmp_path: Path) -> None:
    model = low_bit(Int4WeightOnly(32))
    lowbit.export(model, tmp_path / "out", max_shard_size="20KB")
    shards = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(shards) >= 3
    assert [p.name for p in shards] == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    held = {name: p.name for p in shards for name in safetensors.load_file(p)}
    assert index["weight_map"] == held
    sizes = [sum(t.nbytes for t in safetensors.load_file(p).values()) for p in shards]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert_same_values(lowbit.load_pretrained(tmp_path / "out", build(1)), model)


@pytest.mark.parametrize("first", ["lowbit", "compressed-tensors"])
def test_folder_to_folder_keeps_the_values(first: str, tmp_path: Path) -> None:
    model = low_bit(BLOCKS)
    lowbit.export(model, tmp_path / "0", first, max_shard_size="30KB")
    (tmp_path / "0/tokenizer.json").write_text('{"of": "the model"}')
    for i, format in enumerate(["fp8", "compressed-tensors", "lowbit", "fp8"]):
        lowbit.export(tmp_path / str(i), tmp_path / str(i + 1), format)
    assert_same_values(lowbit.load_pretrained(tmp_path / "4", build(1)), model)
    assert (tmp_path / "4/tokenizer.json").read_text() == '{"of": "the model"}'


def test_the_own_format_keeps_every_kind_of_weight(tmp_path: Path) -> None:
    """Embeddings, convolutions and stacks of experts among them."""

    def mixed() -> nn.Module:
        torch.manual_seed(0)
        model = nn.ModuleDict({"embed": nn.Embedding(40, 64), "conv": nn.Conv2d(4, 8, 3)})
        model["experts"] = Experts()
        return model

    model = mixed()
    quantize_(model, IntxWeightOnly(4), filter_fn=lambda m, name: True)
    lowbit.export(model, tmp_path / "out", "lowbit")
    other = lowbit.load_pretrained(tmp_path / "out", mixed())
    assert_same_values(other, model)
    assert {type(p) for p in other.parameters()} == {type(p) for p in model.parameters()}
    with pytest.raises(FormatError) as caught:
        lowbit.export(model, tmp_path / "other")
    for name in ("embed.weight", "conv.weight", "experts.up"):
        assert name in str(caught.value)
    assert not (tmp_path / "other").exists()


def test_what_a_format_cannot_hold_is_refused_or_rounded(tmp_path: Path) -> None:
    model = low_bit(IntxWeightOnly(4, 32, "float_zero_point"))
    with pytest.raises(
        FormatError, match=r"up_proj.weight: its zero points are values.*lossy=True"
    ):
        lowbit.export(model, tmp_path / "out")
    assert [*tmp_path.iterdir()] == []
    report = lowbit.export(model, tmp_path / "out", lossy=True)
    assert report.snr.keys() == {"up_proj.weight", "down_proj.weight"}
    assert all(15 < ratio < 60 for ratio in report.snr.values())
    assert "SNR" in str(report)
    other = lowbit.load_pretrained(tmp_path / "out", build(1))
    want, got = values(model), values(other)
    for name, ratio in report.snr.items():
        error = (want[name].float() - got[name].float()).double().square().sum()
        signal = want[name].double().square().sum()
        assert ratio == pytest.approx(10 * torch.log10(signal / error).item(), abs=1e-3)


def test_where_a_format_holds_no_scheme_the_weight_stays_plain(tmp_path: Path) -> None:
    """An embedding, for a format whose loaders take it in high precision: its values are kept."""
    model = build(tied=True)
    quantize_(model, Int4WeightOnly(64))
    with pytest.raises(FormatError, match=r"embed_tokens.weight: it is the weight of an embedding"):
        lowbit.export(model, tmp_path / "out")
    report = lowbit.export(model, tmp_path / "out", lossy=True)
    assert "stored plainly" in report.left["embed_tokens.weight"] and not report.snr
    assert config_of(tmp_path / "out")["quantization_config"]["ignore"] == ["lm_head"]
    assert_same_values(lowbit.load_pretrained(tmp_path / "out", build(1, tied=True)), model)


def test_a_weight_by_another_name_stays_plain(tmp_path: Path) -> None:
    """Formats of other programs name the parts of `weight` alone."""

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 64)
            self.down = nn.Parameter(torch.ones(32, 64))

    model = Projected()
    quantize_(model, Int4WeightOnly(32), filter_fn=lambda m, name: True)
    with pytest.raises(FormatError, match="down: compressed-tensors names parts after"):
        lowbit.export(model, tmp_path / "out")
    report = lowbit.export(model, tmp_path / "out", lossy=True)
    assert report.converted == ["up.weight"] and "stored plainly" in report.left["down"]
    assert_same_values(lowbit.load_pretrained(tmp_path / "out", Projected()), model)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = build(tied=True)
    quantize_(model, {"*_proj": Int4WeightOnly(64), "*": None})
    lowbit.export(model, tmp_path / "out")
    names = safetensors.load_file(tmp_path / "out/model.safetensors").keys()
    assert "embed_tokens.weight" in names and "lm_head.weight" not in names
    other = lowbit.load_pretrained(tmp_path / "out", build(1, tied=True))
    assert other.lm_head.weight is other.embed_tokens.weight
    assert_same_values(other, model)
    with pytest.raises(FormatError, match=r"lacks 1 tensors that Tied has, such as lm_head.weight"):
        lowbit.load_pretrained(tmp_path / "out", build(1))


@pytest.mark.parametrize("prepare", [lowbit.qat.prepare_, lowbit.train.prepare_])
def test_weights_in_training_are_converted_first(prepare, tmp_path: Path) -> None:
    model = build()
    is_qat = prepare is lowbit.qat.prepare_
    prepare(model, Int4WeightOnly(64) if is_qat else lowbit.BitNet())
    with pytest.raises(FormatError, match="convert_"):
        lowbit.export(model, tmp_path / "out", "lowbit")
    lowbit.qat.convert_(model) if is_qat else lowbit.train.convert_(model)
    lowbit.export(model, tmp_path / "out", "lowbit")
    assert_same_values(lowbit.load_pretrained(tmp_path / "out", build(1)), model)


@pytest.mark.parametrize("scheme", [lowbit.Int8Weight(), lowbit.Int4Weight(32)])
def test_codes_that_train_are_stored_as_their_conversion(scheme, tmp_path: Path) -> None:
    """Where the format has no codes that train, to the bit."""
    model = build()
    lowbit.train.prepare_(model, {"*_proj": scheme, "*": None})
    in_training = type(model.get_parameter("up_proj.weight"))
    lowbit.export(model, tmp_path / "trains", "lowbit")
    lowbit.export(model, tmp_path / "out", "compressed-tensors")
    loaded = [lowbit.load_pretrained(tmp_path / name, build(1)) for name in ("trains", "out")]
    kinds = [type(other.get_parameter("up_proj.weight")) for other in loaded]
    assert kinds == [in_training, lowbit.AffineTensor]
    lowbit.train.convert_(model)
    assert_same_values(loaded[1], model)


def test_qat_is_served_as_it_was_trained(tmp_path: Path) -> None:
    """Prepared = converted = exported = loaded."""
    model = build(dtype=torch.float32)
    lowbit.qat.prepare_(model, {"*_proj": Int4WeightOnly(64), "*": None})
    trained = model(TOKENS)
    lowbit.qat.convert_(model)
    lowbit.export(model, tmp_path / "out")
    other = lowbit.load_pretrained(tmp_path / "out", build(1, torch.float32))
    torch.testing.assert_close(other(TOKENS), trained, rtol=1e-4, atol=1e-5)
    assert_same_values(other, model)


# ---- quantizing while writing ------------------------------------------------------------------------------------


def test_a_plain_folder_is_quantized_as_quantize_does_it(tmp_path: Path) -> None:
    model = build()
    plain_folder(tmp_path / "plain", model)
    report = lowbit.export(tmp_path / "plain", tmp_path / "out", scheme=Int4WeightOnly(64))
    assert sorted(report.converted) == ["down_proj.weight", "up_proj.weight"]
    assert report.snr.keys() == {*report.converted}
    assert "an embedding" in report.left["embed_tokens.weight"]
    assert "the output head" in report.left["lm_head.weight"]
    quantize_(model, {"*_proj": Int4WeightOnly(64), "*": None})
    assert_same_values(lowbit.load_pretrained(tmp_path / "out", build(1)), model)
    assert (tmp_path / "out/tokenizer.json").exists()
    assert sorted(config_of(tmp_path / "out")["quantization_config"]["ignore"]) == ["lm_head"]


def test_reports_count_groups_that_became_zero(tmp_path: Path) -> None:
    """While a folder is quantized, and where a weight is rounded because the format lacks its scales."""
    model = build()
    model.up_proj.weight.data[:5] *= 1e-12
    rounds = IntxWeightOnly(4, 64, scale_dtype=torch.float16)
    folder = plain_folder(tmp_path / "plain", model)
    report = lowbit.export(folder, tmp_path / "out", scheme=rounds)
    groups = model.up_proj.weight[0].numel() // 64
    said = f"; {5 * groups} of {len(model.up_proj.weight) * groups} groups became 0, since scales"
    notes = {entry.fqn: entry.note for entry in report.entries}
    assert said in notes["up_proj.weight"] and "became 0" not in notes["down_proj.weight"]
    quantize_(model, {"*_proj": IntxWeightOnly(4, 64, "asymmetric")})
    report = lowbit.export(model, tmp_path / "gptq", format="gptq", lossy=True)
    notes = {entry.fqn: entry.note for entry in report.entries}
    assert said in notes["up_proj.weight"] and "became 0" not in notes["down_proj.weight"]


def test_patterns_and_searched_scales(tmp_path: Path) -> None:
    model = build()
    folder = plain_folder(tmp_path / "plain", model)
    patterns = {"lm_head": Int8WeightOnly(), "down*": None, "*": Int4WeightOnly(64)}
    report = lowbit.export(folder, tmp_path / "out", scheme=patterns, scales="searched")
    assert sorted(report.converted) == ["lm_head.weight", "up_proj.weight"]
    coarse = lowbit.export(folder, tmp_path / "minmax", scheme=patterns)
    assert report.snr["up_proj.weight"] > coarse.snr["up_proj.weight"]
    with pytest.raises(FormatError, match=r"\['nothing'\] chose no weight.*names end like"):
        lowbit.export(folder, tmp_path / "no", scheme={"nothing": Int8WeightOnly(), **patterns})
    with pytest.raises(FormatError, match="names a mix of gguf"):
        lowbit.export(folder, tmp_path / "no", scheme="int4")
    with pytest.raises(FormatError, match="calibration"):
        lowbit.export(folder, tmp_path / "no", scheme=lowbit.Int8StaticActivationInt8Weight())
    with pytest.raises(FormatError, match="low bits already"):
        lowbit.export(tmp_path / "out", tmp_path / "no", scheme=Int4WeightOnly())
    with pytest.raises(FormatError, match=r"call lowbit.quantize_ first"):
        lowbit.export(model, tmp_path / "no", scheme=Int4WeightOnly())
    with pytest.raises(FormatError, match="no weight is in low bits"):
        lowbit.export(model, tmp_path / "no")


@pytest.mark.parametrize(
    "pattern", ["lm_head", "embed_tokens", "norm", "norm.weight", "re:up.*bias"]
)
def test_none_for_a_layer_that_stays_as_it_is(pattern: str, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "plain", build())
    report = lowbit.export(
        folder, tmp_path / "out", scheme={pattern: None, "*": Int4WeightOnly(64)}
    )
    assert sorted(report.converted) == ["down_proj.weight", "up_proj.weight"]
    for patterns in (
        {"*": Int4WeightOnly(64), pattern: None},
        {"head": None, "*": Int4WeightOnly(64)},
    ):
        with pytest.raises(FormatError, match="chose no weight"):
            lowbit.export(folder, tmp_path / "no", scheme=patterns)


def test_transposed_weights_are_refused(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "plain", build(), model_type="gpt2")
    with pytest.raises(FormatError, match="transposed"):
        lowbit.export(folder, tmp_path / "out", scheme=Int4WeightOnly())


def test_infinite_weights_are_refused_by_name(tmp_path: Path) -> None:
    model = build()
    model.up_proj.weight.data[0, 0] = torch.inf
    folder = plain_folder(tmp_path / "plain", model)
    with pytest.raises(FormatError, match=r"up_proj.weight: .*1 NaN or infinite"):
        lowbit.export(folder, tmp_path / "out", scheme=Int4WeightOnly(64))
    assert [p.name for p in tmp_path.iterdir()] == ["plain"]


@pytest.mark.parametrize("scales", ["minmax", "searched"])
def test_the_sibling_that_is_infinite_is_named(scales: str, tmp_path: Path) -> None:
    """The others, which share a scale with it, are read before it."""
    model = nn.ModuleDict({n: nn.Linear(32, 16, bias=False) for n in ("gate_proj", "up_proj")})
    model["up_proj"].weight.data[0, 0] = torch.inf
    folder = plain_folder(tmp_path / "plain", model)
    with pytest.raises(FormatError, match=r"up_proj.weight: up_proj.weight has 1 NaN or infinite"):
        lowbit.export(folder, tmp_path / "out", scheme=NVFP4WeightOnly(), scales=scales)


# ---- reading -----------------------------------------------------------------------------------------------------


def test_tensors_one_after_another(tmp_path: Path) -> None:
    model = low_bit(Int8DynamicActivationInt8Weight())
    lowbit.export(model, tmp_path / "out", max_shard_size="10KB")
    found = dict(formats.tensors(tmp_path / "out"))
    assert {k for k, t in found.items() if isinstance(t, AffineTensor)} == {
        "up_proj.weight",
        "down_proj.weight",
    }
    assert found.keys() == model.state_dict(keep_vars=True).keys()
    assert found["up_proj.weight"].activation == Int8DynamicActivationInt8Weight().activation


def test_a_model_on_meta_is_filled(tmp_path: Path) -> None:
    model = low_bit(BLOCKS)
    lowbit.export(model, tmp_path / "out", "fp8")
    with torch.device("meta"):
        other = build(1)
    lowbit.load_pretrained(tmp_path / "out", other)
    assert isinstance(other.up_proj.weight, Float8Tensor)
    assert other.norm.weight.requires_grad and not other.up_proj.weight.requires_grad
    assert_same_values(other, model)


def test_a_loaded_model_trains_beside_its_frozen_weights(tmp_path: Path) -> None:
    lowbit.export(low_bit(Int4WeightOnly(64), dtype=torch.float32), tmp_path / "out")
    model = lowbit.load_pretrained(tmp_path / "out", build(1, torch.float32))
    model(TOKENS).square().mean().backward()
    model.norm.weight.data.mul_(2)  # memory of its own, not the file's
    assert model.embed_tokens.weight.grad.abs().sum() > 0


def test_without_an_architecture_a_module_is_asked_for(tmp_path: Path) -> None:
    lowbit.export(low_bit(Int4WeightOnly(64)), tmp_path / "out")
    with pytest.raises(FormatError, match="names no architecture"):
        lowbit.load_pretrained(tmp_path / "out")


def test_shapes_and_names_that_do_not_fit(tmp_path: Path) -> None:
    lowbit.export(low_bit(Int4WeightOnly(64)), tmp_path / "out")
    other = build(1)
    other.up_proj = nn.Linear(128, 300)
    with pytest.raises(FormatError, match=r"up_proj.* has the shape \(256"):
        lowbit.load_pretrained(tmp_path / "out", other)
    with pytest.raises(FormatError, match=r"holds .* that Linear lacks"):
        lowbit.load_pretrained(tmp_path / "out", nn.Linear(2, 2))


# ---- around ------------------------------------------------------------------------------------------------------


def test_an_output_is_replaced_only_where_asked(tmp_path: Path) -> None:
    model = low_bit(Int4WeightOnly(64))
    out = tmp_path / "out"
    out.mkdir()
    lowbit.export(model, out)  # an empty folder holds nothing to lose
    with pytest.raises(FormatError, match="exists already"):
        lowbit.export(model, out)
    (out / "old.txt").write_text("")
    lowbit.export(model, out, "lowbit", overwrite=True)
    assert not (out / "old.txt").exists()
    assert config_of(out)["quantization_config"]["quant_method"] == "lowbit"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/diary.txt").write_text("dear")
    with pytest.raises(FormatError, match="is not a checkpoint"):
        lowbit.export(model, tmp_path / "mine", overwrite=True)
    with pytest.raises(FormatError, match="is the folder that is read"):
        lowbit.export(out, out, overwrite=True)
    with pytest.raises(FormatError, match="make it first"):
        lowbit.export(model, tmp_path / "no/where")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "out"]


def test_arguments_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    model = low_bit(Int4WeightOnly(64))
    with pytest.raises(FormatError, match="unknown format 0; accepted: lowbit, "):
        lowbit.export(model, tmp_path / "out", format=0)
    with pytest.raises(FormatError, match="unknown format 'gguff'; accepted: lowbit, "):
        lowbit.export(model, tmp_path / "out", "gguff")
    for size in ("2 TB", "0", -5, "five"):
        with pytest.raises(FormatError, match="max_shard_size"):
            lowbit.export(model, tmp_path / "out", max_shard_size=size)
    with pytest.raises(TypeError, match="Module, a folder or a GGUF file"):
        lowbit.export(5, tmp_path / "out")


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    lowbit.export(low_bit(Int4WeightOnly(64)), tmp_path / "out")
    (tmp_path / "plain.txt").write_text("")
    rights = {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()}
    assert rights == {(tmp_path / "plain.txt").stat().st_mode & 0o777}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_where_somebody_looks(monkeypatch, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    encoded = writing._encoded
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(writing, "_encoded", lambda *given: (time.sleep(0.1), encoded(*given))[1])
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        lowbit.export(low_bit(Int4WeightOnly(64)), tmp_path / type(stream).__name__)
        shown = "writing compressed-tensors" in stream.getvalue()
        assert shown is isinstance(stream, Terminal)
        assert shown or not stream.getvalue()


@pytest.mark.gpu
def test_quantizing_and_loading_on_a_gpu(tmp_path: Path) -> None:
    model = build()
    folder = plain_folder(tmp_path / "plain", model)
    lowbit.export(folder, tmp_path / "gpu", scheme=Int4WeightOnly(64), device="cuda")
    lowbit.export(folder, tmp_path / "cpu", scheme=Int4WeightOnly(64))
    first, second = (dict(formats.tensors(tmp_path / name)) for name in ("gpu", "cpu"))
    for name, t in first.items():
        other = second[name]
        if isinstance(t, LowbitTensor):
            t, other = t.dequantize(), other.dequantize()
        assert torch.equal(t, other)
    loaded = lowbit.load_pretrained(tmp_path / "gpu", build(1), device="cuda")
    assert {p.device.type for p in loaded.parameters()} == {"cuda"}
    quantize_(model, {"*_proj": Int4WeightOnly(64), "*": None})
    expected = model.cuda()(TOKENS.cuda())
    assert torch.equal(loaded(TOKENS.cuda()), expected)
    lowbit.export(loaded, tmp_path / "again")  # from the GPU
    assert_same_values(lowbit.load_pretrained(tmp_path / "again", build(1)), model.cpu())


def test_importing_lowbit_leaves_the_formats_alone() -> None:
    code = "import lowbit, sys; print('lowbit.formats' in sys.modules, lowbit.export is lowbit.formats.export)"
    done = forked.run(code, folder=Path.cwd())
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_a_format_of_ones_own_is_one_class(monkeypatch, tmp_path: Path) -> None:
    from lowbit.formats import registry
    from lowbit.formats.own import Own

    class Renamed(Own):
        name = "renamed"

        def reads(self, config):
            return config.get("quant_method") == "renamed"

        def config(self, weights, plain):
            return {**super().config(weights, plain), "quant_method": "renamed"}

    monkeypatch.setattr(registry, "FORMATS", [*registry.FORMATS])
    formats.register(Renamed())
    with pytest.raises(ValueError, match="already"):
        formats.register(Renamed())
    model = low_bit(Int4WeightOnly(64))
    lowbit.export(model, tmp_path / "out", "renamed")
    assert_same_values(lowbit.load_pretrained(tmp_path / "out", build(1)), model)


def test_files_are_read_and_compared_in_pieces(monkeypatch, tmp_path: Path) -> None:
    """Each mapping gives a few bytes, so that pages that were read leave memory."""
    from lowbit.files.tensor_file import TensorFile
    from lowbit.formats import folder

    unmapped = []
    unmap = TensorFile.unmap
    monkeypatch.setattr(TensorFile, "unmap", lambda file: unmapped.append(file) or unmap(file))
    monkeypatch.setattr(folder, "MOST_MAPPED", 1000)
    model = build()
    plain_folder(tmp_path / "plain", model)
    lowbit.export(tmp_path / "plain", tmp_path / "out", scheme={"down_proj": Int4WeightOnly(64)})
    assert len(unmapped) > 8
    found = lowbit.load_pretrained(tmp_path / "out", build(1))
    assert torch.equal(found.up_proj.weight, model.up_proj.weight)


def test_a_waiting_shard_does_not_keep_its_source_in_memory(tmp_path: Path) -> None:
    """A tensor of a mapped file keeps the whole file mapped, so the shard holds copies."""
    from lowbit.formats.registry import by_name
    from lowbit.formats.shards import Shards

    plain_folder(tmp_path / "plain", build())
    mapped = dict(formats.tensors(tmp_path / "plain"))
    shards = Shards(tmp_path, 10**9, by_name("lowbit"), {})
    shards.add(mapped, "plain", None)
    shared = [n for n, t in shards._tensors.items() if t.data_ptr() == mapped[n].data_ptr()]
    assert not shared and shards._tensors.keys() == mapped.keys()

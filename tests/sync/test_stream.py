"""stream, write, read and load_ on one process: the bits of convert_ and export, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lowbit
from lowbit import qat, sync, train
from lowbit.formats import FormatError
from lowbit.formats.shards import equal_bits
from tests.formats.models import SCHEMES, TOKENS, build
from tests.formats.test_experts import Config, Mlp

safetensors = pytest.importorskip("safetensors.torch")

HELD = {
    "compressed-tensors": [
        "int4 g64",
        "int4 asymmetric g32",
        "int8 x int8",
        "float8",
        "float8 blocks",
    ],
    "gptq": ["int4 g64"],
    "torchao": ["int8"],
    "lowbit": ["int4 g64", "int2 half-integer"],
}
CASES = [(format, name) for format, names in HELD.items() for name in names]


def prepared(scheme: Any, scales: str = "present", seed: int = 0, tied: bool = False) -> Any:
    model = build(seed, tied=tied)
    qat.prepare_(model, {"*_proj": scheme, "*": None}, scales=scales)
    return model


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not equal_bits(a[name], b[name])]


def exported(model: nn.Module, folder: Path, format: str) -> dict[str, Tensor]:
    lowbit.export(model, folder, format)
    found: dict[str, Tensor] = safetensors.load_file(folder / "model.safetensors")
    return found


@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize(("format", "name"), CASES)
def test_the_stream_is_what_export_writes(
    format: str, name: str, scales: str, tmp_path: Path
) -> None:
    scheme = lowbit.formats.grid(format, SCHEMES[name])
    if scales == "learned" and name == "int2 half-integer":
        scheme = SCHEMES["int2 symmetric"]
    model = prepared(scheme, scales)
    before = {n: id(p) for n, p in model.named_parameters()}
    found = dict(sync.stream(model, format))
    assert {n: id(p) for n, p in model.named_parameters()} == before
    qat.convert_(model)
    assert not differing(found, exported(model, tmp_path / "out", format))


@pytest.mark.parametrize(
    "scheme",
    [
        lowbit.BitNet(),
        lowbit.Int8Weight(),
        lowbit.Int8MixedPrecision(always=True),
        lowbit.Float8BlockMixedPrecision(always=True),
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_trained_weights_are_those_of_convert(scheme: Any) -> None:
    model = build()
    train.prepare_(model, {"*_proj": scheme, "*": None})
    found = dict(sync.stream(model, "lowbit"))
    if isinstance(scheme, lowbit.Int8MixedPrecision):
        assert not differing(found, dict(build().state_dict()))
        return
    train.convert_(model)
    assert "up_proj.weight.codes" in found
    assert not differing(found, dict(sync.stream(model, "lowbit")))


def test_a_plain_model_is_streamed_as_it_is() -> None:
    model = build(tied=True)
    plain = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    assert not differing(dict(sync.stream(model)), plain)


def test_rounding_may_be_off_in_training() -> None:
    """A trainer in high precision whose server is in low bits."""
    model = prepared(SCHEMES["int4 g64"])
    on = dict(sync.stream(model))
    qat.disable_(model)
    assert not differing(dict(sync.stream(model)), on)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_have_the_names_of_published_checkpoints(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"mlp": Mlp(torch.bfloat16)})
    model.config = Config(model_type)
    qat.prepare_(model, {"*.gate": None, "*": lowbit.Int4WeightOnly(32)})
    found = dict(sync.stream(model))
    names = ("w1", "w2") if model_type == "mixtral" else ("gate_proj", "down_proj")
    assert all(any(f".experts.2.{n}.weight_packed" in k for k in found) for n in names)
    qat.convert_(model)
    assert not differing(found, exported(model, tmp_path / "out", "compressed-tensors"))


def test_wrappers_are_not_in_the_names() -> None:
    model = prepared(SCHEMES["int4 g64"])
    expected = dict(sync.stream(model))
    model.up_proj = torch.compile(model.up_proj)
    model.down_proj = checkpoint_wrapper(model.down_proj)
    assert not differing(dict(sync.stream(model)), expected)


# ---- what is left out ------------------------------------------------------------------------------------------------


def test_known_weights_are_left_out() -> None:
    model, known = prepared(SCHEMES["int4 g64"]), {}
    first = dict(sync.stream(model, known=known))
    assert known.keys() == first.keys() and json.loads(json.dumps(known)) == known
    assert dict(sync.stream(model, known=known)) == {}
    with torch.no_grad():
        model.norm.bias.add_(1)
        model.down_proj.weight.mul_(2)
    names = {"norm.bias", *(f"down_proj.weight_{p}" for p in ("packed", "scale", "shape"))}
    assert dict(sync.stream(model, known=known)).keys() == names
    known["norm.bias"] = {**known["norm.bias"], "shape": [1, 256]}
    assert [*dict(sync.stream(model, known=known))] == ["norm.bias"]


def test_known_is_a_dict(tmp_path) -> None:
    for give in (
        lambda known: next(sync.stream(nn.Linear(8, 8), known=known)),
        lambda known: next(sync.read(tmp_path, known=known)),
    ):
        with pytest.raises(TypeError, match=r"known must be a dict.*got \[\]; start with an empty"):
            give([])


def test_a_weight_is_unknown_while_it_is_loaded() -> None:
    model, known = prepared(SCHEMES["int4 g64"]), {}
    dict(sync.stream(model, known=known))
    with torch.no_grad():
        model.up_proj.weight.mul_(2)
    for name, _ in sync.stream(model, known=known):
        assert name == "up_proj.weight_packed"
        break
    assert not [n for n in known if n.startswith("up_proj.weight")]
    assert len(dict(sync.stream(model, known=known))) == 3


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_sent_is_named() -> None:
    model = prepared(SCHEMES["int4 g64"])
    with pytest.raises(FormatError, match=r"fp8 cannot hold up_proj.weight: .*lossy=True"):
        dict(sync.stream(model, "fp8"))
    assert "up_proj.weight_scale_inv" in dict(sync.stream(model, "fp8", lossy=True))
    with pytest.raises(FormatError, match=r"unknown format 'int4'; accepted: lowbit"):
        dict(sync.stream(model, "int4"))
    with pytest.raises(
        FormatError, match=r"onnx is one file.*accepted: lowbit, compressed-tensors"
    ):
        dict(sync.stream(model, "onnx"))
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got dict"):
        dict(sync.stream({}))  # type: ignore[arg-type]
    model.up_proj.weight.weight[3, 3] = torch.inf
    with pytest.raises(
        ValueError, match=r"up_proj.weight, or a scale of it, has 1 NaN or infinite"
    ):
        dict(sync.stream(model))
    with pytest.raises(FormatError, match=r"embed_tokens.weight is on the meta device"):
        dict(sync.stream(build().to("meta")))


def test_an_input_that_was_not_calibrated_is_named() -> None:
    model = prepared(lowbit.Int8StaticActivationInt8Weight())
    with pytest.raises(ValueError, match=r"the input of up_proj.weight has no finite static scale"):
        dict(sync.stream(model))


class Adapted(nn.Module):
    """As PEFT wraps a layer."""

    active_adapters = ("default",)

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)


def test_adapters_are_refused() -> None:
    with pytest.raises(
        FormatError, match=r"0 and 0 other layers have adapters of PEFT.*merge_and_"
    ):
        dict(sync.stream(nn.Sequential(Adapted())))


# ---- files, and into a module ----------------------------------------------------------------------------------------


def test_a_folder_is_written_read_and_loaded(tmp_path: Path) -> None:
    model, known = prepared(SCHEMES["int4 g64"], tied=True), {}
    report = sync.write(model, tmp_path / "served", max_shard_size=40_000)
    assert report is not None and report.converted == ["up_proj.weight", "down_proj.weight"]
    found = dict(sync.read(tmp_path / "served", known=known))
    assert len([*(tmp_path / "served").glob("*.safetensors")]) > 1
    assert not differing(found, dict(sync.stream(model)))
    assert dict(sync.read(tmp_path / "served", known=known)) == {}
    served = lowbit.load_pretrained(tmp_path / "served", build(1, tied=True))
    with torch.no_grad():
        model.up_proj.weight.mul_(2)
    sync.write(model, tmp_path / "served", overwrite=True)
    names = dict(sync.read(tmp_path / "served", known=known)).keys()
    assert names == {
        f"up_proj.{n}" for n in ("bias", "weight_packed", "weight_scale", "weight_shape")
    }
    assert dict(sync.stream(model, known=known)) == {}

    assert sync.load_(served, sync.stream(model, "lowbit")) == 8
    qat.convert_(model)
    assert torch.equal(served(TOKENS), model(TOKENS))
    assert served.lm_head.weight is served.embed_tokens.weight


def test_damage_is_named(tmp_path: Path) -> None:
    sync.write(prepared(SCHEMES["int4 g64"]), tmp_path / "served")
    file = tmp_path / "served/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(FormatError, match=r"has other bytes than were written"):
        dict(sync.read(tmp_path / "served"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match=r"empty has no .*safetensors"):
        dict(sync.read(tmp_path / "empty"))
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "empty/model.safetensors")
    assert [*dict(sync.read(tmp_path / "empty"))] == ["a"]
    with pytest.raises(FormatError, match=r"has no digests"):
        dict(sync.read(tmp_path / "empty", known={}))


def test_what_does_not_fit_the_module_is_named() -> None:
    model = build()
    with pytest.raises(FormatError, match=r"up_proj, a Linear, has no weight_packed"):
        sync.load_(model, [("up_proj.weight_packed", torch.ones(1))])
    with pytest.raises(FormatError, match=r"norm, a LayerNorm: .*size mismatch for weight"):
        sync.load_(model, [("norm.weight", torch.ones(3))])
    with pytest.raises(FormatError, match=r"has no other.weight"):
        sync.load_(model, [("other.weight", torch.ones(3))])
    lowbit.quantize_(model, lowbit.Int8WeightOnly())
    with pytest.raises(
        FormatError, match=r"has no weight_packed: its weight is lowbit's own, so send"
    ):
        sync.load_(model, [("up_proj.weight_packed", torch.ones(1))])


# ---- memory ----------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """The most bytes of plain tensors that live at once, beside those of `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tensors: list[Any] = [
            getattr(t, "weight", t) for t in model.state_dict(keep_vars=True).values()
        ]
        self.seen = {t.untyped_storage()._cdata for t in tensors}
        self.live: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.live = [(ref, size) for ref, size in self.live if not ref.expired()]
        held = {ref.cdata for ref, _ in self.live} | self.seen
        for t in tree_leaves(found):
            if type(t) is Tensor and not t.is_meta and t.untyped_storage()._cdata not in held:
                storage = t.untyped_storage()
                self.live.append((StorageWeakRef(storage), storage.nbytes()))
                held.add(storage._cdata)
        self.peak = max(self.peak, sum(size for _, size in self.live))
        return found


@pytest.mark.parametrize("prepare", [True, False], ids=["QAT", "plain"])
def test_memory_is_that_of_a_few_tensors(prepare: bool) -> None:
    """A weight has 256 KiB, the model 100 of them, and all packed tensors have 13 of them."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(100)))
    if prepare:
        qat.prepare_(model, lowbit.Int4WeightOnly(128))
    with Live(model) as live:
        for _ in sync.stream(model):
            pass
    most = 6 if prepare else 1
    assert live.peak <= most * 2**18, live.peak / 2**18

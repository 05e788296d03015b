"""save and load restore every representation, ties, values and metadata; the files are readable without lowbit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lowbit as lb
from lowbit import checkpoint, qat
from lowbit.tensor import joined
from lowbit.tensor.core.state_dict import read_description
from tests.inference.test_report import BOTH, Model
from tests.schemes import SCHEMES, over, weight_specs

INT4 = lb.Int4WeightOnly(8)
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 19]])
ROOT = Path(__file__).resolve().parent.parent


def round_trip(state: Any, path: Path, **kwargs: Any) -> dict[str, Any]:
    lb.save(state, path, **kwargs)
    return lb.load(path)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert type(found[name]) is type(value.detach()), name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def select(module: nn.Module, name: str) -> bool:
    return isinstance(module, BOTH)


# ---- every representation ------------------------------------------------------------------------------------


@pytest.mark.cover("pairs")
@over(SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_quantized_models(tmp_path: Path, scheme: lb.Scheme, dtype) -> None:
    model = nn.Sequential(nn.Linear(19, 16), nn.Linear(16, 5, bias=False)).to(dtype)
    lb.quantize_(model, scheme)
    state = round_trip(model, tmp_path / "m.safetensors")
    assert_same(state, joined(model.state_dict()))
    fresh = nn.Sequential(nn.Linear(19, 16), nn.Linear(16, 5, bias=False)).to(dtype)
    fresh.load_state_dict(state, assign=True)
    x = torch.randn(3, 19, dtype=dtype)
    assert torch.equal(fresh(x), model(x))


def test_prepared_models(tmp_path: Path) -> None:
    model = Model()
    qat.prepare_(model, {"head": lb.Int8DynamicActivationInt4Weight(8), "*": INT4}, select)
    state = round_trip(model, tmp_path / "m.safetensors")
    assert_same(state, joined(model.state_dict()))
    for target in (Model(), Model()):
        target.load_state_dict(state, assign=True)
        assert target.head.weight.requires_grad
        assert target.head.weight.scheme == model.head.weight.scheme
        assert torch.equal(target(TOKENS), model(TOKENS))


@pytest.mark.parametrize("kind", ["AdamW4bit", "AdamW8bit", "AdamWFp8"])
def test_optimizer_states(tmp_path: Path, kind: str) -> None:
    """A flattened optimizer state dict continues training to the same bits."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
        model(torch.ones(2, 64) * i).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        return model, getattr(lb.optim, kind)(model.parameters(), lr=1e-2)

    model, optimizer = new()
    for i in range(3):
        step(model, optimizer, i)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    assert sum(isinstance(v, lb.CodebookTensor) for v in state.values()) == 4
    loaded = round_trip(state, tmp_path / "o.safetensors")
    assert_same(loaded, {k: list(v) if isinstance(v, tuple) else v for k, v in state.items()})
    weights = round_trip(model, tmp_path / "m.safetensors")
    step(model, optimizer, 3)

    resumed, other = new()
    resumed.load_state_dict(weights)
    set_optimizer_state_dict(resumed, other, loaded, options=options)
    step(resumed, other, 3)
    for (name, a), b in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


@settings(max_examples=60, deadline=None)
@given(weight_specs(3), st.lists(st.integers(0, 9), min_size=3, max_size=3))
@example(lb.Spec(lb.Int(1, signed=False), lb.PerRow(), "half_integer"), [2, 0, 1])
def test_plain_form_of_any_spec(spec: lb.Spec, shape: list[int]) -> None:
    weight = lb.AffineTensor.from_float(torch.randn(shape), spec)
    tensors, info = checkpoint.to_plain({"w": weight})
    assert all(type(t) is Tensor for t in tensors.values())
    found = checkpoint.from_plain(tensors, json.loads(json.dumps(info)))
    assert_same(found, {"w": weight})
    assert found["w"].spec == spec


@over(SCHEMES)
def test_experts_that_are_held_transposed(tmp_path: Path, scheme: lb.Scheme) -> None:
    """Their parts are those of the stored order. A release that does not know the kind refuses to read them."""
    module = nn.ParameterDict()
    made = lb.AffineTensor.from_float(torch.randn(2, 16, 24), scheme).transpose(-2, -1)
    module["up"] = nn.Parameter(made, requires_grad=False)
    state = module.state_dict()
    assert not any(isinstance(value, lb.LowbitTensor) for value in state.values())
    assert state._metadata[""]["lowbit"]["up"]["kind"] == f"{type(made).__name__}.mT"
    found = round_trip(module, tmp_path / "file.safetensors")["up"]
    assert found.transposed and torch.equal(found.dequantize(), made.dequantize())
    other = nn.ParameterDict()
    zeros = lb.AffineTensor.from_float(torch.zeros(2, 16, 24), scheme).transpose(-2, -1)
    other["up"] = nn.Parameter(zeros, requires_grad=False)
    other.load_state_dict(state)
    assert torch.equal(other["up"].dequantize(), made.dequantize())
    entry = {**state._metadata[""]["lowbit"]["up"], "kind": "AffineTensor.T"}
    with pytest.raises(ValueError, match="of unknown kind"):
        read_description("up", entry)


# ---- ties, views, values, metadata ---------------------------------------------------------------------------


@pytest.mark.parametrize("flow", ["plain", "quantized", "prepared"])
def test_ties_are_stored_once_and_come_back(tmp_path: Path, flow: str) -> None:
    model = Model(tied=True)
    if flow != "plain":
        (lb.quantize_ if flow == "quantized" else qat.prepare_)(model, INT4)
    path = tmp_path / "m.safetensors"
    state = round_trip(model, path)
    assert state["head.weight"] is state["embedding.weight"]
    tensors, info = checkpoint.to_plain(model.state_dict())
    assert info["ties"] == {"head.weight": "embedding.weight"}
    assert not any(name.startswith("head") for name in tensors)
    fresh = Model(tied=True)
    if flow == "plain":
        fresh.load_state_dict(state)
        assert fresh.head.weight is fresh.embedding.weight
    fresh.load_state_dict(state, assign=True)
    assert torch.equal(fresh(TOKENS), model(TOKENS))
    inner = (fresh.head.weight, fresh.embedding.weight)
    if flow != "plain":
        name = model.head.weight.tensor_attrs[0]
        inner = tuple(getattr(t, name) for t in inner)
    assert inner[0].data_ptr() == inner[1].data_ptr()


def test_equal_tensors_are_not_ties(tmp_path: Path) -> None:
    state = {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.empty(0), "d": torch.empty(0)}
    assert not checkpoint.to_plain(state)[1]["ties"]


def test_the_same_memory_under_two_schemes_is_not_a_tie() -> None:
    w = torch.randn(4, 8)
    state = {
        "a": lb.FakeQuantizedTensor(w, INT4),
        "b": lb.FakeQuantizedTensor(w, lb.Int8WeightOnly()),
        "c": w,
        "d": w.t(),
    }
    tensors, info = checkpoint.to_plain(state)
    assert not info["ties"]
    assert len({t.data_ptr() for t in tensors.values()}) == len(tensors)
    assert_same(checkpoint.from_plain(tensors, info), state)


def test_views_take_their_own_size_only(tmp_path: Path) -> None:
    base = torch.randn(2000, 100)
    state = {
        "first": base[:2],
        "overlapping": base[1:3],
        "transposed": base[:3].t(),
        "strided": base[:4, ::2],
        "flat": base[:2].view(-1),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "rows": lb.AffineTensor.from_float(base, INT4)[8:16],
    }
    path = tmp_path / "v.safetensors"
    assert_same(round_trip(state, path), state)
    assert path.stat().st_size < 20_000


def test_values_beside_tensors(tmp_path: Path) -> None:
    state = {
        "step": 12,
        "lr": 1e-3,
        "name": "Grüße",
        "flag": True,
        "nothing": None,
        "list": [1, [2.5, "x"], {"k": None}],
        "infinite": float("inf"),
        "scalar": torch.tensor(3.5),
        "count": torch.tensor([1, 2], dtype=torch.int64),
        "mask": torch.tensor([True, False]),
        "half": torch.randn(3).half(),
        "complex": torch.randn(2, dtype=torch.complex64),
        "float8": torch.randn(4).to(torch.float8_e5m2),
        "empty": torch.empty(0, 5),
    }
    loaded = round_trip(state, tmp_path / "v.safetensors")
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        if isinstance(value, Tensor):
            assert loaded[name].dtype is value.dtype and loaded[name].shape == value.shape
            assert torch.equal(
                loaded[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
            )
        else:
            assert loaded[name] == value and type(loaded[name]) is type(value)
    assert round_trip({"betas": (0.9, 0.95)}, tmp_path / "t.safetensors") == {"betas": [0.9, 0.95]}


def test_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    metadata = {"step": 3, "config": {"layers": [1, 2], "name": "small ✓"}, "none": None}
    lb.save(nn.Linear(2, 2), path, metadata=metadata)
    assert lb.load_metadata(path) == metadata
    lb.save(nn.Linear(2, 2), str(path))
    assert lb.load_metadata(str(path)) == {}


def test_onto_a_device(tmp_path: Path) -> None:
    model = nn.Linear(16, 4)
    lb.quantize_(model, INT4)
    path = tmp_path / "m.safetensors"
    lb.save(model, path)
    state = lb.load(path, device="meta")
    assert state["weight"].is_meta and state["weight"].codes.is_meta and state["bias"].is_meta
    assert state["weight"].shape == (4, 16) and state["weight"].spec == INT4.weight
    with pytest.raises(checkpoint.CheckpointError, match=r"on meta; only dense tensors"):
        lb.save(state, path)
    assert_same(lb.load(path, device=torch.device("cpu")), joined(model.state_dict()))


@pytest.mark.gpu
def test_onto_a_gpu_and_back(tmp_path: Path) -> None:
    model = Model(tied=True).cuda()
    lb.quantize_(model, INT4)
    path = tmp_path / "m.safetensors"
    lb.save(model, path)
    fresh = Model(tied=True).cuda()
    fresh.load_state_dict(lb.load(path, device="cuda"), assign=True)
    assert torch.equal(fresh(TOKENS.cuda()), model(TOKENS.cuda()))
    assert not lb.load(path)["head.weight"].is_cuda


def test_saving_again_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    lb.save({"a": torch.zeros(1000)}, path)
    path.chmod(0o600)
    lb.save({"b": torch.ones(2)}, path)
    assert lb.load(path).keys() == {"b"}
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "no temporary file stays behind"


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_a_file_has_the_rights_that_the_umask_leaves(
    tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """save never sets the umask, not even for a moment: files of other threads would be readable by all."""
    path = tmp_path / "m.safetensors"
    before = os.umask(umask)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")
            lb.save({"a": torch.ones(2)}, path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


# ---- torch.save, and readers that don't know lowbit ----------------------------------------------------------


def test_torch_save_of_whole_state_dicts(tmp_path: Path) -> None:
    model = Model(tied=True)
    lb.quantize_(model, {"layers.0.*": lb.Float8WeightOnly(), "*": INT4})
    other = Model()
    qat.prepare_(other, INT4)
    optimizer = lb.optim.AdamW4bit(other.parameters())
    other(TOKENS).sum().backward()
    optimizer.step()
    everything = {
        "model": model.state_dict(),
        "qat": other.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schemes": [INT4, lb.Int8DynamicActivationInt8Weight(), lb.PerBlock(4, 8)],
        "book": lb.CodebookTensor.from_float(torch.randn(4, 128), "4bit", signed=True),
    }
    torch.save(everything, tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    for part in ("model", "qat"):
        assert_same(dict(loaded[part]), dict(everything[part]))
    assert loaded["schemes"] == everything["schemes"]
    assert torch.equal(loaded["book"], everything["book"])
    optimizer.load_state_dict(loaded["optimizer"])


READER = """
    import json, sys, torch
    from safetensors import safe_open

    for path in sys.argv[1:]:
        with safe_open(path, framework="pt") as file:
            info = json.loads(file.metadata()["lowbit"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        assert info["format_version"] == 1 and info["metadata"] == {"step": 7}
        assert info["ties"] == {"head.weight": "embedding.weight"}
        entry = info["tensors"]["embedding.weight"]
        assert entry["scheme"]["weight"] == {
            "format": {"bits": 4, "signed": True}, "granularity": ["PerGroup", 8],
            "mapping": "symmetric_no_clipping_err"}
        packed, scale = tensors["embedding.weight.codes"], tensors["embedding.weight.scale"]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int() - 8
        values = (codes.view(20, 2, 8) * scale[..., None]).view(entry["shape"])
        assert values.dtype == getattr(torch, entry["dtype"])
        assert torch.equal(values, tensors["expected"]), path
        assert "lowbit" not in sys.modules

    import lowbit
    for path in sys.argv[1:]:
        state = lowbit.load(path)
        assert torch.equal(state["head.weight"].dequantize(), state["expected"])
        assert state["head.weight"] is state["embedding.weight"]
        weight = state["layers.0.up.weight"]
        y = torch.nn.functional.linear(torch.ones(1, 16), weight, state["layers.0.up.bias"])
        assert torch.equal(y, state["output"])
    print("read")
"""


def test_read_by_a_fresh_process_with_and_without_lowbit(tmp_path: Path) -> None:
    model = Model(tied=True)
    lb.quantize_(model, {"layers.*": lb.Int8DynamicActivationInt8Weight(), "*": INT4}, select)
    state = model.state_dict()
    state["expected"] = model.head.weight.dequantize()
    state["output"] = model.layers[0].up(torch.ones(1, 16)).detach()
    path = tmp_path / "m.safetensors"
    lb.save(state, path, metadata={"step": 7})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READER), str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "read\n"


def test_a_folder_in_the_files_place_is_named(tmp_path):
    (tmp_path / "m.safetensors").mkdir()
    with pytest.raises(
        lb.CheckpointError, match=r"m\.safetensors is a folder; give the name of a file"
    ):
        lb.save({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    assert [*tmp_path.iterdir()] == [tmp_path / "m.safetensors"]


@pytest.mark.parametrize("read", [lb.load, lb.load_metadata])
@pytest.mark.parametrize("name", ["model", "m.safetensors"])
def test_loading_a_folder_names_what_reads_it(read, name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(lb.CheckpointError, match=r"is a folder; .*lowbit\.load_pretrained reads"):
        read(tmp_path / name)

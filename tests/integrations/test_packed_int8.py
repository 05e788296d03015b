"""Published folders trained in int8 and written back: unchanged matrices keep their bytes, others are on the grid."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import Int4Weight, Int8Weight, LowbitTensor, sync, train
from lowbit.formats import FormatError
from lowbit.tensor.trained.int8_weight import Int8WeightTensor
from tests.covering import usually
from tests.integrations.models import TOKENS
from tests.integrations.packed_models import KINDS, publish, stored, sums
from tests.schemes import relative_error

pytest.importorskip("safetensors")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")

EXPERTS = {"*.mlp.experts.*": Int8Weight(), "*": None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> Any:
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = publish(kind, tmp_path_factory.mktemp("packed") / "published")
        return made[kind]

    return of


def in_int8(folder: Path, scheme: Any = EXPERTS) -> Any:
    model = lowbit.load_pretrained(folder).requires_grad_(False)
    train.prepare_(model, scheme)
    return model


def optimizer_of(model: Any, kind: type = lowbit.optim.AdamW8bit) -> Any:
    weights = [p for p in model.parameters() if p.requires_grad]
    return kind(weights, lr=1e-2, weight_decay=0.0, weight_correction="momentum")


def steps(model: Any, optimizer: Any, count: int) -> list[float]:
    """Losses of steps in which no gradient reaches the last expert."""
    losses = []
    for _ in range(count):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        for p in model.parameters():
            if p.ndim == 3 and p.grad is not None:
                p.grad[-1] = 0
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", usually(KINDS, "Qwen3-MoE int4", "gpt-oss MXFP4"))
def test_untrained_weights_keep_the_bytes_of_the_folder(
    kind: str, folders: Any, tmp_path: Path
) -> None:
    """All linears and experts, packed or plain."""
    model = in_int8(folders(kind), Int8Weight())
    assert not [n for n, p in model.named_parameters() if type(p).__name__ == "AffineTensor"]
    with pytest.raises(FormatError, match=r"int8-row.*; lossy=True (rounds|writes) it"):
        sync.write(model, tmp_path / "exact", like=folders(kind))
    sync.write(model, tmp_path / "out", like=folders(kind), lossy=True)
    assert sums(tmp_path / "out") == sums(folders(kind))


@pytest.mark.parametrize("kind", ["Qwen3-MoE int4", "gpt-oss MXFP4"])
def test_trained_experts_are_rounded_to_the_grid_of_the_folder(
    kind: str, folders: Any, tmp_path: Path
) -> None:
    folder, out = folders(kind), tmp_path / "out"
    model = in_int8(folder)
    losses = steps(model, optimizer_of(model), 4)
    assert losses[-1] < losses[0] - 0.1
    sync.write(model, out, like=folder, lossy=True)
    lowbit.export(model, tmp_path / "in training", like=folder, lossy=True)
    train.convert_(model)
    lowbit.export(model, tmp_path / "converted", like=folder, lossy=True)
    own, theirs = sums(out), sums(folder)
    assert own == sums(tmp_path / "converted") == sums(tmp_path / "in training")
    assert {n: s[:3] for n, s in own.items()} == {n: s[:3] for n, s in theirs.items()}
    changed = {name for name in own if own[name] != theirs[name]}
    assert changed and all(".experts." in name for name in changed)
    again = lowbit.load_pretrained(out)
    for (name, p), trained in zip(again.named_parameters(), model.parameters(), strict=True):
        if ".experts." in name and isinstance(p, LowbitTensor):
            values, wanted = p.dequantize(), trained.dequantize()
            assert 1e-3 < relative_error(values, wanted) < 0.15, name
            untrained = lowbit.load_pretrained(folder).get_parameter(name).dequantize()
            assert torch.equal(values[-1], untrained[-1]), name
            assert not torch.equal(values[0], untrained[0]), name


@pytest.mark.parametrize("kind", [lowbit.optim.AdamW8bit, lowbit.optim.AdamW4bit])
def test_a_run_resumes_with_the_same_bits(kind: type, folders: Any) -> None:
    folder = folders("Qwen3-MoE int4")
    whole, first, second = (in_int8(folder) for _ in range(3))
    steps(whole, optimizer_of(whole, kind), 4)
    optimizer = optimizer_of(first, kind)
    steps(first, optimizer, 2)
    held = copy.deepcopy([first.state_dict(), optimizer.state_dict()])
    optimizer = optimizer_of(second, kind)
    second.load_state_dict(held[0])
    optimizer.load_state_dict(held[1])
    steps(second, optimizer, 2)
    for (name, a), b in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert _same(a, b), name


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, LowbitTensor):
        return torch.equal(a, b)
    pairs = zip(a.inner_tensors().values(), b.inner_tensors().values(), strict=True)
    return type(a) is type(b) and all(torch.equal(x, y) for x, y in pairs)


def test_what_training_starts_from(folders: Any) -> None:
    """The values of the packed weight, rounded as plain ones are; also in groups of 4 bits. Schemes with products in
    int8 leave experts [experts, inputs, outputs] packed."""
    folder = folders("gpt-oss MXFP4")
    packed = dict(lowbit.load_pretrained(folder).named_parameters())
    name = "model.layers.0.mlp.experts.down_proj"
    for scheme in (Int8Weight(), Int4Weight(32)):
        found = in_int8(folder, scheme).get_parameter(name)
        expected = type(found)(packed[name].dequantize(), scheme, name)
        assert _same(found, expected) and found.requires_grad
    model = lowbit.load_pretrained(folder)
    report = train.prepare_(model, Int8Weight(True, True, True, always=True))
    assert "no low-bit products" in report.left[name]
    assert not isinstance(model.get_parameter(name), Int8WeightTensor)


@pytest.mark.parametrize("stored_as", ["sparse24", "ordered", "rotated"])
def test_other_forms_stay_packed(stored_as: str) -> None:
    """A folder could not get them back: zeros in their places, the order of inputs, a rotation."""
    assert not Int8Weight().starts_from(SimpleNamespace(stored_as=stored_as))


def test_one_change_of_a_plain_weight_is_written(folders: Any, tmp_path: Path) -> None:
    """A code that moved by one step is a change."""
    folder = folders("gpt-oss MXFP4")
    model = in_int8(folder, {"*.layers.0.self_attn.q_proj": Int8Weight(), "*": None})
    weight: Any = model.model.layers[0].self_attn.q_proj.weight
    row, column = divmod(int(weight.codes.abs().argmin()), weight.shape[1])
    weight.codes[row, column] += 1
    sync.write(model, tmp_path / "out", like=folder, lossy=True)
    name = "model.layers.0.self_attn.q_proj.weight"
    written: Tensor = stored(tmp_path / "out")[name][1]
    assert torch.equal(written, weight.dequantize())
    assert [n for n, s in sums(tmp_path / "out").items() if s != sums(folder)[n]] == [name]

"""Damage: after a change of any byte, a file loads the same values to the bit, or an error names the damaged part."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit import checkpoint
from lowbit.checkpoint import CheckpointError
from lowbit.files import container, digests
from lowbit.tensor import joined
from tests.tensor.cases import same_bits

INT4 = lb.Int4WeightOnly(8)
METADATA = {"step": 7, "note": "as it was"}


def contents() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weight = lb.AffineTensor.from_float(values(8, 16), INT4)
    return {
        "int4.weight": weight,
        "tied": weight,
        "float8.weight": lb.AffineTensor.from_float(values(4, 16), lb.Float8WeightOnly()),
        "state": lb.CodebookTensor.from_float(values(4, 64), "4bit", signed=True),
        "bf16": values(5).bfloat16(),
        "float8": values(3).to(torch.float8_e5m2),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor([1, 2], dtype=torch.int64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "complex": torch.randn(2, dtype=torch.complex64, generator=generator),
        "step": 12,
        "betas": [0.9, 0.95],
    }


def equal(found: Any, expected: Any) -> bool:
    if type(found) is not type(expected):
        return False
    if isinstance(expected, lb.LowbitTensor):
        parts = expected.inner_tensors()
        return (
            (found.shape, found.dtype, found.meta()) == (expected.shape, expected.dtype, expected.meta())
            and found.inner_tensors().keys() == parts.keys()
            and all(equal(getattr(found, name), part) for name, part in parts.items())
        )  # fmt: skip
    if isinstance(expected, Tensor):
        return same_bits(found.reshape(-1), expected.reshape(-1)) and found.shape == expected.shape
    return found == expected


def outcome(path: Path, expected: dict[str, Any]) -> str:
    """ "as it was", or the error's message; anything else is silent damage."""
    try:
        state, metadata = lb.load(path), lb.load_metadata(path)
    except CheckpointError as error:
        assert str(path) in str(error)
        return str(error)
    assert list(state) == list(expected) and metadata == METADATA
    assert (state["tied"] is state["int4.weight"]) and all(
        equal(state[name], value) for name, value in expected.items()
    )
    return "as it was"


def test_one_changed_byte_anywhere(tmp_path: Path) -> None:
    path, expected = tmp_path / "m.safetensors", contents()
    lb.save(expected, path, metadata=METADATA)
    expected = lb.load(path)
    content = path.read_bytes()
    found = []
    for i in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[i] ^= 1 << i % 8
        path.write_bytes(damaged)
        found.append(outcome(path, expected))
    errors = [message for message in found if message != "as it was"]
    assert len(errors) > len(found) / 3
    assert any("description" in message for message in errors)
    assert any("other bytes than the saved ones" in message for message in errors)


def elements(path: Path, t: Tensor) -> int:
    """Where the bytes of `t` lie in the file."""
    raw = bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist())
    content = path.read_bytes()
    assert content.count(raw) == 1
    return content.index(raw)


@pytest.mark.parametrize(
    ("name", "part"), [("int4.weight", "codes"), ("float8.weight", "scale"), ("bf16", None)]
)
def test_the_tensor_is_named(tmp_path: Path, name: str, part: str | None) -> None:
    path, state = tmp_path / "m.safetensors", contents()
    lb.save(state, path)
    at = elements(path, getattr(state[name], part) if part else state[name])
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
    stored = f"{name}.{part}" if part else name
    with pytest.raises(CheckpointError, match=rf"{re.escape(stored)} is damaged: other bytes"):
        lb.load(path)
    damaged = lb.load(path, verify=False)
    assert not equal(damaged[name], state[name]), "that is what verify=False asks for"
    assert all(equal(v, state[n]) for n, v in damaged.items() if n not in (name, "tied"))


def rewritten(path: Path, change: Any) -> None:
    """A file with changed tensors and the old text and digests."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def swap(tensors: dict[str, Tensor]) -> None:
    tensors["a"], tensors["b"] = tensors["b"], tensors["a"]


CHANGES = {
    "swapped": (swap, "a, b are damaged: other bytes"),
    "missing": (lambda t: t.pop("a"), "a is missing"),
    "renamed": (lambda t: t.update(d=t.pop("a")), "a is missing"),
    "strange": (lambda t: t.update(d=torch.ones(2)), "d is not among those that were saved"),
    "reshaped": (
        lambda t: t.update(a=t["a"].view(2, 3)),
        r"a is damaged: it has .*\[2, 3\].*\[6\]",
    ),
    "another dtype": (
        lambda t: t.update(a=t["a"].view(torch.int32)),
        "it has .*int32.*was saved with .*float32",
    ),
    "one value": (lambda t: t["b"].add_(1), "b is damaged"),
    "the sign of a zero": (lambda t: t["c"].neg_(), "c is damaged"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_tensors_are_named(tmp_path: Path, name: str) -> None:
    change, match = CHANGES[name]
    path = tmp_path / "m.safetensors"
    lb.save({"a": torch.arange(6.0), "b": torch.ones(6), "c": torch.zeros(1)}, path)
    rewritten(path, change)
    with pytest.raises(CheckpointError, match=match):
        lb.load(path)
    assert lb.load(path, verify=False)
    if name in ("missing", "renamed", "strange", "reshaped", "another dtype"):
        with pytest.raises(CheckpointError, match=match):
            lb.load(path, device="meta")


@pytest.mark.parametrize("lost", ["the description's", "the tensors'"])
def test_digests_that_got_lost(tmp_path: Path, lost: str) -> None:
    """A file may lose the digest of its description, or those of its tensors."""
    path = tmp_path / "m.safetensors"
    tensors, info = checkpoint.to_plain({"a": torch.ones(2)})
    text = json.dumps(info if lost == "the tensors'" else {**info, "stored": {}})
    beside = {"lowbit": text}
    if lost == "the tensors'":
        beside[container.SEAL] = digests.of_text(text)
    from safetensors.torch import save_file

    save_file(tensors, path, metadata=beside)
    for read in (lb.load, lb.load_metadata):
        with pytest.raises(CheckpointError, match=f"lost the digests of its {lost[4:-2]}"):
            read(path)
        read(path, verify=False)


def test_anyone_can_verify(tmp_path: Path) -> None:
    """Reads the digests by the documented format alone."""
    import hashlib

    path = tmp_path / "m.safetensors"
    lb.save({"w": contents()["int4.weight"], "scalar": torch.tensor(2.0)}, path)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        text, seal = (file.metadata()[key] for key in ("lowbit", "lowbit_sha256"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert hashlib.sha256(text.encode()).hexdigest() == seal
    stored = json.loads(text)["stored"]
    assert stored.keys() == tensors.keys() == {"w.codes", "w.scale", "scalar"}
    for name, t in tensors.items():
        expected = hashlib.sha256(t.numpy().tobytes()).hexdigest()
        dtype = str(t.dtype).removeprefix("torch.")
        assert stored[name] == {"dtype": dtype, "shape": list(t.shape), "sha256": expected}


def test_views_that_are_conjugated_or_negated(tmp_path: Path) -> None:
    """The values, not the bytes that they were made of."""
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conjugate": z.conj(), "negative": z.conj().imag}
    lb.save(state, tmp_path / "m.safetensors")
    for name, value in lb.load(tmp_path / "m.safetensors").items():
        assert torch.equal(value, state[name]), name


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))


def damaged_model(path: Path) -> nn.Module:
    """The file of a quantized model whose last weight's codes are damaged."""
    made = model()
    lb.quantize_(made, INT4)
    lb.save(made, path)
    content = bytearray(path.read_bytes())
    content[elements(path, made[2].weight.codes)] ^= 1
    path.write_bytes(content)
    return made


BAD = r"2\.weight\.codes is damaged: other bytes"


def test_only_the_damaged_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    made = damaged_model(path)
    with pytest.raises(CheckpointError, match=BAD):
        lb.load(path)
    assert lb.load(path, verify=False).keys() == joined(made.state_dict()).keys()


@pytest.mark.gpu
def test_damage_is_found_on_the_way_to_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    damaged_model(path)
    with pytest.raises(CheckpointError, match=BAD):
        lb.load(path, device="cuda")
    assert lb.load(path, device="cuda", verify=False)["2.weight"].is_cuda


# ---- digests made on a device --------------------------------------------------------------------------------------


def mixed(data: bytes) -> str:
    """The formula of `mixed_sums` in Python's integers."""

    def shifted(x: int, bits: int) -> int:
        return x ^ (x >> bits)

    sums = [0, 0]
    data += bytes(-len(data) % 8)
    for i in range(len(data) // 8):
        x = int.from_bytes(data[8 * i : 8 * i + 8], "little")
        x ^= (i + 1) * 0x9E3779B97F4A7C15 % 2**64
        for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = shifted(x, bits) * factor % 2**64
        x = shifted(x, 31)
        sums[0] += x
        sums[1] += shifted(x * 0xD6E8FEB86659FD93 % 2**64, 32)
    return "".join(f"{total % 2**64:016x}" for total in sums)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 24, 1003])
def test_sums_on_a_device(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_MIXED", 64)
    t = torch.randint(0, 256, (size + 1,), dtype=torch.uint8)[1:]  # not aligned
    assert digests.mixed_sums(t) == mixed(bytes(t.tolist()))
    assert digests.mixed_sums(t.view(1, -1).expand(3, -1)) == mixed(bytes(t.tolist()) * 3)


def test_sums_tell_signs_and_places() -> None:
    """Changes that a sum of products would lose: two highest bits, and two words that changed places."""
    t = torch.randn(64, dtype=torch.bfloat16)
    signs, swapped = t.clone(), t.clone()
    signs[[3, 11]] *= -1
    swapped[:4], swapped[4:8] = t[4:8], t[:4]
    assert (
        len({digests.mixed_sums(x) for x in (t, signs, swapped, t[:63], t.view(torch.int16))}) == 4
    )
    assert digests.fingerprint(t).keys() == {"sha256"}

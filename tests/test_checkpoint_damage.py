"""Files that cannot be read or written give a clear error, and an existing file stays."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import lowbit as lb
from lowbit import checkpoint, qat
from lowbit.checkpoint import CheckpointError
from lowbit.files import digests, tensor_file
from lowbit.formats.base import FormatError
from lowbit.formats.folder import Folder
from tests.tensor.cases import same_bits
from tests.test_checkpoint_versions import rewrite

INT4 = lb.Int4WeightOnly(8)


def quantized() -> nn.Module:
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8))
    lb.quantize_(model, INT4)
    return model


# ---- reading -------------------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path) -> None:
    for read in (lb.load, lb.load_metadata):
        with pytest.raises(FileNotFoundError, match=r"nothing.safetensors is not a file"):
            read(tmp_path / "nothing.safetensors")
        (tmp_path / "folder.safetensors").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match=r"is a folder.*load_pretrained"):
            read(tmp_path / "folder.safetensors")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00", b"hello", b"PK\x03\x04", b"\x80\x02]q\x00.", bytes(range(256)) * 40, b"{}" * 50],
    ids=["empty", "one byte", "text", "zip start", "pickle", "garbage", "json"],
)
def test_files_that_are_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    for read in (lb.load, lb.load_metadata):
        with pytest.raises(CheckpointError, match=re.escape(str(path))) as error:
            read(path)
        assert "truncated, damaged or not" in str(error.value) or "not written by" in str(
            error.value
        )
        assert "weights_only" not in str(error.value), "torch advises to unpickle anything"
    assert path.read_bytes() == content


def test_truncated_files(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    lb.save(quantized(), path)
    content = path.read_bytes()
    for share in (0.001, 0.01, 0.1, 0.5, 0.9, 0.999):
        path.write_bytes(content[: max(1, int(len(content) * share))])
        with pytest.raises(CheckpointError, match="truncated, damaged"):
            lb.load(path)
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError):
        lb.load(path)


@pytest.mark.parametrize("change", ["replaced", "touched", "removed"])
def test_a_file_that_changes_between_its_header_and_its_tensors(
    tmp_path: Path, change: str
) -> None:
    model, folder = quantized(), tmp_path / "folder"
    lb.export(model, folder, format="lowbit")
    path = folder / "model.safetensors"
    read, opened = tensor_file.TensorFile(path), Folder(folder)
    if change == "touched":
        os.utime(path, ns=(0, 0))
    elif change == "replaced":
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes())
        other.replace(path)
    else:
        path.unlink()
    with pytest.raises(tensor_file.ReplacedFileError, match=r"model\.safetensors was replaced"):
        read.tensor("0.bias")
    with pytest.raises(FormatError, match="was replaced or changed after its header"):
        opened.read("0.weight")


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("out of memory"), RuntimeError("can't allocate memory: out of memory")],
)
@pytest.mark.parametrize(
    ("owner", "function"), [(Tensor, "to"), (lb.AffineTensor, "from_inner"), (digests, "of_tensor")]
)
def test_short_memory_is_not_damage(
    owner: Any, function: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lb.save(quantized(), path := tmp_path / "m.safetensors")

    def short(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(owner, function, short)
    with pytest.raises(type(error), match="out of memory"):
        lb.load(path)


@settings(max_examples=60)
@given(data=st.data())
def test_flipped_bits_never_crash(tmp_path_factory, data: st.DataObject) -> None:
    """A damaged file is an error that names it, or, where only values changed, still a state dict."""
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    lb.save({"w": lb.AffineTensor.from_float(torch.ones(4, 8), INT4), "n": 3}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        state = lb.load(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert isinstance(state, dict)


def test_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(nn.Linear(2, 2).state_dict(), path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not written by lowbit\.save; load it"):
        lb.load(path)


def header(tensors: dict[str, Any], metadata: Any = None) -> bytes:
    """The header of a file of safetensors as it is written, however wrong it is."""
    text = json.dumps({"__metadata__": metadata or {"lowbit": "{}"}, **tensors}).encode()
    return struct.pack("<Q", len(text)) + text


def entry(dtype: Any = "F32", shape: Any = (2,), place: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": place}


HEADERS: dict[str, bytes] = {
    "a header beyond the file": struct.pack("<Q", 2**62),
    "a header that is a list": struct.pack("<Q", 2) + b"[]",
    "deep": struct.pack("<Q", 10**5) + b"[" * 10**5,
    "metadata of numbers": header({}, {"lowbit": 3}),
    "an unknown dtype": header({"a": entry("F7")}) + bytes(8),
    "no dtype": header({"a": {"shape": [2], "data_offsets": [0, 8]}}) + bytes(8),
    "a negative size": header({"a": entry(shape=[-2, -1])}) + bytes(8),
    "sizes that are not numbers": header({"a": entry(shape="22")}) + bytes(8),
    "half a byte": header({"a": entry("F4", [2, 3], (0, 3))}) + bytes(3),
    "more than its bytes": header({"a": entry(shape=[2**40])}) + bytes(8),
    "beyond the end": header({"a": entry(place=(8, 16))}) + bytes(8),
    "one tensor in another": header({"a": entry(), "b": entry()}) + bytes(8),
    "a hole": header({"a": entry(), "b": entry(place=(12, 20))}) + bytes(20),
    "bytes of no tensor": header({"a": entry()}) + bytes(12),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_do_not_fit(name: str, tmp_path: Path) -> None:
    """Each is refused before a tensor takes its size in memory."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(HEADERS[name])
    for read in (lb.load, lb.load_metadata):
        with pytest.raises(CheckpointError, match="cannot be read") as caught:
            read(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_every_dtype_is_read_by_the_package_and_from_it(tmp_path: Path) -> None:
    """Also tensors at odd bytes, as other programs may write them."""
    from safetensors.torch import load_file, save_file

    path, other = tmp_path / "m.safetensors", tmp_path / "other.safetensors"
    kinds = {n: d for n, d in tensor_file._DTYPES.items() if n not in ("F4", "F8_E8M0")}
    state = {n: torch.arange(6).view(2, 3).to(d) for n, d in kinds.items()}
    lb.save(state, path)
    found = load_file(path)
    save_file(state, other)
    read = tensor_file.TensorFile(other)
    for name, t in state.items():
        assert same_bits(found[name], t) and same_bits(read.tensor(name), t), name
    pairs = {
        n: torch.zeros(2, 3, dtype=torch.uint8).view(tensor_file._DTYPES[n])
        for n in ("F4", "F8_E8M0")
    }
    lb.save(pairs, path)
    assert {n: t.dtype for n, t in lb.load(path).items()} == {n: t.dtype for n, t in pairs.items()}
    odd = header({"a": entry("U8", [1], (0, 1)), "b": entry(place=(1, 9))})
    path.write_bytes(odd + bytes(1) + struct.pack("<ff", 1.0, 2.0))
    assert tensor_file.TensorFile(path).tensor("b").tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", ["m.bin", "m", "m.PT", "m.safetensor", "m.pt.gz", "m.pt"])
def test_suffixes(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    suffix = Path(name).suffix
    for call in (
        lambda: lb.save(quantized(), path),
        lambda: lb.load(path),
        lambda: lb.load_metadata(path),
    ):
        with pytest.raises(CheckpointError, match=rf"'{suffix}'; accepted: .safetensors$"):
            call()
    assert not path.exists()


def weight_entry(info: dict[str, Any]) -> dict[str, Any]:
    return info["tensors"]["w"]


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no tensors": (lambda i: i.pop("tensors"), "no 'tensors'"),
    "no ties": (lambda i: i.pop("ties"), "no 'ties'"),
    "no values": (lambda i: i.pop("values"), "no 'values'"),
    "tensors are a list": (lambda i: i.update(tensors=[]), "no 'tensors', or a damaged one"),
    "tie to nothing": (lambda i: i["ties"].update(t="gone"), "t is tied to gone, which is missing"),
    "unknown kind": (
        lambda i: weight_entry(i).update(kind="Int2Tensor"),
        "'Int2Tensor'.*AffineTen",
    ),
    "entry is not a dict": (
        lambda i: i["tensors"].update(w=3),
        "w is described as 3, of unknown kind",
    ),
    "no scheme": (lambda i: weight_entry(i).pop("scheme"), "w cannot be put together.*scheme"),
    "bad bits": (
        lambda i: weight_entry(i)["scheme"]["weight"]["format"].update(bits=99),
        "1 to 8 bits, got 99",
    ),
    "bad granularity": (
        lambda i: weight_entry(i)["scheme"]["weight"].update(granularity=["PerMoon"]),
        "unknown granularity 'PerMoon'; accepted: PerTensor",
    ),
    "other bits": (
        lambda i: weight_entry(i)["scheme"]["weight"]["format"].update(bits=8),
        r"w cannot.*codes of shape \(4, 4\).*expected .*\(4, 8\)",
    ),
    "other group": (
        lambda i: weight_entry(i)["scheme"]["weight"].update(granularity=["PerGroup", 4]),
        r"w cannot.*scale of shape \(4, 1\).*expected .*\(4, 2\)",
    ),
    "other kind": (
        lambda i: weight_entry(i).update(kind="Float8Tensor"),
        "w cannot.*Float8Tensor does not store",
    ),
    "kind of other parts": (
        lambda i: weight_entry(i).update(kind="FakeQuantizedTensor"),
        "w has none of its parts weight",
    ),
    "other shape": (lambda i: weight_entry(i).update(shape=[5, 8]), r"w cannot.*\(5, 4\)"),
    "negative shape": (lambda i: weight_entry(i).update(shape=[-4, 8]), "w cannot be put together"),
    "shape of text": (lambda i: weight_entry(i).update(shape="4x8"), "w cannot be put together"),
    "no shape": (lambda i: weight_entry(i).pop("shape"), "w cannot be put together"),
    "huge shape": (lambda i: weight_entry(i).update(shape=[2**62, 2**62]), "w (cannot|has)"),
    "integer dtype": (lambda i: weight_entry(i).update(dtype="int64"), "dtype torch.int64"),
    "no such dtype": (lambda i: weight_entry(i).update(dtype="float7"), "float7"),
    "dtype of another kind": (lambda i: weight_entry(i).update(dtype="load"), "w cannot be put"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_descriptions_that_do_not_fit(tmp_path: Path, name: str) -> None:
    change, match = DAMAGES[name]
    weight = lb.AffineTensor.from_float(torch.randn(4, 8), INT4)
    path = tmp_path / "m.safetensors"
    lb.save({"w": weight, "t": weight, "n": 3}, path)
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=match) as error:
        lb.load(path)
    assert str(path) in str(error.value)


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def zero_point(tensors: dict[str, Tensor]) -> None:
    tensors["w.zero_point"] = torch.zeros(4, 1)


@pytest.mark.parametrize(
    ("mapping", "change", "match"),
    [
        ("symmetric", lambda t: t.pop("w.codes"), r"w cannot.* has no codes; expected"),
        ("symmetric", lambda t: t.pop("w.scale"), r"w cannot.* has no scale"),
        ("symmetric", lambda t: [t.pop(f"w.{p}") for p in ("codes", "scale")], "none of its parts"),
        ("symmetric", put("w.codes", lambda c: c[:3]), r"codes of shape \(3, 4\)"),
        ("symmetric", put("w.codes", Tensor.float), r"codes of .*torch.float32.*torch.uint8"),
        ("symmetric", put("w.scale", lambda s: s[:, :0]), r"scale of shape \(4, 0\)"),
        ("symmetric", put("w.scale", Tensor.int), r"scale of torch.int32 does not fit"),
        ("symmetric", zero_point, r"zero_point .*does not fit.*expected none"),
        ("asymmetric", lambda t: t.pop("w.zero_point"), r"w cannot.* has no zero_point; expected"),
        ("asymmetric", zero_point, r"zero_point of .*float32.*int8"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, mapping: Any, change: Any, match: str) -> None:
    weight = lb.AffineTensor.from_float(torch.randn(4, 8), lb.Int4WeightOnly(8, mapping))
    tensors, info = checkpoint.to_plain({"w": weight})
    change(tensors)
    path = tmp_path / "m.safetensors"
    save_file(tensors, path, metadata={"lowbit": json.dumps(info)})
    with pytest.raises(CheckpointError, match=match):
        lb.load(path, verify=False)


@pytest.mark.parametrize("text", ["not json", "[1, 2]", "3", "{}", "[" * 100_000])
def test_texts_that_do_not_fit(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(2)}, path, metadata={"lowbit": text})
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        lb.load(path)


# ---- writing -------------------------------------------------------------------------------------------------


def transposed() -> Tensor:
    return lb.AffineTensor.from_float(torch.randn(4, 8), INT4).t()


class Unknown(lb.LowbitTensor):
    tensor_attrs = ("part",)
    is_described = False


UNSAVABLE = {
    "object": ({"a": object()}, r"a is a object, which is neither a tensor nor plain JSON"),
    "nested": ({"state": {"a": torch.ones(2)}}, r"state\.a is a tensor.*flatten"),
    "set in a list": ({"a": [1, {2}]}, r"a\[1\] is a set"),
    "integer keys": ({"a": {1: 2}}, r"a has the key 1, of type int; JSON has only str keys"),
    "integer names": ({3: torch.ones(2)}, r"names must be str, got 3"),
    "meta": ({"a": torch.empty(2, device="meta")}, r"a is a .* on meta; only dense"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, r"a is a torch.sparse_coo tensor.*to_dense"),
    "transposed": (
        {"a": lb.FakeQuantizedTensor(torch.randn(4, 8), INT4).t()},
        r"a is a transposed .*save the original",
    ),
    "flattened": (
        {"a": lb.AffineTensor.from_float(torch.randn(4, 8), INT4).view(-1)},
        r"a is a transposed or flattened view",
    ),
    "name taken": (
        {"w": transposed().t(), "w.codes": torch.ones(2)},
        r"w\.codes would be taken for a part of w; rename",
    ),
    "name of a part that it has not": (
        {"w.zero_point": torch.ones(2), "w": transposed().t()},
        r"w\.zero_point would be taken for a part of w; rename",
    ),
    "unknown subclass": (
        {"a": Unknown.from_inner({"part": torch.ones(2)}, {}, (2,), torch.float32)},
        r"a is a Unknown; the format knows AffineTensor",
    ),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_a_failed_save_leaves_the_old_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.safetensors"
    lb.save({"old": torch.ones(3)}, path)
    before = path.read_bytes()
    state, match = UNSAVABLE[name]
    with pytest.raises(CheckpointError, match=match):
        lb.save(state, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr
)
def test_a_failure_while_writing_leaves_the_file(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    lb.save({"old": torch.ones(3)}, path)
    before = path.read_bytes()

    def fail(t: Tensor, write: Callable[[bytes], Any]) -> str:
        write(b"half of it")
        raise error

    monkeypatch.setattr(digests, "while_written", fail)
    with pytest.raises(type(error)) as caught:
        lb.save(quantized(), path)
    if isinstance(error, OSError):
        assert str(caught.value) == f"[Errno 28] No space left on device: '{path}'"
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of the size of files")
@pytest.mark.parametrize("limit", [20, 1500, 40_000])
def test_the_system_refuses_to_write(tmp_path: Path, limit: int) -> None:
    """After so many bytes of a file, in the header, the tensors, or the end. `torch.save` said "unexpected pos"."""
    import resource

    path, before = tmp_path / "m.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {f"layer.{i}.weight": torch.zeros(16, 64) for i in range(10)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{re.escape(str(path))}'"):
            lb.save(state, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*tmp_path.iterdir()] == []


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing is not a folder; make it first"):
        lb.save(quantized(), tmp_path / "missing" / "m.safetensors")


def test_without_the_safetensors_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    lb.save(quantized(), tmp_path / "m.safetensors")
    assert "0.weight" in lb.load(tmp_path / "m.safetensors")


def test_a_state_dict_that_does_not_fit_the_model(tmp_path: Path) -> None:
    """load_state_dict names the missing entries, as for any state dict."""
    path = tmp_path / "m.safetensors"
    state = quantized().state_dict()
    for part in ("codes", "scale"):
        del state[f"1.weight.{part}"]
    lb.save(state, path)
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.weight"):
        quantized().load_state_dict(lb.load(path))
    prepared = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8))
    qat.prepare_(prepared, INT4)
    lb.save(quantized(), path)
    with pytest.raises(RuntimeError, match="stored differently"):
        prepared.load_state_dict(lb.load(path))

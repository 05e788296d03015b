"""Files that cannot be read or written give a clear error, and an existing file stays."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit as lb
from lowbit import checkpoint, qat
from lowbit.checkpoint import CheckpointError
from lowbit.files import digests
from tests.test_checkpoint_versions import rewrite

SUFFIXES = pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
INT4 = lb.Int4WeightOnly(8)


def quantized() -> nn.Module:
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8))
    lb.quantize_(model, INT4)
    return model


# ---- reading -------------------------------------------------------------------------------------------------


@SUFFIXES
def test_a_missing_file(tmp_path: Path, suffix: str) -> None:
    for read in (lb.load, lb.load_metadata):
        with pytest.raises(FileNotFoundError, match=rf"nothing{suffix} is not a file"):
            read(tmp_path / f"nothing{suffix}")
        (tmp_path / f"folder{suffix}").mkdir(exist_ok=True)
        with pytest.raises(FileNotFoundError, match="is not a file"):
            read(tmp_path / f"folder{suffix}")


@SUFFIXES
@pytest.mark.parametrize(
    "content",
    [b"", b"\x00", b"hello", b"PK\x03\x04", b"\x80\x02]q\x00.", bytes(range(256)) * 40, b"{}" * 50],
    ids=["empty", "one byte", "text", "zip start", "pickle", "garbage", "json"],
)
def test_files_that_are_no_checkpoint(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"m{suffix}"
    path.write_bytes(content)
    for read in (lb.load, lb.load_metadata):
        with pytest.raises(CheckpointError, match=re.escape(str(path))) as error:
            read(path)
        assert "truncated, damaged or not" in str(error.value) or "not written by" in str(
            error.value
        )
        assert "weights_only" not in str(error.value), "torch advises to unpickle anything"
    assert path.read_bytes() == content


@SUFFIXES
def test_truncated_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    lb.save(quantized(), path)
    content = path.read_bytes()
    for share in (0.001, 0.01, 0.1, 0.5, 0.9, 0.999):
        path.write_bytes(content[: max(1, int(len(content) * share))])
        with pytest.raises(CheckpointError, match="truncated, damaged"):
            lb.load(path)
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError):
        lb.load(path)


@SUFFIXES
@settings(max_examples=60)
@given(data=st.data())
def test_flipped_bits_never_crash(tmp_path_factory, suffix: str, data: st.DataObject) -> None:
    """A damaged file is an error that names it, or, where only values changed, still a state dict."""
    path = tmp_path_factory.getbasetemp() / f"flipped{suffix}"
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


@SUFFIXES
def test_files_of_others(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    if suffix == ".pt":
        torch.save(nn.Linear(2, 2).state_dict(), path)
    else:
        from safetensors.torch import save_file

        save_file(nn.Linear(2, 2).state_dict(), path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not written by lowbit\.save; load it"):
        lb.load(path)


def test_pickles_are_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"lowbit": "{}", "tensors": {}, "extra": nn.Linear(2, 2)}, path)
    with pytest.raises(CheckpointError, match=r"not written by lowbit\.save"):
        lb.load(path)


def zipped(path: Path, pickled: bytes, compressed: bool, zeros: int = 0) -> None:
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(zeros))


def expanded(path: Path) -> None:
    """A tensor of 2^40 elements in 4 bytes."""
    info = {"format_version": 1, "tensors": {}, "ties": {}, "values": {}, "metadata": {}}
    tensors = {"a": torch.ones(1).expand(2**20, 2**20)}
    torch.save({"lowbit": json.dumps(info), "tensors": tensors}, path)


LARGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "compressed": (lambda p: zipped(p, b"\x80\x02}.", True, 2**28), "cannot be read"),
    "compressed pickle": (lambda p: zipped(p, b"(" * 2**20 + b".", True), "cannot be read"),
    "sets": (lambda p: zipped(p, b"\x80\x04(" + b"\x8f" * 2**20 + b"l.", False), "not written by"),
    "dicts": (lambda p: zipped(p, b"\x80\x02(" + b"}" * 2**20 + b"t.", False), "not written by"),
    "a bytearray": (
        lambda p: zipped(p, b"\x80\x02cbuiltins\nbytearray\nJ\0\0\0\x40\x85R.", False),
        "not written by",
    ),
    "an expanded tensor": (expanded, "cannot be read"),
}


@pytest.mark.parametrize("name", LARGE)
def test_small_files_take_little_memory(name: str, tmp_path: Path) -> None:
    """Each is refused before it takes its size in memory, of 256 MiB and more."""
    import resource

    make, match = LARGE[name]
    path = tmp_path / "m.pt"
    make(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (lb.load, lb.load_metadata):
        with pytest.raises(CheckpointError, match=match) as caught:
            read(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


@SUFFIXES
def test_an_outside_zip_reader_finds_no_fault(tmp_path: Path, suffix: str) -> None:
    """Checksums and places are as `torch.save` writes them; a mapped tensor begins at a multiple of 64 bytes."""
    path, state = tmp_path / f"m{suffix}", {"a": torch.arange(5), "b": torch.ones(3, 7)}
    lb.save(state, path)
    if suffix == ".safetensors":
        from safetensors.torch import load_file

        found = load_file(path)
    else:
        assert zipfile.ZipFile(path).testzip() is None
        found = torch.load(path, mmap=True, weights_only=True)["tensors"]
        assert all(t.data_ptr() % 64 == 0 for t in found.values())
    assert all(torch.equal(found[name], t) for name, t in state.items())


@pytest.mark.parametrize("name", ["m.bin", "m", "m.PT", "m.safetensor", "m.pt.gz"])
def test_suffixes(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    suffix = Path(name).suffix
    for call in (
        lambda: lb.save(quantized(), path),
        lambda: lb.load(path),
        lambda: lb.load_metadata(path),
    ):
        with pytest.raises(CheckpointError, match=rf"'{suffix}'; accepted: .safetensors, .pt"):
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


@SUFFIXES
@pytest.mark.parametrize("name", DAMAGES)
def test_descriptions_that_do_not_fit(tmp_path: Path, suffix: str, name: str) -> None:
    change, match = DAMAGES[name]
    weight = lb.AffineTensor.from_float(torch.randn(4, 8), INT4)
    path = tmp_path / f"m{suffix}"
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
    path = tmp_path / "m.pt"
    torch.save({"lowbit": json.dumps(info), "tensors": tensors}, path)
    with pytest.raises(CheckpointError, match=match):
        lb.load(path, verify=False)


@pytest.mark.parametrize(
    "content",
    [
        {"lowbit": "not json", "tensors": {}},
        {"lowbit": "[1, 2]", "tensors": {}},
        {"lowbit": 3, "tensors": {}},
        {"lowbit": "{}", "tensors": 3},
        {"lowbit": "{}", "tensors": {"a": 3}},
        {"lowbit": "{}"},
        {"lowbit": "[" * 100_000, "tensors": {}},
        [1, 2],
        torch.ones(3),
    ],
    ids=lambda content: repr(content)[:40],
)
def test_containers_that_do_not_fit(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "m.pt"
    torch.save(content, path)
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
    "transposed": ({"a": transposed()}, r"a is a transposed .*save the original"),
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


@SUFFIXES
@pytest.mark.parametrize("name", UNSAVABLE)
def test_a_failed_save_leaves_the_old_file(tmp_path: Path, suffix: str, name: str) -> None:
    path = tmp_path / f"m{suffix}"
    lb.save({"old": torch.ones(3)}, path)
    before = path.read_bytes()
    state, match = UNSAVABLE[name]
    with pytest.raises(CheckpointError, match=match):
        lb.save(state, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@SUFFIXES
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr
)
def test_a_failure_while_writing_leaves_the_file(
    tmp_path: Path, suffix: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"m{suffix}"
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


@SUFFIXES
@pytest.mark.skipif(sys.platform == "win32", reason="no limit of the size of files")
@pytest.mark.parametrize("limit", [20, 1500, 40_000])
def test_the_system_refuses_to_write(tmp_path: Path, suffix: str, limit: int) -> None:
    """After so many bytes of a file, in the header, the tensors, or the end. `torch.save` said "unexpected pos"."""
    import resource

    path, before = tmp_path / f"m{suffix}", resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {f"layer.{i}.weight": torch.zeros(16, 64) for i in range(10)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{re.escape(str(path))}'"):
            lb.save(state, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*tmp_path.iterdir()] == []


@SUFFIXES
def test_a_missing_folder(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing is not a folder; make it first"):
        lb.save(quantized(), tmp_path / "missing" / f"m{suffix}")


def test_without_the_safetensors_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    lb.save(quantized(), path)
    before = path.read_bytes()
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    match = (
        r"\*.pt needs nothing more.* safetensors, which is not installed: pip install 'lowbit\[safe"
    )
    for call in (
        lambda: lb.load(path),
        lambda: lb.load_metadata(path),
        lambda: lb.save(quantized(), path),
    ):
        with pytest.raises(CheckpointError, match=match):
            call()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    lb.save(quantized(), tmp_path / "m.pt")
    assert "0.weight" in lb.load(tmp_path / "m.pt")


def test_a_state_dict_that_does_not_fit_the_model(tmp_path: Path) -> None:
    """load_state_dict names the missing entries, as for any state dict."""
    path = tmp_path / "m.pt"
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

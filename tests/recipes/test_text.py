"""Text to tokens: the split, the tokenizer and the batches depend only on their inputs."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from recipes import text
from recipes.command_line import UserError

SHARE = 0.03
SIZES = {"batch_size": 3, "context": 16, "seed": 0}


def read_split(source: Path) -> tuple[list[str], list[str], text.TextInfo]:
    return text.read_split(source, "stdlib", SHARE)


def prepare(source: Path, vocab_size: int = 280) -> text.Data:
    return text.prepare(source, "stdlib", SHARE, vocab_size, context=16)


def write_files(folder: Path, count: int, lines: int = 40) -> Path:
    for i in range(count):
        path = folder / f"part{i % 3}" / f"module_{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = "".join(f"def function_{i}_{j}(x):\n    return x * {i + j}\n" for j in range(lines))
        path.write_text(body, encoding="utf-8")
    return folder


def test_split_is_by_file_and_complete(tmp_path: Path) -> None:
    train, heldout, info = read_split(write_files(tmp_path, 60))
    assert info.files == 60 and info.split_by == "file"
    assert len(heldout) >= 1
    assert not set(train) & set(heldout) and len(train) + len(heldout) == 60
    share = info.heldout_bytes / (info.heldout_bytes + info.train_bytes)
    assert SHARE <= share < 3 * SHARE


def test_split_depends_on_names_not_on_folders(tmp_path: Path) -> None:
    first = read_split(write_files(tmp_path / "here", 30))
    second = read_split(write_files(tmp_path / "there", 30))
    assert first[:2] == second[:2]


def test_held_out_files_stay_held_out_when_contents_change(tmp_path: Path) -> None:
    _, before, _ = read_split(write_files(tmp_path, 40))
    for path in tmp_path.rglob("*.py"):
        path.write_text("# changed\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    _, after, _ = read_split(tmp_path)
    assert ["# changed\n" + text for text in before] == after


def test_one_file_is_split_by_pieces(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    own = "".join(f"line {i} of my own text\n" for i in range(8000))
    path.write_text(own, encoding="utf-8")
    train, heldout, info = read_split(path)
    assert info.files == 1 and info.split_by.startswith("piece")
    assert sorted("".join(train + heldout).splitlines()) == sorted(own.splitlines())
    assert 0 < len(heldout) < len(train)


def test_files_that_are_no_text_are_skipped_and_counted(tmp_path: Path) -> None:
    write_files(tmp_path, 25)
    (tmp_path / "latin.txt").write_bytes("déjà vu".encode("latin-1"))
    (tmp_path / "binary.bin").write_bytes(b"\0\1\2")
    (tmp_path / "empty.txt").write_bytes(b" \n")
    (tmp_path / "copy.py").write_bytes((tmp_path / "part0" / "module_0.py").read_bytes())
    (tmp_path / ".hidden").write_text("not read", encoding="utf-8")
    _, _, info = read_split(tmp_path)
    assert info.files == 25 and info.skipped == {"not UTF-8": 2, "empty": 1, "copies": 1}
    assert info.skipped_text() == "2 not UTF-8, 1 empty, 1 copies"


def test_standard_library_without_its_tests() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    names = [name for name, _ in text.files_below(root, text.NOT_SOURCE)]
    assert len(names) > 300
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not [n for n in names if {"test", "site-packages"} & set(n.split("/")[:-1])]


def test_tokenizer_is_deterministic_and_keeps_every_byte(tmp_path: Path) -> None:
    train, _, _ = read_split(write_files(tmp_path, 30))
    first, second = (text.train_tokenizer(train, 300) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.token_to_id(text.END) == 0
    for one in ("def f(x):\n\treturn x\n", "naïve ☃ 漢字 \U0001f600", "  \n\n", "\x7f\x01"):
        assert first.decode(first.encode(one).ids) == one


def test_prepare_twice_gives_the_same_tokens_and_save_keeps_them(tmp_path: Path) -> None:
    source = write_files(tmp_path / "text", 30)
    first, second = (prepare(source) for _ in range(2))
    text.save(first, tmp_path / "kept")
    kept = text.load(tmp_path / "kept")
    for other in (second, kept):
        assert torch.equal(first.train, other.train) and torch.equal(first.heldout, other.heldout)
        assert first.info == other.info
    assert kept.tokenizer.decode(kept.tokenizer.encode("def f").ids) == "def f"


def test_batch_is_a_function_of_the_step() -> None:
    train = torch.arange(16 * 50, dtype=torch.int32)
    tokens, targets = text.batch(train, 7, **SIZES)
    assert tokens.shape == targets.shape == (3, 16) and tokens.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)
    text.batch(train, 3, **SIZES)
    assert torch.equal(tokens, text.batch(train, 7, **SIZES)[0])
    assert not torch.equal(tokens, text.batch(train, 7, **{**SIZES, "seed": 1})[0])


def test_an_epoch_reads_every_window_once() -> None:
    train = torch.arange(16 * 31, dtype=torch.int32)  # 29 windows beside the moving offset
    windows = (len(train) - 16 - 1) // 16
    for epoch in range(3):
        steps = range(epoch * windows, (epoch + 1) * windows)
        single = {**SIZES, "batch_size": 1}
        starts = [text.batch(train, step, **single)[0][0, 0].item() for step in steps]
        assert len(set(starts)) == windows
        assert len({start % 16 for start in starts}) == 1


def test_a_text_shorter_than_a_batch_still_trains() -> None:
    assert text.batch(torch.arange(40, dtype=torch.int32), 5, **SIZES)[0].shape == (3, 16)


def test_heldout_windows_tile_the_text() -> None:
    heldout = torch.arange(100, dtype=torch.int32)
    windows = text.windows_of(heldout, 16, at_most_tokens=16_000)
    assert windows.shape == (6, 17)
    assert torch.equal(windows[:, :-1].flatten(), torch.arange(96))
    assert text.windows_of(heldout, 16, at_most_tokens=47).shape == (2, 17)
    assert text.windows_of(heldout, 16, at_most_tokens=1).shape == (1, 17)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere/a.txt", None, "no such file or folder"),
        ("", None, "no text to train on"),
        ("a.txt", b"\xff\xfe\xfa", "skipped: 1 not UTF-8"),
        ("a.txt", b"short", "too little text to"),
    ],
    ids=["missing", "empty-folder", "not-utf8", "too-short"],
)
def test_unusable_text(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / name)


def test_vocabulary_below_the_bytes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size is 200"):
        prepare(write_files(tmp_path, 30), vocab_size=200)


def test_damaged_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        text.load(tmp_path)

"""The quick start's data: the split, the tokenizer and the batches depend on nothing but their inputs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from recipes.llama import LlamaConfig
from recipes.quickstart import data
from recipes.quickstart.config import QuickstartConfig, UserError, tiny
from recipes.quickstart.interrupt import Interrupt

CONFIG = dataclasses.replace(
    tiny(),
    model=LlamaConfig(vocab_size=280, dim=8, layers=1, heads=1, kv_heads=1, hidden=8, context=16),
    batch_size=3,
    sample_tokens=8,
)


def write_files(folder: Path, count: int, lines: int = 40) -> Path:
    for i in range(count):
        path = folder / f"part{i % 3}" / f"module_{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = "".join(f"def function_{i}_{j}(x):\n    return x * {i + j}\n" for j in range(lines))
        path.write_text(body, encoding="utf-8")
    return folder


def test_split_is_by_file_and_complete(tmp_path: Path) -> None:
    train, heldout, info = data.read_split(CONFIG, write_files(tmp_path, 60))
    assert info.files == 60 and info.split_by == "file"
    assert len(heldout) == info.heldout_files >= 1
    assert not set(train) & set(heldout) and len(train) + len(heldout) == 60
    share = info.heldout_bytes / (info.heldout_bytes + info.train_bytes)
    assert CONFIG.heldout_share <= share < 3 * CONFIG.heldout_share


def test_split_depends_on_names_not_on_place(tmp_path: Path) -> None:
    first = data.read_split(CONFIG, write_files(tmp_path / "here", 30))
    second = data.read_split(CONFIG, write_files(tmp_path / "there", 30))
    assert first[:2] == second[:2]


def test_held_out_files_stay_held_out_when_contents_change(tmp_path: Path) -> None:
    _, before, _ = data.read_split(CONFIG, write_files(tmp_path, 40))
    for path in tmp_path.rglob("*.py"):
        path.write_text("# changed\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    _, after, _ = data.read_split(CONFIG, tmp_path)
    assert ["# changed\n" + text for text in before] == after


def test_one_file_is_split_by_pieces(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    text = "".join(f"line {i} of my own text\n" for i in range(8000))
    path.write_text(text, encoding="utf-8")
    train, heldout, info = data.read_split(CONFIG, path)
    assert info.files == 1 and info.split_by.startswith("piece")
    assert sorted("".join(train + heldout).splitlines()) == sorted(text.splitlines())
    assert 0 < len(heldout) < len(train)


def test_what_is_no_text_is_skipped_and_counted(tmp_path: Path) -> None:
    write_files(tmp_path, 25)
    (tmp_path / "latin.txt").write_bytes("déjà vu".encode("latin-1"))
    (tmp_path / "binary.bin").write_bytes(b"\0\1\2")
    (tmp_path / "empty.txt").write_bytes(b" \n")
    (tmp_path / "copy.py").write_bytes((tmp_path / "part0" / "module_0.py").read_bytes())
    (tmp_path / ".hidden").write_text("not read", encoding="utf-8")
    _, _, info = data.read_split(CONFIG, tmp_path)
    assert (info.files, info.not_utf8, info.empty, info.copies) == (25, 2, 1, 1)


def test_standard_library_without_its_tests() -> None:
    names = [name for name, _ in data._source_files(Path(data.sysconfig.get_path("stdlib")))]
    assert len(names) > 300
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not [n for n in names if {"test", "site-packages"} & set(n.split("/")[:-1])]


def test_tokenizer_is_deterministic_and_keeps_every_byte(tmp_path: Path) -> None:
    train, _, _ = data.read_split(CONFIG, write_files(tmp_path, 30))
    first, second = (data.train_tokenizer(train, 300) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.token_to_id(data.END) == 0
    for text in ("def f(x):\n\treturn x\n", "naïve ☃ 漢字 \U0001f600", "  \n\n", "\x7f\x01"):
        assert first.decode(first.encode(text).ids) == text


def test_prepare_twice_gives_the_same_tokens_and_save_keeps_them(tmp_path: Path) -> None:
    source = write_files(tmp_path / "text", 30)
    with Interrupt() as interrupt:
        first, second = (data.prepare(CONFIG, source, interrupt) for _ in range(2))
    data.save(first, tmp_path / "kept")
    kept = data.load(tmp_path / "kept")
    for other in (second, kept):
        assert torch.equal(first.train, other.train) and torch.equal(first.heldout, other.heldout)
        assert first.info == other.info
    assert kept.decode(kept.encode("def f")) == "def f"


def test_batch_is_a_function_of_the_step() -> None:
    train = torch.arange(16 * 50, dtype=torch.int32)
    tokens, targets = data.batch(CONFIG, train, 7)
    assert tokens.shape == targets.shape == (3, 16) and tokens.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)
    data.batch(CONFIG, train, 3)
    assert torch.equal(tokens, data.batch(CONFIG, train, 7)[0])
    other_seed = dataclasses.replace(CONFIG, seed=1)
    assert not torch.equal(tokens, data.batch(other_seed, train, 7)[0])


def test_an_epoch_reads_every_window_once() -> None:
    train = torch.arange(16 * 31, dtype=torch.int32)  # 29 windows beside the moving offset
    config = dataclasses.replace(CONFIG, batch_size=1)
    windows = (len(train) - 16 - 1) // 16
    for epoch in range(3):
        starts = [
            data.batch(config, train, epoch * windows + i)[0][0, 0].item() for i in range(windows)
        ]
        assert len(set(starts)) == windows
        assert len({start % 16 for start in starts}) == 1


def test_a_text_shorter_than_a_batch_still_trains() -> None:
    tokens, _ = data.batch(CONFIG, torch.arange(40, dtype=torch.int32), 5)
    assert tokens.shape == (3, 16)


def test_heldout_windows_tile_the_text() -> None:
    heldout = torch.arange(100, dtype=torch.int32)
    windows = data.heldout_windows(CONFIG, heldout, 1000)
    assert windows.shape == (6, 17)
    assert torch.equal(windows[:, :-1].flatten(), torch.arange(96))
    assert data.heldout_windows(CONFIG, heldout, 2).shape == (2, 17)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nowhere", "no such file or folder"),
        (lambda p: p, "no text to learn from"),
        (lambda p: _file(p / "a.txt", b"\xff\xfe\xfa"), "1 files are not UTF-8"),
        (lambda p: _file(p / "a.txt", b"short"), "too little text to"),
    ],
    ids=["missing", "empty-folder", "not-utf8", "too-short"],
)
def test_unusable_data(tmp_path: Path, make, message: str) -> None:  # type: ignore[no-untyped-def]
    with Interrupt() as interrupt, pytest.raises(UserError, match=message):
        data.prepare(CONFIG, make(tmp_path), interrupt)


def test_vocabulary_below_the_bytes(tmp_path: Path) -> None:
    model = dataclasses.replace(CONFIG.model, vocab_size=200)
    config: QuickstartConfig = dataclasses.replace(CONFIG, model=model)
    with Interrupt() as interrupt, pytest.raises(UserError, match="vocab_size is 200"):
        data.prepare(config, write_files(tmp_path, 30), interrupt)


def test_damaged_data_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        data.load(tmp_path)


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path

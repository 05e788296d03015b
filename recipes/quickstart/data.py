"""Text to tokens: find the files, hold some out, train a byte-pair tokenizer, make batches.

The split is by file (a file is either learnt from or measured on, never both) and depends only on the
names of the files: they are ranked by the SHA-256 of their name, and the first few per cent of the text
are held out. Byte-for-byte copies of a file are dropped, so that no held-out file is also learnt from.

What is made is kept in `RUN/data/`, so that a run can be resumed and measured after its sources have
gone: `tokenizer.json`, `train.npy` and `heldout.npy` (int32 tokens), `data.json` (counts).
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm

from recipes.quickstart.config import QuickstartConfig, UserError
from recipes.quickstart.interrupt import Interrupt

END = "<|end|>"
"""Token 0, between two files."""
NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
PIECE_CHARACTERS = 8_000
MANY_FILES = 20


@dataclass
class DataInfo:
    """Counts of what was read, split and dropped; `RUN/data/data.json`."""

    source: str
    files: int = 0
    heldout_files: int = 0
    not_utf8: int = 0
    unreadable: int = 0
    empty: int = 0
    copies: int = 0
    split_by: str = "file"
    train_bytes: int = 0
    heldout_bytes: int = 0
    train_tokens: int = 0
    heldout_tokens: int = 0


@dataclass
class Data:
    """Tokens of a run (int32, one dimension), its tokenizer, and where they came from."""

    train: Tensor
    heldout: Tensor
    tokenizer: Tokenizer
    info: DataInfo

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)


def prepare(config: QuickstartConfig, source: Path | None, interrupt: Interrupt) -> Data:
    """Read `source` (None: the preset's corpus), split it, train the tokenizer, encode. Writes nothing.

    UserError when the source is missing, or holds too little text to train on and to measure on.
    """
    train, heldout, info = read_split(config, source)
    interrupt.check()
    print(
        f"data: {info.source}, {info.files} files, {info.train_bytes / 1e6:.1f} MB to learn from, "
        f"{info.heldout_bytes / 1e6:.2f} MB held out; skipped: {info.not_utf8} not UTF-8, "
        f"{info.unreadable} unreadable, {info.empty} empty, {info.copies} copies"
    )
    tokenizer = train_tokenizer(train, config.model.vocab_size)
    interrupt.check()
    encoded = [_encode(tokenizer, texts, interrupt) for texts in (train, heldout)]
    info.train_tokens, info.heldout_tokens = (len(tokens) for tokens in encoded)
    needed = 2 * (config.model.context + 1)
    for purpose, tokens in zip(("learn from", "measure on"), encoded, strict=True):
        if len(tokens) < needed:
            raise UserError(
                f"{info.source}: too little text to {purpose}: {len(tokens)} tokens, where at least "
                f"{needed} are needed; give --data more text, or a shorter context: --set model.context=64"
            )
    train_tokens, heldout_tokens = map(torch.from_numpy, encoded)
    return Data(train_tokens, heldout_tokens, tokenizer, info)


def save(data: Data, folder: Path) -> None:
    """Keep `data` in a new `folder`, for `load`."""
    folder.mkdir()
    data.tokenizer.save(str(folder / "tokenizer.json"))
    np.save(folder / "train.npy", data.train.numpy())
    np.save(folder / "heldout.npy", data.heldout.numpy())
    (folder / "data.json").write_text(
        json.dumps(asdict(data.info), indent=2) + "\n", encoding="utf-8"
    )


def load(folder: Path) -> Data:
    """What `save` kept. UserError when it can't be read."""
    try:
        info = DataInfo(**json.loads((folder / "data.json").read_text(encoding="utf-8")))
        tokens = [torch.from_numpy(np.load(folder / f"{n}.npy")) for n in ("train", "heldout")]
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(
            f"{folder} can't be read ({error}); start a new run, or restore the folder"
        ) from error
    return Data(tokens[0], tokens[1], tokenizer, info)


def read_split(
    config: QuickstartConfig, source: Path | None
) -> tuple[list[str], list[str], DataInfo]:
    """(texts to learn from, texts held out, counts), both lists in the order of the names."""
    texts, info = _read(config, source)
    if not texts:
        raise UserError(
            f"{info.source} has no text to learn from: {info.not_utf8} files are not UTF-8, "
            f"{info.unreadable} can't be read, {info.empty} are empty; --data takes a text file, or a "
            "folder with text files"
        )
    info.files = len(texts)
    if len(texts) < MANY_FILES:  # too few to hold whole ones out
        info.split_by = f"piece of about {PIECE_CHARACTERS} characters"
        texts = {
            f"{n}#{i:06}": piece for n, t in texts.items() for i, piece in enumerate(_pieces(t))
        }
    heldout = _choose_heldout({n: len(t) for n, t in texts.items()}, config.heldout_share)
    info.heldout_files = len(heldout)
    train_texts = [texts[n] for n in sorted(texts) if n not in heldout]
    heldout_texts = [texts[n] for n in sorted(heldout)]
    info.train_bytes, info.heldout_bytes = (
        sum(len(t.encode()) for t in part) for part in (train_texts, heldout_texts)
    )
    return train_texts, heldout_texts, info


def _choose_heldout(sizes: dict[str, int], share: float) -> set[str]:
    """Names held out: in the order of their hash until `share` of the text is reached, none a giant."""
    total = sum(sizes.values())
    chosen: set[str] = set()
    held = 0
    for name in sorted(sizes, key=lambda n: hashlib.sha256(n.encode()).digest()):
        if held >= share * total:
            break
        if sizes[name] <= 2 * share * total or (not chosen and len(sizes) < 10):
            chosen.add(name)
            held += sizes[name]
    return chosen


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces of whole lines, each about PIECE_CHARACTERS long."""
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        length += len(line)
        if length >= PIECE_CHARACTERS:
            yield "".join(piece)
            piece, length = [], 0
    if piece:
        yield "".join(piece)


def _read(config: QuickstartConfig, source: Path | None) -> tuple[dict[str, str], DataInfo]:
    """Text by name, and counts of what was skipped. Names are relative to their root, with slashes."""
    if source is None:
        info = DataInfo("the Python standard library")
        roots = [("stdlib", Path(sysconfig.get_path("stdlib")))]
        if config.corpus == "stdlib+torch":
            info.source += " and PyTorch's own source"
            roots.append(("torch", Path(torch.__file__).parent))
        found = [(f"{label}/{n}", p) for label, root in roots for n, p in _source_files(root)]
    else:
        info = DataInfo(str(source))
        if not source.exists():
            raise UserError(f"--data {source}: there is no such file or folder")
        found = [(source.name, source)] if source.is_file() else list(_all_files(source))
    texts: dict[str, str] = {}
    seen: set[bytes] = set()
    for name, path in found:
        try:
            content = path.read_bytes()
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            info.not_utf8 += 1
            continue
        except OSError:
            info.unreadable += 1
            continue
        digest = hashlib.sha256(content).digest()
        if "\0" in text:  # decodes, but is no text
            info.not_utf8 += 1
        elif not text.strip():
            info.empty += 1
        elif digest in seen:
            info.copies += 1
        else:
            seen.add(digest)
            texts[name] = text
    return texts, info


def _source_files(root: Path) -> Iterator[tuple[str, Path]]:
    for name, path in _all_files(root):
        if name.endswith(".py") and not NOT_SOURCE & set(Path(name).parts[:-1]):
            yield name, path


def _all_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Regular files below `root`, sorted; hidden ones and hidden folders left out."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(n for n in subfolders if not n.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix(), path


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level byte-pair tokenizer: any text encodes, and decodes to itself. Token 0 is `END`."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise UserError(
            f"model.vocab_size is {vocab_size}; byte-pair encoding needs at least {len(alphabet) + 1}, "
            "one for each byte and one between files"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    print(f"tokenizer: learning {vocab_size} byte pairs")
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(tokenizer: Tokenizer, texts: list[str], interrupt: Interrupt) -> np.ndarray:
    """All texts as one int32 array, `END` after each."""
    end = np.zeros(1, np.int32)
    parts = [np.zeros(0, np.int32)]
    with tqdm(
        total=sum(map(len, texts)), desc="encode", unit="char", unit_scale=True, leave=False
    ) as bar:
        for start in range(0, len(texts), 64):
            interrupt.check()
            batch = texts[start : start + 64]
            for encoding in tokenizer.encode_batch(batch):
                parts += [np.array(encoding.ids, np.int32), end]
            bar.update(sum(map(len, batch)))
    return np.concatenate(parts)


@lru_cache(maxsize=2)
def _shuffled(seed: int, epoch: int, windows: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(windows)


def batch(config: QuickstartConfig, train: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """(tokens, next tokens), each int64 [batch_size, context]: a function of (seed, step) alone.

    An epoch is a random order of all windows of `context` tokens; the windows of each epoch start at
    another offset, so that their edges move.
    """
    length = config.model.context
    windows = (len(train) - length - 1) // length
    rows = []
    for i in range(step * config.batch_size, (step + 1) * config.batch_size):
        epoch, position = divmod(i, windows)
        offset = int(np.random.default_rng([config.seed, epoch, 1]).integers(length))
        start = offset + int(_shuffled(config.seed, epoch, windows)[position]) * length
        rows.append(train[start : start + length + 1])
    tokens = torch.stack(rows).long()
    return tokens[:, :-1], tokens[:, 1:]


def heldout_windows(config: QuickstartConfig, heldout: Tensor, limit: int) -> Tensor:
    """Up to `limit` windows [*, context + 1] that tile the held-out text, the same ones every time."""
    length = config.model.context
    count = min((len(heldout) - 1) // length, max(limit, 1))
    windows = [heldout[i * length : (i + 1) * length + 1] for i in range(count)]
    return torch.stack(windows).long()

"""Text to tokens: find the files, hold some out, train a byte-pair tokenizer, make batches.

The split is by file: a file is either trained on or measured on, never both. It depends only on the names of the
files: they are ranked by the SHA-256 of their name, and the first few per cent of the text are held out. Byte-for-byte
copies of a file are dropped, so that no held-out file is also trained on.

`save` keeps the result in a folder, so that a run can resume after its sources have gone: `tokenizer.json`,
`train.npy` and `heldout.npy` (int32 tokens), `text.json` (counts).
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm

from recipes.command_line import UserError

CORPORA = ("stdlib", "stdlib+torch", "installed")
"""The text without --data: the Python standard library's source, PyTorch's own source with it, or that of all installed
packages with it."""
END = "<|end|>"
"""Token 0, between two files."""
NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
PIECE_CHARACTERS = 8_000
FEW_FILES = 20
"""Below this number of files, pieces of files are held out instead of whole files."""


@dataclass
class TextInfo:
    """Where a text comes from, how it was split, and how many files were skipped for each reason."""

    source: str
    files: int = 0
    split_by: str = "file"
    train_bytes: int = 0
    heldout_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skipped_text(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.skipped.items()) or "nothing"


@dataclass
class Data:
    """Tokens (int32, one dimension), their tokenizer, and where they come from."""

    train: Tensor
    heldout: Tensor
    tokenizer: Tokenizer
    info: TextInfo


def prepare(
    source: Path | None, corpus: str, heldout_share: float, vocab_size: int, context: int
) -> Data:
    """Read `source`, split it, train the tokenizer and encode the text. Nothing is written.

    UserError when the source is missing, or too short for one window of `context` tokens in each part.

    Args:
        source: a file or folder of UTF-8 text; None reads the corpus.
        corpus: one of CORPORA.
        heldout_share: share of the text to hold out.
        vocab_size: entries of the tokenizer.
        context: tokens of a window.
    """
    train_texts, heldout_texts, info = read_split(source, corpus, heldout_share)
    print(
        f"data: {info.source}, {info.files} files, {info.train_bytes / 1e6:.1f} MB to train on, "
        f"{info.heldout_bytes / 1e6:.2f} MB held out; skipped: {info.skipped_text()}"
    )
    tokenizer = train_tokenizer(train_texts, vocab_size)
    train, heldout = encode(tokenizer, train_texts), encode(tokenizer, heldout_texts)
    needed = 2 * (context + 1)
    for purpose, tokens in (("train on", train), ("measure on", heldout)):
        if len(tokens) < needed:
            raise UserError(
                f"{info.source}: too little text to {purpose}: {len(tokens)} tokens, at least {needed} are "
                "needed; give --data more text, or a shorter context: --set model.context=64"
            )
    return Data(train, heldout, tokenizer, info)


def by_tokenizer(tokenizer: Any, source: Path | None, corpus: str, heldout_share: float) -> Data:
    """Read `source`, split it, and encode it by a tokenizer of transformers, with its end-of-sequence token after each
    text.

    Args: `tokenizer`; the others are those of `prepare`.
    """
    train_texts, heldout_texts, info = read_split(source, corpus, heldout_share)
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    train, heldout = (
        torch.tensor([i for t in texts for i in tokenizer.encode(t) + ends], dtype=torch.int32)
        for texts in (train_texts, heldout_texts)
    )
    return Data(train, heldout, tokenizer, info)


def save(data: Data, folder: Path) -> None:
    """Write `data` to a new `folder`, for `load`."""
    folder.mkdir()
    data.tokenizer.save(str(folder / "tokenizer.json"))
    np.save(folder / "train.npy", data.train.numpy())
    np.save(folder / "heldout.npy", data.heldout.numpy())
    info = json.dumps(asdict(data.info), indent=2) + "\n"
    (folder / "text.json").write_text(info, encoding="utf-8")


def load(folder: Path) -> Data:
    """Read what `save` wrote. UserError when a file is missing or damaged."""
    try:
        info = TextInfo(**json.loads((folder / "text.json").read_text(encoding="utf-8")))
        train, heldout = (
            torch.from_numpy(np.load(folder / f"{n}.npy")) for n in ("train", "heldout")
        )
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(
            f"{folder} can't be read ({error}); start a new run, or restore the folder"
        ) from error
    return Data(train, heldout, tokenizer, info)


def read_split(
    source: Path | None, corpus: str, heldout_share: float
) -> tuple[list[str], list[str], TextInfo]:
    """(training texts, held-out texts, counts), both lists in the order of the names."""
    if source is None:
        info = TextInfo("the Python standard library")
        roots = {"stdlib": Path(sysconfig.get_path("stdlib"))}
        if corpus == "stdlib+torch":
            info.source += " and PyTorch's own source"
            roots["torch"] = Path(torch.__file__).parent
        elif corpus == "installed":
            info.source += " and all installed packages' source"
            roots["installed"] = Path(torch.__file__).parent.parent
        files: Iterable[tuple[str, Path]] = [
            (f"{label}/{name}", path)
            for label, root in roots.items()
            for name, path in files_below(root, NOT_SOURCE)
            if name.endswith(".py")
        ]
    else:
        info = TextInfo(str(source))
        if not source.exists():
            raise UserError(f"--data {source}: there is no such file or folder")
        files = [(source.name, source)] if source.is_file() else files_below(source)
    texts = read_texts(files, info)
    if not texts:
        raise UserError(
            f"{info.source} has no text to train on (skipped: {info.skipped_text()}); --data takes a text "
            "file, or a folder with text files"
        )
    info.files = len(texts)
    if len(texts) < FEW_FILES:
        info.split_by = f"piece of about {PIECE_CHARACTERS} characters"
        texts = {
            f"{n}#{i:06}": piece for n, t in texts.items() for i, piece in enumerate(pieces(t))
        }
    heldout_names = choose_heldout({n: len(t) for n, t in texts.items()}, heldout_share)
    train = [texts[n] for n in sorted(texts) if n not in heldout_names]
    heldout = [texts[n] for n in sorted(heldout_names)]
    info.train_bytes = sum(len(t.encode()) for t in train)
    info.heldout_bytes = sum(len(t.encode()) for t in heldout)
    return train, heldout, info


def files_below(root: Path, skipped: Iterable[str] = ()) -> Iterator[tuple[str, Path]]:
    """(relative name with slashes, path) of the files below `root`, sorted, without hidden and `skipped` folders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(n for n in subfolders if n[0] != "." and n not in skipped)
        for name in sorted(names):
            path = Path(folder, name)
            if name[0] != "." and path.is_file():
                yield path.relative_to(root).as_posix(), path


def read_texts(files: Iterable[tuple[str, Path]], info: TextInfo) -> dict[str, str]:
    """Text by name; `info` counts the files that are left out."""
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for name, path in files:
        reason = ""
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            reason = "not UTF-8"
        except OSError:
            reason = "unreadable"
        else:
            if "\0" in text:  # valid UTF-8, but a binary file
                reason = "not UTF-8"
            elif not text.strip():
                reason = "empty"
            elif text in seen:
                reason = "copies"
        if reason:
            info.skipped[reason] = info.skipped.get(reason, 0) + 1
        else:
            seen.add(text)
            texts[name] = text
    return texts


def choose_heldout(sizes: dict[str, int], share: float) -> set[str]:
    """Names in the order of their hash until `share` of the text is reached; very large files are passed over."""
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


def pieces(text: str) -> Iterator[str]:
    """`text` in pieces of whole lines, each about PIECE_CHARACTERS long."""
    piece = ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= PIECE_CHARACTERS:
            yield piece
            piece = ""
    if piece:
        yield piece


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


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts as one int32 tensor, `END` after each."""
    parts = [np.zeros(0, np.int32)]
    for start in tqdm(range(0, len(texts), 64), desc="encode", leave=False):
        encodings = tokenizer.encode_batch(texts[start : start + 64])
        parts += [np.array([*encoding.ids, 0], np.int32) for encoding in encodings]
    return torch.from_numpy(np.concatenate(parts))


@lru_cache(maxsize=2)
def _shuffled(seed: int, epoch: int, windows: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(windows)


def batch(
    tokens: Tensor, step: int, *, batch_size: int, context: int, seed: int
) -> tuple[Tensor, Tensor]:
    """(inputs, targets), each int64 [batch_size, context]: a function of `seed` and `step` alone.

    An epoch is a random order of all windows of `context` tokens. The windows of each epoch start at another offset.

    Args:
        tokens: the text to train on.
        step: number of the optimizer step.
        batch_size: windows in the batch.
        context: tokens of a window.
        seed: seed of the random order.
    """
    windows = (len(tokens) - context - 1) // context
    rows = []
    for i in range(step * batch_size, (step + 1) * batch_size):
        epoch, position = divmod(i, windows)
        offset = int(np.random.default_rng([seed, epoch, 1]).integers(context))
        start = offset + int(_shuffled(seed, epoch, windows)[position]) * context
        rows.append(tokens[start : start + context + 1])
    window = torch.stack(rows).long()
    return window[:, :-1], window[:, 1:]


def windows_of(tokens: Tensor, context: int, at_most_tokens: int) -> Tensor:
    """int64 [*, context + 1]: consecutive windows from the start of the text, at least one, each with its targets."""
    count = min((len(tokens) - 1) // context, max(at_most_tokens // context, 1))
    return torch.stack([tokens[i * context : (i + 1) * context + 1] for i in range(count)]).long()

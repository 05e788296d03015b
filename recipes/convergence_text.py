"""The text of the convergence recipe: the quick start's, with whole stretches held out, kept for all runs."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import torch

from lowbit.files import new_path
from recipes import text
from recipes.training import TrainingConfig, prepare_text

STRETCH = 4096
"""Tokens of a stretch of text that is held out as a whole."""


def cached_data(config: TrainingConfig, source: Path | None, cache: Path) -> text.Data:
    """The quick start's text, read and encoded once for all runs with these files, split and vocabulary."""
    key = f"stretches {file_versions(source)} {config.corpus} {config.model.vocab_size} {config.heldout_share}"
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:12]
    if folder.exists():
        return text.load(folder)
    data = in_stretches(prepare_text(config, source), config.heldout_share)
    cache.mkdir(parents=True, exist_ok=True)
    with new_path.workplace(folder) as place:
        text.save(data, place / "data")
        new_path.put_folder(place / "data", folder)
    return data


def file_versions(source: Path | None) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files of a text, which change when one of them does."""
    if source is None:
        return []
    source = source.resolve()
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def in_stretches(data: text.Data, share: float) -> text.Data:
    """The same text with one stretch of every 1 / `share` held out instead of whole files. On kinds of text that a
    model has never seen, equal runs differ by whole per cents."""
    tokens = torch.cat([data.train, data.heldout])
    every = max(round(1 / share), 2)
    stretches = list(tokens.split(STRETCH))
    train = [s for i, s in enumerate(stretches) if i % every != every - 1]
    heldout = stretches[every - 1 :: every] or train[-1:]
    return dataclasses.replace(data, train=torch.cat(train), heldout=torch.cat(heldout))

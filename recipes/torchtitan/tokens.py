"""Tokens in a folder, and a data loader of torchtitan over them that survives a change of the number of processes.

    python -m recipes.torchtitan.tokens --out runs/text [--data DIR] [--vocab-size 16384]

The folder holds what `recipes.text` writes, so it is both `training.dataset_path` and `model.hf_assets_path`. Without
--data the text is the source of the Python standard library and of all installed packages.

torchtitan's own loader splits a stream of files over the processes, and refuses to resume on another number of them.
Here a sequence is a function of its number and the seed alone. Processes take turns, so a batch has the same sequences
on any number of processes, and a checkpoint holds only how many sequences were read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader

from recipes import text
from recipes.command_line import UserError, exit_status

NAME = "tokens"
"""The value of `training.dataset` that asks for this loader."""
HELDOUT_SHARE = 0.01
TOKENIZER_BYTES = 16_000_000
"""The tokenizer learns from about this much of the text."""


class TokenLoader(BaseDataLoader):
    """Batches of `batch_size` sequences for process `rank` of `world_size` that share the data."""

    def __init__(
        self, tokens: Tensor, rank: int, world_size: int, batch_size: int, context: int, seed: int
    ) -> None:
        self.tokens, self.rank, self.world_size = tokens, rank, world_size
        self.batch_size, self.context, self.seed = batch_size, context, seed
        self.sequences = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            number = self.sequences // self.batch_size + self.rank
            # Before the batch is handed out: a checkpoint follows the step that reads it.
            self.sequences += self.batch_size * self.world_size
            inputs, targets = text.batch(
                self.tokens,
                number,
                batch_size=self.batch_size,
                context=self.context,
                seed=self.seed,
            )
            yield {"input": inputs}, targets

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self.sequences}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError where the batches of this run end elsewhere than those of the run before."""
        sequences = state_dict["sequences"]
        if sequences % (self.batch_size * self.world_size):
            raise ValueError(
                f"the checkpoint has read {sequences} sequences, which is not a whole number of batches of "
                f"{self.batch_size} on {self.world_size} processes; keep training.global_batch_size, and let "
                "training.local_batch_size times the processes divide it"
            )
        self.sequences = sequences


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, infinite: bool = True
) -> TokenLoader:
    """torchtitan's `build_dataloader_fn` for a folder that this program wrote."""
    training = job_config.training
    if not training.dataset_path:
        raise UserError(
            f"training.dataset={NAME!r} needs training.dataset_path, a folder that python -m recipes.torchtitan.tokens "
            "--out DIR writes"
        )
    data = text.load(Path(training.dataset_path))
    seed = job_config.debug.seed or 0
    return TokenLoader(
        data.train, dp_rank, dp_world_size, training.local_batch_size, training.seq_len, seed
    )


def write(
    folder: Path, source: Path | None, corpus: str, vocab_size: int, megabytes: float
) -> None:
    """Prepare the text and write `folder`.

    Args:
        folder: the folder to write.
        source: a file or folder of UTF-8 text; None reads the corpus.
        corpus: one of CORPORA.
        vocab_size: entries of the tokenizer.
        megabytes: size above which files at equal distances are kept, and the others left out.
    """
    if folder.exists():
        raise UserError(f"--out {folder} exists already; name a new folder, or remove it")
    train, heldout, info = text.read_split(source, corpus, HELDOUT_SHARE)
    print(f"data: {info.source}, {info.files} files, {info.train_bytes / 1e6:.1f} MB to train on")
    share = min(1.0, megabytes * 1e6 / info.train_bytes)
    train = [t for i, t in enumerate(train) if int((i + 1) * share) > int(i * share)]
    every = max(1, int(share * info.train_bytes) // TOKENIZER_BYTES)
    tokenizer = text.train_tokenizer(train[::every], vocab_size)
    tokens, held = text.encode(tokenizer, train), text.encode(tokenizer, heldout)
    data = text.Data(tokens, held, tokenizer, info)
    folder.parent.mkdir(parents=True, exist_ok=True)
    text.save(data, folder)
    print(f"{folder}: {len(data.train):,} tokens to train on, {len(data.heldout):,} held out")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.torchtitan.tokens", description=str(__doc__).split("\n\n", 1)[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a text file, or a folder of them")
    parser.add_argument("--corpus", choices=text.CORPORA, default="installed")
    parser.add_argument("--vocab-size", type=int, default=16_384)
    parser.add_argument("--megabytes", type=float, default=200.0, help="use at most so much text")
    given = parser.parse_args()
    return exit_status(
        lambda: write(given.out, given.data, given.corpus, given.vocab_size, given.megabytes)
    )


if __name__ == "__main__":
    sys.exit(main())

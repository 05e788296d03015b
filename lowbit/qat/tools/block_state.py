"""The files of `lowbit.qat.train_blocks`: one for each finished block, so that a stopped run goes on.

A file holds the block's state dict, its result, and what it depends on: the arguments of the run, and fingerprints of
the hidden states at the first block and of the block's parameters before training. Activations are not stored. A run
that goes on computes them again, by the blocks as they were and as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.files import digests, new_path


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A digest of shapes, dtypes and bits of plain tensors. It depends on no order of sums."""
    lines = []
    for t in tensors:
        bits = int(torch.hash_tensor(t.detach()).view(torch.int64)) if t.numel() else 0
        lines.append(f"{tuple(t.shape)} {t.dtype} {bits}\n")
    return digests.of_text("".join(lines))


@dataclass(frozen=True)
class SavedBlock:
    """`result`: error before training, error after it, and steps."""

    state: dict[str, Tensor]
    result: tuple[float, float, int]


class BlockFolder:
    """The files of one run. `run`: a text for its arguments; `inputs`: the fingerprint of its hidden states."""

    def __init__(self, path: Path, run: str, inputs: str) -> None:
        self.path, self.run, self.inputs = path, run, inputs
        self.untrained: dict[int, str] = {}
        path.mkdir(parents=True, exist_ok=True)

    def load(self, index: int, block: nn.Module) -> SavedBlock | None:
        """The block if it was finished. Raises ValueError if another run finished it."""
        self.untrained[index] = fingerprint(_plain_state(block).values())
        path = self._file(index)
        if not path.exists():
            return None
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        now = self._origin(index)
        different = [what for what in now if found["origin"].get(what) != now[what]]
        if different:
            what = different[0]
            detail = f": {found['origin'][what]}, now {now[what]}" if what == "arguments" else ""
            raise ValueError(
                f"{path} comes from another run: its {what} differ{detail}. Accepted: the same arguments and batches, "
                "on the model as it was before the run; or another folder"
            )
        before, after, steps = found["result"]
        return SavedBlock(found["state"], (before, after, steps))

    def save(self, index: int, block: nn.Module, result: tuple[float, float, int]) -> None:
        """Write the file at once or not at all."""
        state = {name: t.detach().cpu() for name, t in _plain_state(block).items()}
        content = {"origin": self._origin(index), "state": state, "result": result}
        with new_path.new_file(self._file(index)) as path, path.open("xb") as file:
            torch.save(content, file)

    def _origin(self, index: int) -> dict[str, str]:
        return {
            "arguments": self.run,
            "inputs of the first block": self.inputs,
            "parameters before training": self.untrained[index],
        }

    def _file(self, index: int) -> Path:
        return self.path / f"block-{index:04d}.pt"


def _plain_state(block: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in block.state_dict().items() if isinstance(t, Tensor)}

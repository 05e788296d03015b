"""The file of a checkpoint: plain tensors by name, a JSON description beside them, and digests of both.

`lowbit.checkpoint` documents the format, `lowbit.files.digests` the entries of tensors under "stored".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.files import digests, new_path, tensor_file
from lowbit.numerics.settings import device_of

SEAL = "lowbit_sha256"
_WAY_OUT = (
    "copy the file anew from where it came from (verify=False loads it without comparing digests)"
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read, and why."""


def check_suffix(path: Path) -> None:
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: unknown suffix {path.suffix!r}; accepted: .safetensors")


# ---- writing -------------------------------------------------------------------------------------------------


def write(path: Path, tensors: dict[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write tensors and description to `path`, with their digests. The file appears whole or not at all.

    Raises CheckpointError for a name or a dtype that the file cannot hold, and OSError, which names `path`, if the
    system refuses to write.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the name of a file in it")

    def describe(entries: digests.Entries) -> dict[str, str]:
        text = json.dumps({**info, "stored": entries})
        return {"lowbit": text, SEAL: digests.of_text(text), "format": "pt"}

    with new_path.new_file(path) as file:
        try:
            tensor_file.write(file, tensors, describe)
        except ValueError as error:
            raise CheckpointError(str(error)) from error


# ---- reading -------------------------------------------------------------------------------------------------


def read(
    path: Path, device: str | torch.device | None, *, with_tensors: bool = True, verify: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors on `device`, and the description.

    Args: those of `lowbit.load`; without `with_tensors` only the description is read. Raises FileNotFoundError for a
    missing file, CheckpointError for a file that cannot be read, and torch's own errors, as where memory is short.
    """
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder; accepted: a .safetensors file of lowbit.save. lowbit.load_pretrained reads a folder "
            "with a model"
        )
    check_suffix(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    device = device_of("device", device)
    torch.empty(0, device=device)  # raises torch's own error for a device that does not exist
    try:
        file = tensor_file.TensorFile(path)
        text, seal = file.metadata.get("lowbit", "null"), file.metadata.get(SEAL)
        is_whole = not verify or seal is None or seal == digests.of_text(text)
        info = json.loads(text) if is_whole else None
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # JSON of any kind may stand in a damaged file
        raise CheckpointError(
            f"{path} cannot be read: it is truncated, damaged or not a safetensors file ({type(error).__name__})"
        ) from error
    if not is_whole:
        raise CheckpointError(
            f"{path}: its description, the JSON that says what the tensors are, is damaged; {_WAY_OUT}"
        )
    if not isinstance(info, dict):
        raise CheckpointError(
            f"{path} was not written by lowbit.save; load it with its own library"
        )
    try:
        as_read = {name: file.tensor(name) for name in (file.entries if with_tensors else ())}
    except tensor_file.ReplacedFileError as error:
        raise CheckpointError(str(error)) from error
    if verify:
        _verify(path, info.get("stored"), seal, as_read if with_tensors else None)
    return {name: t.to(device) for name, t in as_read.items()}, info


def _verify(
    path: Path, entries: Any, seal: str | None, tensors: Mapping[str, Tensor] | None
) -> None:
    """Raise CheckpointError unless the tensors, None where they are not read, have the digests of their entries."""
    if seal is None or entries is None:
        lost = "its description" if seal is None else "its tensors"
        raise CheckpointError(f"{path} is damaged: it has lost the digests of {lost}; {_WAY_OUT}")
    if tensors is None:
        return
    if (misplaced := digests.misplaced(entries, tensors)) is not None:
        raise CheckpointError(f"{path}: {misplaced}; {_WAY_OUT}")
    if bad := sorted(digests.damaged(entries, tensors, tensors)):
        raise CheckpointError(
            f"{path}: {digests.listed(bad)} damaged: other bytes than the saved ones; {_WAY_OUT}"
        )

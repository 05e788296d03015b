"""The file of a checkpoint: plain tensors by name, a JSON description beside them, and digests of both.

`lowbit.checkpoint` documents the format, `lowbit.files.digests` the entries of tensors under "stored".
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from lowbit.files import digests, new_path, tensor_file

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


class Unverified:
    """Tensors that were read but not yet compared with their digests."""

    def __init__(
        self, path: Path, entries: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        self._path, self._entries, self._tensors = path, entries, dict(tensors)
        self.nbytes = sum(t.nbytes for t in tensors.values())

    def check(self, names: Iterable[str] | None = None) -> None:
        """Compare the tensors of these names (default: all) and some that follow them in the file with their digests.

        A tensor that is not damaged is compared once. Raises CheckpointError, which names the damaged tensors among
        `names`.
        """
        tensors = dict(self._tensors)  # as another thread may compare some meanwhile
        left = [*tensors]
        asked = left if names is None else [name for name in names if name in tensors]
        if not asked:
            return
        first = min(map(left.index, asked))
        todo = dict.fromkeys([*asked, *left[first : first + 2 * digests.threads()]])
        damaged = digests.damaged(self._entries, tensors, todo)
        for name in todo.keys() - damaged:
            self._tensors.pop(name, None)
        if bad := sorted(damaged.intersection(asked)):
            raise CheckpointError(
                f"{self._path}: {digests.listed(bad)} damaged: other bytes than the saved ones; {_WAY_OUT}"
            )


def read(
    path: Path, device: str | torch.device, *, with_tensors: bool = True, verify: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any], Unverified]:
    """The tensors on `device`, the description, and the tensors whose values are still unverified.

    Args: those of `lowbit.load`; without `with_tensors` only the description is read. Raises FileNotFoundError for a
    missing file, CheckpointError for a file that cannot be read, and torch's own errors, as where memory is short.
    """
    check_suffix(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
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
    tensors = {name: t.to(device) for name, t in as_read.items()}
    if not verify:
        return tensors, info, Unverified(path, {}, {})
    if seal is None or "stored" not in info:
        lost = "its description" if seal is None else "its tensors"
        raise CheckpointError(f"{path} is damaged: it has lost the digests of {lost}; {_WAY_OUT}")
    misplaced = digests.misplaced(info["stored"], as_read) if with_tensors else None
    if misplaced is not None:
        raise CheckpointError(f"{path}: {misplaced}; {_WAY_OUT}")
    has_values = {name: t for name, t in as_read.items() if not tensors[name].is_meta}
    return tensors, info, Unverified(path, info["stored"], has_values)


# ---- verification on access ------------------------------------------------------------------------------------------


class VerifiedOnAccess(dict[str, Any]):
    """A state dict that compares each value with its digests at the first access to it.

    A copy or a pickle is an ordinary dict, so making one verifies all values. An access raises CheckpointError if the
    value is damaged.
    """

    def __init__(
        self, values: Mapping[str, Any], stored: Mapping[str, list[str]], unverified: Unverified
    ) -> None:
        """`stored`: for each value, the names of its tensors in the file."""
        super().__init__(values)
        self._stored, self._unverified = stored, unverified

    def _check(self, name: Any) -> None:
        if name in self._stored:
            self._unverified.check(self._stored[name])

    def __getitem__(self, name: str) -> Any:
        self._check(name)
        return super().__getitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        self._check(name)
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        for name in reversed(self.keys()):
            return name, self.pop(name)
        return super().popitem()  # raises, since the dict is empty

    def __iter__(self) -> Iterator[str]:
        """Makes dict(self) read the values through `__getitem__`; without it, dict() copies them directly."""
        return iter(self.keys())

    # These read through `__getitem__`, those of dict directly.
    get, setdefault = MutableMapping.get, MutableMapping.setdefault  # type: ignore[assignment]
    values, items = MutableMapping.values, MutableMapping.items  # type: ignore[assignment]

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return OrderedDict, ([*self.items()],)  # torch.load(weights_only=True) accepts it


register_pytree_node(
    VerifiedOnAccess,
    lambda state: (list(state.values()), list(state.keys())),
    lambda values, names: dict(zip(names, values, strict=True)),
)

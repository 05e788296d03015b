"""The finished parts of a calibration from a folder, which a later call goes on from.

    .out.lowbit-calibration/
        key.json    digests of what the call was given
        part/       the file that is being written
        model/      a file for each finished place: before the blocks, a block, after them. With its config.json, which
                    comes last, it is a folder in lowbit's format

A file takes its place once its bytes are on the disk, so a part is there whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lowbit.files import digests, new_path, tensor_file
from lowbit.formats.base import FormatError
from lowbit.formats.folder import open_shard
from lowbit.formats.registry import by_name
from lowbit.formats.shards import write_json
from lowbit.tensor.core.base import LowbitTensor

_TEXT = "lowbit_calibration"
"""In the metadata of a part: the descriptions of its low-bit weights, and the results of its layers."""
Results = dict[str, Any]
"""What the report says of a part, in JSON types."""


class Finished:
    """The parts in the folder `place`.

    Args:
        place: a folder that no other process writes to.
        key: a digest of each thing that decides the result, by its name.
        writes: False: another process writes the parts, and has seen to the key.

    Raises FormatError if the folder has parts of a call with another key.
    """

    def __init__(self, place: Path, key: Mapping[str, str], writes: bool = True) -> None:
        self.place, self.folder, self._writes = place, place / "model", writes
        self._own = by_name("lowbit")
        if not writes:
            return
        shutil.rmtree(place / "part", ignore_errors=True)
        (place / "part").mkdir()
        self.folder.mkdir(exist_ok=True)
        path = place / "key.json"
        if not any(self.folder.glob("*.safetensors")):
            write_json(place / "part" / path.name, key)
            new_path.put_files([place / "part" / path.name], place)
        else:
            try:
                held = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                held = {}
            if other := [name for name, digest in key.items() if held.get(name) != digest]:
                raise FormatError(
                    f"{place} holds the finished part of a calibration with another {' and another '.join(other)}: "
                    "call it as before to go on from there, or delete that folder to begin anew"
                )

    def has(self, name: str) -> bool:
        return self._path(name).is_file()

    def read(self, name: str) -> tuple[dict[str, Tensor], Results]:
        """The tensors of a part, low-bit and plain, and its results. Raises FormatError for a damaged file."""
        file = open_shard(self._path(name))
        try:
            stored = json.loads(file.metadata[_TEXT])
            config, results = stored["config"], stored["results"]
        except (LookupError, ValueError) as error:
            raise FormatError(f"{file.path} is not a part of a calibration; delete it") from error
        weights = self._own.find(file.entries.keys(), config)
        parts = {stored for own in weights.values() for stored in own.values()}
        found = {n: file.tensor(n).clone() for n in file.entries if n not in parts}
        for weight, own in weights.items():
            tensors = {part: file.tensor(stored).clone() for part, stored in own.items()}
            found[weight] = self._own.read(tensors, config, weight, None)
        return found, results

    def write(self, name: str, tensors: Mapping[str, Tensor], results: Results) -> None:
        """Write a part, if this process writes."""
        if not self._writes:
            return
        stored: dict[str, Tensor] = {}
        weights: dict[str, LowbitTensor] = {}
        for own, value in tensors.items():
            if isinstance(value, LowbitTensor):
                weights[own] = value
                parts = self._own.encode(value)
                stored |= {self._own.stored_name(own, part): t for part, t in parts.items()}
            else:
                stored[own] = value.detach().contiguous()
        text = json.dumps({"config": self._own.config(weights, ()), "results": results})
        path = self.place / "part" / self._path(name).name

        def describe(entries: digests.Entries) -> dict[str, str]:
            return {"format": "pt", _TEXT: text, **digests.texts(entries)}

        tensor_file.write(path, stored, describe)
        new_path.put_files([path], self.folder)

    def complete(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, LowbitTensor],
        settings: Mapping[str, Any],
    ) -> Path:
        """Write config.json, once all parts are there. `weights`: all low-bit weights, on any device; `settings`: more
        of its "quantization_config". Returns the folder."""
        described = {**config, "quantization_config": {**self._own.config(weights, ()), **settings}}
        write_json(self.folder / "config.json", described)
        return self.folder

    def _path(self, name: str) -> Path:
        return self.folder / f"model-{name}.safetensors"

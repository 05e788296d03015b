"""`save` accepts any JSON beside tensors, and names the path of a value that is not JSON."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import lowbit as lb
from lowbit.checkpoint import CheckpointError


def endless() -> dict[str, Any]:
    nested: dict[str, Any] = {}
    nested["again"] = [nested]
    return nested


REFUSED: dict[str, tuple[Any, str]] = {
    "a list": ([1], r"metadata must be a dict, got \[1\]"),
    "text": ("text", "metadata must be a dict, got 'text'"),
    "a number": (3, "metadata must be a dict, got 3"),
    "an int": ({1: 2}, r"metadata has the key 1, of type int; JSON has only str keys. Use str\(key\)"),
    "nested": ({"a": {"b": {1: 2}}}, r"metadata\.a\.b has the key 1, of type int"),
    "in a list": ({"a": [0, {2.5: 1}]}, r"metadata\.a\[1\] has the key 2\.5, of type float"),
    "None": ({None: 1}, "metadata has the key None, of type NoneType"),
    "a tuple": ({(1, 2): 1}, r"metadata has the key \(1, 2\), of type tuple"),
    "bytes": ({b"a": 1}, "metadata has the key b'a', of type bytes"),
    "a bool": ({True: 1}, "metadata has the key True, of type bool"),
    "of a proxy": ({"a": MappingProxyType({3: 1})}, r"metadata\.a has the key 3"),
    "a tensor": ({"a": torch.ones(2)}, r"metadata\.a is a tensor, where only plain JSON"),
    "a set": ({"a": {1}}, r"metadata\.a is a set"),
    "a numpy int": ({"a": np.int64(1)}, r"metadata\.a is a int64"),
    "a huge int": ({"a": {"b": 10**5000}}, r"metadata\.a\.b is an int of 16610 bits; .*hex\(value\)"),
    "itself": (endless(), "metadata.again.*holds itself"),
}  # fmt: skip


@pytest.mark.parametrize("metadata,match", REFUSED.values(), ids=REFUSED)
def test_metadata_that_cannot_be_saved(tmp_path: Path, metadata: Any, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        lb.save({"a": torch.ones(2)}, tmp_path / "m.safetensors", metadata=metadata)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (endless(), "v.again.*holds itself"),
        (-(10**5000), "v is an int of 16610 bits"),
        ({"s": {0: 1}}, r"v\.s has the key 0, of type int.*optimizer's state_dict"),
    ],
    ids=["itself", "huge int", "int key"],
)
def test_values_that_cannot_be_saved(tmp_path: Path, value: Any, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        lb.save({"v": value}, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_metadata_of_any_json(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    nested: Any = 1
    for _ in range(90):
        nested = [nested]
    metadata = MappingProxyType(
        {
            "proxy": MappingProxyType({"a": (1, 2)}),
            "infinite": [float("inf"), -float("inf")],
            "half of a pair \ud800": "\udfff",
            "numpy": np.float64(0.1),
            "large": 2**13_999,
            "flag": True,
            "": {"": None},
            "nested": nested,
        }
    )
    lb.save({"a": torch.ones(2)}, path, metadata=metadata)
    expected = {**metadata, "proxy": {"a": [1, 2]}}
    assert lb.load_metadata(path) == expected
    assert lb.load_metadata(path)["flag"] is True
    lb.save({"a": torch.ones(2)}, path, metadata={"n": float("nan")})
    assert str(lb.load_metadata(path)["n"]) == "nan"


@pytest.mark.parametrize("name", ["__metadata__", "half of a pair \ud800"])
def test_names_that_safetensors_cannot_hold(tmp_path: Path, name: str) -> None:
    """Such an int was once written silently, to a file that nothing could read."""
    with pytest.raises(CheckpointError, match=re.escape(repr(name)) + ".*rename it"):
        lb.save({name: torch.ones(2)}, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())

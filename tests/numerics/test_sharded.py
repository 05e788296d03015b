"""DTensors and modules of FSDP2 are recognized without being imported, also while another thread imports them."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.numerics.sharded import is_dtensor, is_fsdp_module

ASKED = {"torch.distributed.tensor": is_dtensor, "torch.distributed.fsdp": is_fsdp_module}


@pytest.mark.parametrize(("name", "asked"), ASKED.items(), ids=ASKED)
def test_nothing_is_one_before_the_import_ends(
    name: str, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert not asked(torch.ones(2)) and not asked(nn.Linear(2, 2))
    monkeypatch.delitem(sys.modules, name)
    assert not asked(torch.ones(2)) and not asked(nn.Linear(2, 2))


def test_the_class_is_found() -> None:
    """Tests of DTensors themselves are in tests/distributed."""
    from torch.distributed.fsdp import FSDPModule

    assert is_fsdp_module(object.__new__(type("Sharded", (FSDPModule, nn.Module), {})))


def test_compiled_programs_ask_without_warnings() -> None:
    """torch warns of deprecated names where a compiled program reads all names of torch.distributed."""

    def asking(x: torch.Tensor) -> torch.Tensor:
        return x if is_dtensor(x) else x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.compile(asking, backend="eager", fullgraph=True)(torch.ones(2))
    assert found.tolist() == [2, 2]

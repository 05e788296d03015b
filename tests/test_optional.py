"""Optional packages: the extras of lowbit's metadata, and an error that names the extra wherever one is missing."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit import optional
from tests import forked

ROOT = Path(__file__).resolve().parent.parent
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))[
    "project"
]["optional-dependencies"]
HERE = sorted({*EXTRAS} - {"docs", "test", "test-integrations"})


class Metadata(importlib.metadata.Distribution):
    """What a wheel of lowbit says of its extras."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        lines = [
            "Metadata-Version: 2.4",
            "Name: lowbit",
            "Version: 0",
            "Requires-Dist: torch>=2.11",
        ]
        for extra, requirements in EXTRAS.items():
            lines.append(f"Provides-Extra: {extra}")
            for line in requirements:
                needed, _, condition = line.partition(";")
                both = f"({condition.strip()}) and " if condition else ""
                lines.append(f"Requires-Dist: {needed}; {both}extra == '{extra}'")
        return "\n".join(lines) + "\n"

    def locate_file(self, path: Any) -> Any:
        return Path(path)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Sets the version that every package seems to have; None: it is missing."""

    def to(version: str | None) -> None:
        def version_of(name: str) -> str:
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", version_of)

    return to


def test_the_extras_are_those_of_pyproject() -> None:
    found = optional.extras()
    assert sorted(found) == HERE
    named = {p.name for packages in found.values() for p in packages}
    lines = [line for extra in HERE for line in EXTRAS[extra] if not line.startswith("lowbit[")]
    missing = {re.split(r"[^\w.-]", line)[0] for line in lines} - named
    assert missing <= ({"triton"} if sys.platform != "linux" else set())
    assert {p.name for p in found["recipes"]} < {p.name for p in found["finetune"]}
    assert str(optional.package("torchtitan", "torchtitan")) == "torchtitan >= 0.2.2, < 0.3"


def test_a_wheel_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = optional.extras()
    monkeypatch.setattr(optional, "__file__", str(tmp_path / "lowbit/optional.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Metadata())
    optional.extras.cache_clear()
    try:
        assert optional.extras() == expected
    finally:
        optional.extras.cache_clear()


def test_without_metadata_there_are_no_extras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program's pyproject.toml may lie beside a copy of the package."""

    def none(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    monkeypatch.setattr(optional, "__file__", str(tmp_path / "lowbit/optional.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", none)
    optional.extras.cache_clear()
    try:
        assert optional.extras() == {}
        with pytest.raises(ImportError, match=r"needs absent, which is not .*'lowbit\[hf\]'"):
            optional.imported("absent", "this needs", "hf")
    finally:
        optional.extras.cache_clear()


@pytest.mark.parametrize(
    ("version", "obstacle"),
    [
        (None, "which is not installed"),
        ("0.2.1", "and 0.2.1 is installed"),
        ("0.2.2", None),
        ("0.2.2.dev20260101", None),
        ("0.3.0", None),
        ("0.4", "and 0.4 is installed"),
        ("1.0", "and 1.0 is installed"),
    ],
)
def test_releases(
    version: str | None, obstacle: str | None, installed: Callable[[str | None], None]
) -> None:
    installed(version)
    assert optional.package("torchtitan", "torchtitan").obstacle() == obstacle
    if obstacle is not None:
        upgrade = "" if version is None else "--upgrade "
        message = (
            f"this needs torchtitan >= 0.2.2, < 0.3, {obstacle}: pip install {upgrade}'lowbit["
        )
        with pytest.raises(RuntimeError, match=re.escape(message)):
            optional.check("this needs", ["torchtitan"], "torchtitan", RuntimeError)


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64))
    lowbit.quantize_(model, lowbit.Int8WeightOnly())
    return model


def _llama(folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    (folder / "m").mkdir()
    (folder / "m/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    safetensors.save_file({"w": torch.ones(2, 2)}, folder / "m/model.safetensors")


def _load_llama(folder: Path) -> None:
    lowbit.load_pretrained(folder / "m")


def _draw(folder: Path) -> None:
    lowbit.inference.evaluation.report.EvaluationReport(None, ()).draw(folder / "s.png")


def _callback(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    lowbit.qat.prepare_(model, lowbit.Int8WeightOnly())
    lowbit.qat.Schedule(model, start=1).callback()


CASES: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "gguf": ("gguf", "gguf", lambda d: lowbit.load_pretrained(d / "m.gguf")),
    "architecture": ("transformers", "hf", _load_llama),
    "Trainer": ("transformers", "hf", _callback),
    "picture": ("matplotlib", "cli", _draw),
}


@pytest.mark.parametrize(("package", "extra", "use"), CASES.values(), ids=CASES)
def test_a_missing_package_is_named_with_its_extra(
    package: str,
    extra: str,
    use: Callable[[Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    if use is _load_llama:
        _llama(tmp_path)
    for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises((ImportError, ValueError)) as caught:
        use(tmp_path)
    message = str(caught.value)
    assert re.search(rf"{package}( >= [\d.]+)?, which is not installed: ", message), message
    assert message.endswith(f"pip install 'lowbit[{extra}]'")


MODULES = {"hf": "transformers", "accelerate": "accelerate", "lightning": "lightning"}
_WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import importlib.metadata as metadata
found = metadata.version
def version(name):
    if name == sys.argv[1]:
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
import torch, lowbit, importlib
own = importlib.import_module(f"lowbit.{sys.argv[2]}")
own.cpu_offload(torch.nn.Linear(2, 2))  # imports accelerate when it is called
"""


@pytest.mark.parametrize(("module", "package"), MODULES.items(), ids=MODULES)
def test_a_module_names_the_extra_of_its_package(module: str, package: str, tmp_path: Path) -> None:
    done = forked.run(_WITHOUT, package, module, folder=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: lowbit.{module} needs {package}"), done.stderr
    assert last.endswith(f"which is not installed: pip install 'lowbit[{module}]'")


def test_what_a_package_of_an_extra_needs_is_named_with_it() -> None:
    """typer's later releases need pydantic, for example."""
    assert optional.bringing("matplotlib") == ("cli", "matplotlib")
    assert optional.bringing("markdown_it_py") == ("recipes", "markdown-it-py")
    assert optional.bringing("package_that_nobody_wrote") is None
    pytest.importorskip("typer")
    lines = importlib.metadata.requires("typer") or []
    plain = [re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line]
    for name in {*plain} - {"rich"}:
        assert optional.bringing(name.replace("-", "_")) == ("cli", "typer")


def test_what_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert optional.is_importable("json") and optional.is_importable("xml.dom.minidom")
    assert not optional.is_importable("no_module_of_this_name")
    monkeypatch.setitem(sys.modules, "json", None)
    assert not optional.is_importable("json")
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    assert optional.is_importable("made_by_hand")

"""Releases of the packages around, from the oldest that pyproject.toml names on: what lowbit looks up in them.

`tests/data/oldest_names.json` holds the names of other packages that lowbit's files mention and that the oldest
releases have. A change that looks up another name fails here, in any environment, until somebody has run

    python -m tests.integrations.test_other_releases

where the oldest releases are installed, as the job "oldest" of the workflow installs them. A name that only newer
releases have belongs behind a guard, and into `GUARDED`.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowbit import optional

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests/data/oldest_names.json"
OUTSIDE = ("transformers", "peft", "accelerate", "lightning", "diffusers")
GUARDED: set[str] = set()
"""Names that lowbit looks up only where they exist."""
DOTTED = re.compile(rf"({'|'.join(OUTSIDE)})\.(?!lowbit)\w+(\.\w+)*")
IMPORTS = """
import importlib, pkgutil, types, torch
from transformers.integrations import moe

{lacking}
import lowbit.hf, lowbit.interop
for each in pkgutil.walk_packages(lowbit.interop.__path__, "lowbit.interop."):
    if each.name.startswith(("lowbit.interop.hf", "lowbit.interop.peft", "lowbit.interop.accelerate")):
        if not each.name.endswith(("experts_in_graph", "frozen_experts")):  # imported by the op alone
            importlib.import_module(each.name)
print("imported")
"""
LACKING = {
    "gradient": """
fallback = torch.ops.transformers.grouped_mm_fallback
torch.ops.transformers = types.SimpleNamespace(grouped_mm_fallback=fallback)
""",
    "op": """
del moe._grouped_mm_fallback
torch.ops.transformers = types.SimpleNamespace()
""",
}


def names_in(source: str) -> Iterator[str]:
    """The dotted names of other packages in a file: imports, attributes of what it imports, ops, and strings."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_outside(node.module):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            bound |= {a.asname or a.name: a.name for a in node.names if _is_outside(a.name)}
    yield from bound.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in bound and re.fullmatch(r"\w+(\.\w+)*", rest):
                yield f"{bound[first]}.{rest}"
            elif first == "torch" and re.fullmatch(rf"ops\.({'|'.join(OUTSIDE)})\.\w+", rest):
                yield f"torch.{rest}"
        elif isinstance(node, ast.Constant) and DOTTED.fullmatch(str(node.value)):
            yield str(node.value)


def _is_outside(module: str) -> bool:
    return module.partition(".")[0] in OUTSIDE


def looked_up() -> set[str]:
    return {
        name for file in ROOT.glob("lowbit/**/*.py") for name in names_in(file.read_text("utf-8"))
    }


def exists(name: str) -> bool:
    """True if this is a module, or an attribute of one."""
    if name.startswith("torch.ops.transformers"):
        importlib.import_module("transformers.integrations.moe")  # registers them
    parts = name.split(".")
    for at in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:at]))
        except ImportError:
            continue
        for part in parts[at:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def oldest() -> dict[str, str]:
    """The first releases that the extras name, by package."""
    packages = [p for extra in optional.extras().values() for p in extra if p.name in OUTSIDE]
    return {p.name: p.releases.removeprefix(">=") for p in packages}


def test_the_oldest_releases_have_all_names() -> None:
    table = json.loads(TABLE.read_text("utf-8"))
    assert table["releases"] == oldest()
    unknown = looked_up() - {*table["names"]} - GUARDED
    assert not unknown, (
        f"not known of the oldest releases: {sorted(unknown)}; see the file of this test"
    )


def test_what_is_installed_has_all_names() -> None:
    pytest.importorskip("transformers")
    here = {p for p in OUTSIDE if optional.version(p) is not None}
    names = {
        n for n in looked_up() - GUARDED if n.split(".")[n.startswith("torch.ops.") * 2] in here
    }
    assert len(names) > 40
    missing = sorted(name for name in names if not exists(name))
    assert not missing


@pytest.mark.parametrize("lacking", LACKING.values(), ids=LACKING)
def test_modules_import_without_ops_that_come_and_go(lacking: str) -> None:
    """transformers before 5.23 has no op for the gradient, and it may lose the other one."""
    pytest.importorskip("transformers")
    code = IMPORTS.format(lacking=lacking)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0 and "imported" in run.stdout, run.stderr


def write() -> None:
    found = {n for n in looked_up() if exists(n) or n.startswith("diffusers")}
    table = {"releases": oldest(), "names": sorted(found)}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    for package, release in oldest().items():
        print(package, release, "installed:", optional.version(package))
    print("missing:", *sorted(looked_up() - found))


if __name__ == "__main__":
    write()

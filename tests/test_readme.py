"""The README's Python runs as it stands, top to bottom, and its commands and folder tree are true."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

RUNNER = textwrap.dedent(
    """
    import sys, torch, torch.distributed as dist
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
    scope = {"__name__": "__main__"}
    for path in sys.argv[2:]:
        exec(compile(open(path, encoding="utf-8").read(), path, "exec"), scope)
    dist.destroy_process_group()
    """
)


FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for tag, text in FENCED if tag == language]


def test_python_snippets_run(tmp_path: Path) -> None:
    """In order, in one namespace, as a reader would paste them; in a process of one FSDP2 rank."""
    pytest.importorskip("safetensors")
    snippets = []
    for number, code in enumerate(blocks("python"), start=1):
        path = tmp_path / f"README_snippet_{number}.py"
        path.write_text(code, encoding="utf-8")
        snippets.append(str(path))
    assert len(snippets) >= 4
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(tmp_path / "store"), *snippets],
        cwd=tmp_path,
        env={**_clean_environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for output in blocks("text"):
        assert output in done.stdout


def _clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}


def test_bytes_of_the_optimizer_state() -> None:
    """The README's figure: 4-bit codes of two moments, and a float32 scale a block of 128 for each."""
    import lowbit

    weight = torch.nn.Parameter(torch.zeros(512, 1024))
    weight.grad = torch.ones_like(weight)
    optimizer = lowbit.optim.AdamW4bit([weight])
    optimizer.step()
    moments = [optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq")]
    parts = [getattr(moment, name) for moment in moments for name in moment.tensor_attrs]
    size = sum(part.numel() * part.element_size() for part in parts) / weight.numel()
    assert f"{size:.2f} bytes a parameter" in README


def test_commands_name_what_exists() -> None:
    """Two commands; each installs an extra that exists, with the constraints, and runs a module that exists."""
    commands = [line for block in blocks("bash") for line in block.splitlines() if line]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert len(commands) == 2
    for command in commands:
        venv, install, run = (shlex.split(part) for part in command.split(" && "))
        assert venv == ["python3", "-m", "venv", ".venv"]
        assert install[:4] == [".venv/bin/pip", "install", "-c", "constraints.txt"]
        extra = re.fullmatch(r"\.\[(\w+)\]", install[-1])
        assert extra is not None and extra[1] in extras
        assert run[:2] == [".venv/bin/python", "-m"]
    assert commands[0].endswith(" recipes.quickstart")
    assert (ROOT / "recipes/quickstart.py").exists() or (
        ROOT / "recipes/quickstart/__main__.py"
    ).exists()
    assert commands[1].endswith(" pytest -n 2")


def test_folder_tree_is_true() -> None:
    """Every path the README's tree names exists, and no module of lowbit is missing from it."""
    (tree,) = (block for block in blocks("") if block.startswith("lowbit/"))
    named, top = [], ""
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            top = name
        named.append(name if name == top else top + name)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
    modules = {
        f"lowbit/{p.name}" + ("/" if p.is_dir() else "") for p in (ROOT / "lowbit").iterdir()
    }
    unnamed = (
        {m for m in modules if not Path(m).name.startswith(("__", "."))}
        - set(named)
        - {"lowbit/py.typed"}
    )
    assert not unnamed, "name them in the README's tree"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)", PROSE))))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_every_public_name_in_backticks_exists() -> None:
    """A name like `AdamW4bit` or `quantize_` in the README is one that lowbit has."""
    import lowbit

    spaces = [lowbit, *(getattr(lowbit, name) for name in ("optim", "train", "qat", "inference"))]
    table = README.split("## What there is")[1].split("## ")[0]
    names = {n.split(".")[-1] for n in re.findall(r"`([A-Za-z_.0-9]+)`", table)}
    foreign = {"pt", "save", "checkpoint"}  # .pt, torch.save, torch.distributed.checkpoint
    absent = {n for n in names - foreign if not any(hasattr(space, n) for space in spaces)}
    assert not absent

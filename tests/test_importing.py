"""`import lowbit` is quick and complete; the command line's help and its errors about arguments need no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from lowbit_kernels.runtime.library import SCHEMAS
from tests.schemes import SCHEMES
from tests.test_structure import OPTIONAL

ROOT = Path(__file__).resolve().parent.parent
PATH = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
SLOW = (
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("torch._dynamo", "torch._inductor", "torch.export", "sympy", "triton", "rich", "typer"),
    *(
        "matplotlib",
        "tomllib",
        "lowbit.formats",
        "lowbit.cli",
        "lowbit.testing",
        "lowbit.hf",
    ),
)
OPS = [line.partition("(")[0].split()[1] for line in SCHEMAS.read_text().splitlines()]
MOST_SECONDS = 2.0
"""Of CPU time. It takes 0.06 to 0.35 s, so that a busy machine passes, and an import of sympy with others does not."""

_BARE = """
import json, sys, time
import torch
optional, tried = json.loads(sys.argv[3]), []
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in optional:
            tried.append(name)
            raise ImportError("lowbit imports " + name + " on import")
sys.meta_path.insert(0, refuse := Refuse())
before, start = set(sys.modules), time.process_time()
import lowbit
seconds, new = time.process_time() - start, set(sys.modules) - before
sys.meta_path.remove(refuse)
found = {
    "seconds": seconds,
    "tried": tried,
    "new": sorted(new),
    "ops": [name for name in json.loads(sys.argv[2]) if hasattr(torch.ops.lowbit, name)],
    "safe": [f"{c.__module__}.{c.__qualname__}" for c in torch.serialization.get_safe_globals()],
    "missing": [name for name in lowbit.__all__ if name not in dir(lowbit)],
    "optimizer": lowbit.optim.AdamW8bit.__name__,
}
try:
    lowbit.peft
except AttributeError as error:
    found["hint"] = str(error)
loaded = [torch.load(sys.argv[1], weights_only=only) for only in (True, False)]
found["kinds"] = [[type(t).__name__ for t in some.values()] for some in loaded]
import torch.distributed.tensor as dt, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
plain = torch.nn.Linear(64, 64, bias=False)
lowbit.quantize_(torch.nn.Sequential(plain), lowbit.Int8WeightOnly())
weight = dt.DTensor.from_local(plain.weight.detach(), mesh, [dt.Shard(0)], run_check=False)
x = dt.DTensor.from_local(torch.ones(2, 64), mesh, [dt.Replicate()], run_check=False)
found["sharded"] = torch.nn.functional.linear(x, weight).full_tensor().tolist()
found["whole"] = torch.nn.functional.linear(torch.ones(2, 64), plain.weight).tolist()
dist.destroy_process_group()
print(json.dumps(found))
"""


def weights() -> dict[str, Any]:
    """A weight of each scheme."""
    found = {}
    for name, scheme in SCHEMES.items():
        model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False))
        lowbit.quantize_(model, scheme)
        found[name] = model[0].weight.detach()
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bare")
    torch.save(weights(), folder / "weights.pt")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _BARE,
            str(folder / "weights.pt"),
            json.dumps(OPS),
            json.dumps(OPTIONAL),
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_lowbit_imports_nothing_slow(bare: Any) -> None:
    slow = [n for n in bare["new"] if any(n == s or n.startswith(f"{s}.") for s in SLOW)]
    assert slow == []


def test_importing_lowbit_imports_nothing_optional(bare: Any) -> None:
    """Every optional package was impossible to import then."""
    optional = {name.split(".")[0] for name in OPTIONAL}
    assert bare["tried"] == [] and not optional & {name.split(".")[0] for name in bare["new"]}


def test_importing_lowbit_is_quick(bare: Any) -> None:
    assert bare["seconds"] < MOST_SECONDS


def test_importing_lowbit_registers_all(bare: Any) -> None:
    safe = {f"{c.__module__}.{c.__qualname__}" for c in torch.serialization.get_safe_globals()}
    own = {name for name in safe if name.startswith("lowbit.")}
    assert own and own <= {*bare["safe"]}
    assert bare["ops"] == OPS
    assert bare["missing"] == [] and bare["optimizer"] == "AdamW8bit"


def test_a_module_that_is_not_imported_is_named(bare: Any) -> None:
    assert bare["hint"].endswith("no attribute 'peft': run `import lowbit.peft` first")


def test_files_load_after_a_bare_import(bare: Any) -> None:
    expected = [type(t).__name__ for t in weights().values()]
    assert bare["kinds"] == [expected, expected]


def test_dtensors_work_that_are_imported_later(bare: Any) -> None:
    assert bare["sharded"] == bare["whole"]


# ---- the command line, without torch ---------------------------------------------------------------------------------

COMMANDS = ("quantize", "export", "inspect", "eval", "generate", "estimate", "bench", "doctor")
LINES = {
    **{f"{name} --help": 0 for name in COMMANDS},
    **{"--help": 0, "--version": 0, "": 2, "quantise": 2, "quantize": 2, "export m --bits": 2},
}
"""Lines of arguments with their exit codes."""


def imported(
    *program: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """A program of Python that ran, and the modules that it imported."""
    done = subprocess.run(
        [program[0], "-X", "importtime", *program[1:]],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
    )
    lines = done.stderr.splitlines()
    names = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    done.stderr = "".join(f"{x}\n" for x in lines if not x.startswith("import time:"))
    return done, names


@pytest.mark.parametrize(("line", "code"), LINES.items(), ids=LINES)
def test_help_and_wrong_arguments_need_no_torch(line: str, code: int) -> None:
    pytest.importorskip("typer")
    done, names = imported(sys.executable, "-m", "lowbit", *line.split())
    assert done.returncode == code, done.stderr
    assert "lowbit.cli.app" in names and not names & {"torch", "numpy", "lowbit.surface"}
    if "--help" in line or not line:
        shown = done.stderr if code else done.stdout
        assert shown.startswith("Usage: lowbit") and "--help" in shown


def test_the_script_of_pip_needs_no_torch(tmp_path: Path) -> None:
    """As pip writes it, beside the interpreter of an environment."""
    pytest.importorskip("typer")
    if os.name == "nt":
        pytest.skip("pip writes a program there")
    venv.create(tmp_path / "own", symlinks=True)
    script = tmp_path / "own/bin/lowbit"
    script.write_text("import sys\nfrom lowbit.cli import main\nsys.exit(main())\n")
    path = os.pathsep.join((PATH, sysconfig.get_path("purelib")))
    for called in (script, tmp_path / "link" / "lowbit"):
        if called != script:
            called.parent.mkdir()
            called.symlink_to(script)
        done, names = imported(
            str(tmp_path / "own/bin/python"), str(called), "--help", PYTHONPATH=path
        )
        assert done.stdout.startswith("Usage: lowbit") and "torch" not in names


@pytest.mark.parametrize(
    ("argv", "original"),
    [
        (["-m", "--help"], ["python", "-m", "package_that_imports_lowbit", "--help"]),
        (["-m", "lowbit"], ["python", "-m", "trainer", "lowbit"]),
        (["lowbit.py"], ["python", "lowbit.py"]),
        (["lowbit"], ["python", "lowbit"]),
        (["-c"], ["python", "-c", "import lowbit"]),
        ([""], ["python"]),
        ([], ["embedded"]),
    ],
)
def test_other_programs_import_all(
    argv: list[str], original: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of the user's own that is called `lowbit`, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lowbit").touch()
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert not lowbit._is_command()


def test_names_come_at_their_first_use_in_the_command_line() -> None:
    code = """
import sys
sys.argv[0], sys.orig_argv = "-m", ["python", "-m", "lowbit"]
import lowbit
assert "torch" not in sys.modules
from lowbit import Int4WeightOnly, optim
assert optim.AdamW8bit and Int4WeightOnly and "torch" in sys.modules
assert "export" in lowbit.__all__ and "export" in dir(lowbit) and not hasattr(lowbit, "nothing")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_help_names_the_formats() -> None:
    pytest.importorskip("typer")
    from lowbit.cli import arguments
    from lowbit.formats.registry import FORMATS

    assert tuple(format.name for format in FORMATS) == arguments.FORMATS


def test_the_site_finds_what_the_package_gives_out() -> None:
    """It reads the sources and imports nothing."""
    griffe = pytest.importorskip("griffe")
    package = griffe.load("lowbit", search_paths=[ROOT], resolve_aliases=True)
    assert sorted(map(str, package.exports)) == lowbit.__all__
    assert set(lowbit.__all__) <= {*package.members}

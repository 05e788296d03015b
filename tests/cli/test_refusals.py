"""What cannot be done is one line on stderr that says the way out, an exit code, and nothing half-written."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.cli import main
from lowbit.cli.errors import FAILED, INTERRUPTED, MISUSED, one_line
from tests.cli.command import environment, listing, make_model, weights
from tests.cli.command import lowbit as command

SHARD = "model-00002-of-00002.safetensors"


def refused(line: str, home: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and the message of `lowbit LINE`, which leaves the folder as it was."""
    before = listing(home)
    code = main(shlex.split(line))
    printed = capfd.readouterr()
    assert code != 0
    assert printed.out == ""
    assert printed.err.startswith("lowbit: ") and printed.err.count("\n") == 1, printed.err
    assert listing(home) == before
    return code, printed.err


def _edit_config(home: Path, **entries: Any) -> None:
    path = home / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def _truncate(home: Path) -> None:
    path = home / "model" / SHARD
    path.write_bytes(path.read_bytes()[:-1000])


def _claim_other_format(home: Path) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    _edit_config(home, quantization_config={**settings, "config_groups": groups})


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda home: shutil.rmtree(home / "model"), "model does not exist"),
    "no model": (lambda home: (home / "model/config.json").unlink(), "no config.json"),
    "no JSON": (lambda home: (home / "model/config.json").write_text("{"), "cannot be read"),
    "a missing shard": (lambda home: (home / "model" / SHARD).unlink(), f"lacks the shard {SHARD}"),
    "a truncated shard": (_truncate, "is truncated, damaged"),
    "another format": (_claim_other_format, "config.json says compressed-tensors"),
}
LINES = {
    "quantize": "quantize model --out new",
    "export": "export model --format lowbit --out new",
    "inspect": "inspect model",
}


@pytest.mark.parametrize(
    "line",
    [
        "eval model --data text.txt",
        "eval other --data text.txt --against model",
        "generate model --prompt the",
    ],
)
@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_folders_are_refused_before_transformers_is_imported(
    damage: Callable[[Path], object],
    reason: str,
    line: str,
    home: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    shutil.copytree(home / "model", home / "other")
    damage(home)
    code, message = refused(line, home, capfd)
    assert code == FAILED and reason in message


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_folders_are_refused(
    damage: Callable[[Path], object],
    reason: str,
    line: str,
    home: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    damage(home)
    code, message = refused(line, home, capfd)
    assert code == FAILED and reason in message


REFUSED = {
    "quantize model --out taken": "--overwrite",
    "quantize model --out text.txt": "give the name of a new one",
    "quantize model --out missing/new": "make it first",
    "quantize model --out text.txt/new": "make it first",
    "quantize model --out model": "is the folder that is read",
    "quantize model --out new --scheme int5": "int5 is IntxWeightOnly(bits=5)",
    "quantize model --out new --scheme 'int4(size=3)'": "size",
    "quantize model --out new --scheme 'int4(scale_dtype=[1])'": "scale_dtype must be torch.float16",
    "quantize model --out new --group-size 96": "states the loss; --format lowbit holds every scheme",
    "quantize model --out new --scheme nvfp4 --group-size 32": "'group_size'; accepted: no options",
    "quantize model --out new --format onnx9": "accepted: lowbit",
    "quantize model --out new --format onnx": "write it from Python",
    "export low --out new --format aoti": "write it from Python",
    "quantize model --out new --layers lm_head": "PATTERN=SCHEME",
    "quantize model --out new --layers 'nothing=int8'": "chose no weight",
    "quantize model --out new --layers 'lm_head=int8' --layers 'lm_head=none'": "it is given twice",
    "quantize model --out new --layers '*=int8'": "give --scheme alone",
    "quantize model --out new --layers '*=none'": "give --scheme alone",
    "quantize model --out new --layers 're:(=int8'": "is not a regular expression",
    "quantize model --out new --plan no.json": "--plan no.json cannot be read",
    "quantize model --out new --plan text.txt": "is not a plan in JSON",
    "quantize model --out new --plan plan.json --group-size 64": "leave out --scheme",
    "quantize model --out new --max-shard-size huge": "--max-shard-size is 'huge'",
    "quantize model --out new --scheme ''": "names no scheme (invalid syntax); accepted",
    "quantize model --out new --device ''": "--device '' cannot be used",
    "quantize model --out new --scheme int8_int8_static --data no.txt": "give a file of text",
    "quantize model --out new --scheme int8_int8_static --data model": "give a file of text",
    "quantize model --out new --scales best": "accepted: minmax",
    "quantize model --out new --device cuda:99": "`lowbit doctor`",
    "quantize low --out new": "in low bits already",
    "export model --format gptq --out new": "`lowbit quantize`",
    "export low --format bitsandbytes-int8 --out new": "--lossy",
    "export low --format awq --out new --group-size 32": "--scheme",
    "eval model --data text.txt --picture chart.doc": ".png",
    "eval model --data text.txt --picture missing/chart.png": "make it first",
    "inspect low --against other": "--against",
    "estimate text.txt": "give a config.json",
    "estimate missing.json": "does not exist",
    "estimate owner/model": "`hf download owner/model --local-dir model`",
    "quantize owner/model --out new": "`hf download owner/model --local-dir model`",
    "estimate other/config.json": "has no num_hidden_layers",
    "estimate negative.json": "num_hidden_layers is -2; accepted: whole numbers above 0",
    "bench --device tpu": "torch sees: cpu",
    "bench --device meta": "accepted: cpu",
}


@pytest.fixture(scope="module")
def low(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in low bits."""
    folder = tmp_path_factory.mktemp("low")
    out = folder / "low"
    line = ["quantize", str(make_model(folder / "model")), "--format", "lowbit", "--out", str(out)]
    assert main(line) == 0
    return out


@pytest.fixture
def crowded(home: Path, low: Path) -> Path:
    """`home` with a model in low bits, another model, and a checkpoint that an export could replace."""
    from safetensors.torch import save_file

    shutil.copytree(low, home / "low")
    (home / "taken").mkdir()
    (home / "taken/config.json").touch()
    (home / "other").mkdir()
    save_file({"other.weight": weights()["lm_head.weight"]}, home / "other/model.safetensors")
    (home / "other/config.json").write_text("{}")
    sizes = dict.fromkeys(
        ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"), 8
    )
    (home / "negative.json").write_text(json.dumps({**sizes, "num_hidden_layers": -2}))
    return home


@pytest.mark.parametrize(("line", "way_out"), REFUSED.items(), ids=REFUSED)
def test_wrong_arguments_are_refused(
    line: str, way_out: str, crowded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, message = refused(line, crowded, capfd)
    assert code == FAILED and way_out in message


def test_a_model_without_its_tokenizer_makes_no_gguf_file(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    _, message = refused("quantize model --out new.gguf --format gguf", home, capfd)
    assert "put a tokenizer.json with merges beside the model" in message


def test_a_full_gpu_is_no_mistake_of_lowbit() -> None:
    text = one_line(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert text == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert "please report it" in one_line(RuntimeError("surprising"))


@pytest.mark.parametrize(
    ("line", "reason"),
    {
        "quantize model": "--out",
        "quantize": "MODEL",
        "quantise model --out new": "quantise",
        "quantize model --out new --bits 4": "--bits",
        "estimate model --batch 0": "--batch",
        "estimate model --batch many": "--batch",
        "eval model --data text.txt --limit -5": "--limit",
        "quantize model --out new --group-size=many": "got 'many'",
        "quantize model --out ''": "it is empty; give a path",
        "quantize '' --out new": "it is empty; give a path",
        "inspect model --against ''": "it is empty; give a path",
        "inspect model --against": "`lowbit inspect --help`",
        "quantize model --out new --lossy=3": "`lowbit quantize --help`",
    }.items(),
)
def test_wrong_usage_has_its_own_exit_code(
    line: str, reason: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, message = refused(line, home, capfd)
    assert code == MISUSED and reason in message and "--help" in message


def test_a_read_only_folder_is_refused(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The kernel's own folder is read-only for root too."""
    if not Path("/sys").is_dir():
        pytest.skip("needs Linux")
    _, message = refused("quantize model --out /sys/lowbit-model", home, capfd)
    assert "cannot be written" in message


@pytest.mark.parametrize("format", ["compressed-tensors", "lowbit"])
def test_no_space_left_leaves_nothing_behind(
    format: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The system refuses files above 40 kB, as it does where a disk is full."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        code, message = refused(f"quantize model --format {format} --out new", home, capfd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == FAILED and "cannot be written" in message
    assert os.strerror(errno.EFBIG) in message


def test_an_interrupted_command_leaves_nothing_behind(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowbit.formats import writing

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "_check_readable", interrupted)  # after all was written
    code, _ = refused("quantize model --out new", home, capfd)
    assert code == INTERRUPTED


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_missing_packages_name_the_extra(
    package: str, home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    _, message = refused("doctor", home, capfd)
    assert package in message and "pip install 'lowbit[cli]'" in message


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_old_packages_name_the_release(
    package: str, home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python finds another release's description first."""
    about = home / "old" / f"{package}-0.9.4.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.9.4\n")
    monkeypatch.syspath_prepend(home / "old")
    code, message = refused("doctor", home, capfd)
    assert code == FAILED
    assert f"{package} >= " in message and "0.9.4 is installed" in message


def test_a_picture_needs_matplotlib(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _, message = refused("eval model --data text.txt --picture chart.png", home, capfd)
    assert "matplotlib" in message and "lowbit[cli]" in message


@pytest.mark.parametrize("line", ["eval model --data text.txt", "generate model --prompt the"])
@pytest.mark.parametrize("found", ["4.57.0", None])
def test_models_that_run_need_transformers(
    found: str | None,
    line: str,
    home: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None installed, and another release than lowbit.hf takes, as its description says."""
    for name in [
        name for name in sys.modules if name.startswith(("lowbit.hf", "lowbit.interop.hf"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    version = importlib.metadata.version

    def version_of(name: str) -> str:
        if name != "transformers":
            return version(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    _, message = refused(line, home, capfd)
    what = "which is not installed" if found is None else f"and {found} is installed"
    assert f"transformers >= 5.4, {what}" in message and "lowbit[hf]" in message


@pytest.mark.parametrize("debug", [False, True])
def test_a_warning_is_one_line_in_words_of_the_command_line(
    debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []

    def run(given: list[str]) -> int:
        text = "rounds; give\n  lossy=True"
        shown.append(warnings.formatwarning(text, UserWarning, __file__, 1))
        shown.append(warnings.formatwarning("old", FutureWarning, __file__, 1))
        return 0

    before = warnings.formatwarning
    monkeypatch.setattr("lowbit.cli.app.run", run)
    assert main(["doctor", *["--debug"] * debug]) == 0
    assert warnings.formatwarning is before
    if debug:
        assert __file__ in shown[0]
    else:
        assert shown == ["lowbit: warning: rounds; give --lossy\n", "lowbit: FutureWarning: old\n"]


def test_debug_shows_the_traceback(home: Path) -> None:
    """In a process of its own, as Python itself prints it."""
    done = command("inspect", "missing", "--debug", cwd=home)
    assert done.returncode != 0 and "Traceback" in done.stderr and "FormatError" in done.stderr


@pytest.mark.parametrize("columns", [1, 40, 200], ids="{} columns".format)
def test_a_narrow_terminal_cuts_nothing_off(
    columns: int, home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wraps the lines itself."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["inspect", "model"]) == 0
    printed = capfd.readouterr().out
    assert "model.layers.1.post_attention_layernorm.weight" in printed and "…" not in printed


@pytest.mark.parametrize("line", ["inspect model >&-", "--help | true"])
def test_closed_outputs(line: str, home: Path) -> None:
    """No output at all, as a daemon has it, and a reader that has gone."""
    if os.name == "nt":
        pytest.skip("needs a POSIX shell")
    shell = f"{shlex.quote(sys.executable)} -m lowbit {line}"
    done = subprocess.run(["sh", "-c", shell], cwd=home, env=environment(), capture_output=True)
    assert done.returncode == 0 and done.stderr == b""


def test_an_unexpected_module_that_is_missing_is_named_with_its_extra() -> None:
    """typer's later releases import pydantic when they read an option."""
    text = one_line(ModuleNotFoundError("No module named 'rich.table'", name="rich.table"))
    assert text == "rich is not installed: pip install 'lowbit[cli]'"
    text = one_line(ModuleNotFoundError("No module named 'nobody'", name="nobody"))
    assert text == "nobody is not installed; `--debug` shows what needs it"

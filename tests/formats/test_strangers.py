"""The folder of a stranger does not stop its reader: names, nesting and expressions are refused at once."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowbit
from lowbit import Int4WeightOnly, formats
from lowbit.cli import main
from lowbit.formats import FormatError
from lowbit.formats.building import check_config
from tests.cli.command import started
from tests.formats.models import build, low_bit, plain_folder
from tests.formats.test_damage import change_config

pytest.importorskip("safetensors")

DEEP = "[" * 100_000 + "]" * 100_000
SLOW = r"(a+)+(\w+\s?)*$"
"""With names of 200 letters, Python's `re` would take 2^200 steps."""
LAYER = "up_proj"


def written(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def index(file: str) -> Callable[[Path], None]:
    return lambda folder: written(
        folder, "model.safetensors.index.json", json.dumps({"weight_map": {"a": file}})
    )


def nested(levels: int) -> Callable[[Path], object]:
    inner: Any = 1
    for _ in range(levels):
        inner = {"a": inner}
    return lambda folder: change_config(folder, lambda config: config.update(more=inner))


def targets(*given: str) -> Callable[[Path], object]:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = [*given]

    return lambda folder: change_config(folder, change)


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "deep config.json": (
        lambda f: written(f, "config.json", DEEP),
        "config.json is nested too deep",
    ),
    "101 levels": (nested(101), "config.json is nested too deep; accepted: 100 levels"),
    "a deep index": (
        lambda f: written(f, "model.safetensors.index.json", DEEP),
        "index.json is nested too deep",
    ),
    "a long shard name": (index("a" * 5000 + ".safetensors"), "lacks the shard aaaa"),
    "a shard name with a zero": (index("a\0.safetensors"), "lacks the shard"),
    "an expression that is wrong": (targets("re:(a"), "is not a regular expression"),
    "nested repetitions": (targets("re:((l+)+)+b"), "may take too long for"),
    "a large expression": (targets("re:(a{900}b?){900}"), "may take too long for"),
    "a long expression": (targets("re:" + "a" * 10**6), "1000000 letters; accepted: 2000"),
    "looking ahead for ever": (
        targets("re:" + "(?=.*" * 50 + "x" + ")" * 50),
        "may take too long for",
    ),
}


@pytest.mark.parametrize("case", STRANGE)
def test_strange_folders_are_refused_at_once(case: str, tmp_path: Path) -> None:
    change, why = STRANGE[case]
    folder = tmp_path / "model"
    model = low_bit(Int4WeightOnly(64))
    lowbit.export(model, folder, max_shard_size="20KB")
    change(folder)
    start = time.process_time()
    for read in (
        lambda: lowbit.load_pretrained(folder, build()),
        lambda: lowbit.export(folder, tmp_path / "out", "lowbit"),
        lambda: dict(formats.tensors(folder)),
    ):
        with pytest.raises(FormatError, match=why) as caught:
            read()
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
        assert len(str(caught.value)) < 1000
    assert time.process_time() - start < 5


def test_sizes_are_not_counts_of_layers() -> None:
    """Gemma 3n has a vocabulary of its own for each layer, and MoE configs name sizes of blocks."""
    sizes = {"vocab_size_per_layer_input": 262144, "block_size": 4096, "stage_out_channels": 2048}
    check_config({"text_config": sizes, "num_hidden_layers": 35}, 500)
    with pytest.raises(FormatError, match=r"num_hidden_layers 1e\+09; accepted: up to 1500, for"):
        check_config({"text_config": {"num_hidden_layers": 10**9}}, 500)


@pytest.mark.parametrize("size", [2**17, 2**40])
def test_blocks_do_not_pad_weights_to_any_size(size: int, tmp_path: Path) -> None:
    """A weight with one block beside others takes the size of the block."""
    scheme = lowbit.Float8DynamicActivationFloat8Weight(lowbit.PerBlock(128, 128))
    lowbit.export(low_bit(scheme), tmp_path / "out", "fp8", lossy=True)

    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["weight_block_size"] = [128, size]

    change_config(tmp_path / "out", change)
    with pytest.raises(
        FormatError, match=rf"PerBlock\(shape=\(128, {size}\)\) pads|in blocks of 128 x"
    ):
        lowbit.load_pretrained(tmp_path / "out", build())


class Long(type(build())):  # type: ignore[misc]
    """Layers with long names."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("a" * 200, self.up_proj)
        del self.up_proj


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq"])
def test_expressions_that_may_take_for_ever(format: str, tmp_path: Path) -> None:
    model = Long()
    lowbit.quantize_(model, {"a*": Int4WeightOnly(64)})
    lowbit.export(model, tmp_path / "out", format, lossy=True)

    def change(config: dict[str, Any]) -> None:
        own = config["quantization_config"]
        if format == "gptq":
            own["dynamic"] = {f"+:{SLOW}x": {"bits": 8}}
        else:
            own["config_groups"]["group_0"]["targets"] = [f"re:{SLOW}x"]

    change_config(tmp_path / "out", change)
    with pytest.raises(FormatError, match="may take too long for"):
        lowbit.load_pretrained(tmp_path / "out", Long())


LISTS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"config_groups": {}, "ignore": [f"re:{SLOW}x", "re:.*"]},
    "gptq": {"bits": 4, "dynamic": {f"-:{SLOW}x": {}, "-:.*": {}}},
    "awq": {"bits": 4, "modules_to_not_convert": [f"re:{SLOW}x", "re:.*", "a*" * 100 + "b"]},
    "fp8": {"ignored_layers": [f"re:{SLOW}x", "re:.*"]},
}


@pytest.mark.parametrize("format", LISTS)
def test_lists_of_plain_modules_that_may_take_for_ever(format: str, tmp_path: Path) -> None:
    model = Long()
    settings = {"quant_method": format, **LISTS[format]}
    plain_folder(tmp_path / "model", model, quantization_config=settings)
    with pytest.raises(FormatError, match="may take too long for"):
        lowbit.load_pretrained(tmp_path / "model", Long())


def test_commands_say_it_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowbit.export(low_bit(Int4WeightOnly(64)), tmp_path / "model")
    written(tmp_path / "model", "config.json", DEEP)
    monkeypatch.chdir(tmp_path)
    for line in ("inspect model", "estimate model", "export model --format lowbit --out new"):
        assert main(shlex.split(line)) == 1
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and "model/config.json is nested too deep" in error


def test_the_working_folder_gives_no_modules(tmp_path: Path) -> None:
    """A folder of a model that holds modules of these names, in which a user runs `python -m lowbit`."""
    names = ("typing", "json", "random", "torch", "numpy", "typer", "rich", "safetensors")
    for name in (*names, "transformers", "yaml"):
        written(
            tmp_path, f"{name}.py", f"open('ran', 'w')\nraise SystemExit('the {name} of a folder')"
        )
    done = started("--version", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == lowbit.__version__, done.stderr
    assert not (tmp_path / "ran").exists()

"""lowbit in torchtitan 0.3 on two CPU processes, where that release is installed: training and exact resume."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import text as texts
from tests.integrations.titan import ROOT, environment, logged

pytest.importorskip("torchtitan")
if not importlib.metadata.version("torchtitan").startswith("0.3."):
    pytest.skip("torchtitan of another release", allow_module_level=True)

MODULE = "tests.integrations.titan_0_3"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    """A folder with JSON lines, and one with a tokenizer."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("TEXT", "TOKENIZER")}
    lines = [f"line {i} of file {n}: {i * n} times {i}\n" for n in range(12) for i in range(400)]
    parts = ["".join(lines[i : i + 50]) for i in range(0, len(lines), 50)]
    records = "".join(json.dumps({"text": part}) + "\n" for part in parts)
    (folders["TEXT"] / "data.json").write_text(records)
    texts.train_tokenizer(parts, 512).save(str(folders["TOKENIZER"] / "tokenizer.json"))
    tokens = {"bos_token": texts.END, "eos_token": texts.END}
    (folders["TOKENIZER"] / "tokenizer_config.json").write_text(json.dumps(tokens))
    return {name: str(folder) for name, folder in folders.items()}


def run(data: dict[str, str], config: str, out: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", MODULE, "--module", MODULE, "--config", config, "--dump_folder", str(out)]
    return subprocess.run(
        [*command, *options],
        env={**environment(), **data},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("config", ["int8", "bitnet", "qat"])
def test_ways_to_train(config, data, tmp_path):
    done = run(data, config, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "24 weights converted" in done.stderr + done.stdout
    assert list(logged(tmp_path)) == [1, 2, 3, 4]
    assert list(logged(tmp_path, "lowbit/snr_weights(dB)")) == [2, 4]


def test_resumed_digit_for_digit(data, tmp_path):
    options = ("--checkpoint.enable", "--checkpoint.interval", "2")
    done = run(data, "int8_weights", tmp_path, *options)
    assert done.returncode == 0, done.stderr[-4000:]
    whole = logged(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint/step-4")
    shutil.rmtree(tmp_path / "tb")
    done = run(data, "int8_weights", tmp_path, *options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert logged(tmp_path) == {step: whole[step] for step in (3, 4)}


def test_metrics_in_a_cuda_graph_are_refused(data, tmp_path):
    done = run(data, "in_a_graph", tmp_path)
    assert done.returncode != 0
    assert "a step in a CUDA graph cannot be measured" in done.stderr + done.stdout

"""The memory that `from_pretrained(…, quantization_config=LowbitConfig(…))` takes, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

MIB = 2**20
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 512}
LOADER = """
import gc, json, re, sys, threading, time
import torch, transformers
from lowbit.hf import LowbitConfig

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)

def peak_while(run):
    found, done = [anonymous()], threading.Event()
    def watch():
        while not done.wait(0.002):
            found.append(anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    model = run()
    done.set()
    thread.join()
    return model, max(found) - found[0]

given = {"quantization_config": LowbitConfig("int4", group_size=128)}
load(sys.argv[1], **given)  # a small model first, so that code and threads are in memory already
gc.collect()
model, quantized = peak_while(lambda: load(sys.argv[2], **given))
print(json.dumps({"quantized": quantized, "kept": model.hf_quantizer.report.nbytes}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's /proc")
def test_the_whole_model_is_never_held_in_high_precision(tmp_path: Path) -> None:
    for name, layers in (("small", 1), ("large", SIZES["num_hidden_layers"])):
        config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": layers})
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).bfloat16()
        model = model.to_empty(device="cpu")
        for param in model.parameters():
            torch.nn.init.normal_(param, std=0.02)
        model.save_pretrained(tmp_path / name, max_shard_size="30MB")
    shards = list((tmp_path / "large").glob("*.safetensors"))
    plain = sum(file.stat().st_size for file in shards)
    assert len(shards) > 5 and plain > 190 * MIB
    del model
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print({name: f"{size / MIB:.1f} MiB" for name, size in {**found, "plain": plain}.items()})
    assert found["kept"] < plain / 3.4
    # While one weight is rounded, its values lie in float32 several times. What Python frees later adds to that, by
    # another amount in each run: 45 to 153 MiB in all.
    assert found["quantized"] < 0.9 * plain

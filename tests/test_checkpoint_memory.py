"""Loading a checkpoint takes its own size and no more, in host memory and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit as lb

ROOT = Path(__file__).resolve().parent.parent

# The peak of a process never falls, so each load runs in its own process and reads the peak before and after.
LOAD = textwrap.dedent(
    """
    import json, sys
    import torch
    from torch import nn
    import lowbit as lb

    def status(key):
        with open("/proc/self/status") as file:
            return next(int(l.split()[1]) * 1024 for l in file if l.startswith(key))

    lb.save({"w": torch.zeros(4)}, sys.argv[2])      # what is imported at the first use
    lb.load(sys.argv[2])
    nn.Parameter(lb.AffineTensor.from_float(torch.zeros(4, 4), lb.Int8WeightOnly()), False)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(11)))
    before = status("VmRSS:")
    model.load_state_dict(lb.load(sys.argv[1]), assign=True)
    checksum = sum(int(layer.weight.codes.view(torch.int64).sum()) for layer in model)  # maps every page
    print(json.dumps({"peak": status("VmHWM:") - before, "checksum": checksum}))
    """
)


def checkpoint(path: Path) -> int:
    """11 matrices of 4096 x 4096 in int4: 95 MB. The sum of all codes, as 64-bit words."""
    weight = torch.randint(0, 256, (4096, 2048), dtype=torch.uint8)
    scale = torch.rand(4096, 32)
    spec = lb.Int4WeightOnly(128).weight
    state = {}
    for layer in range(11):
        codes = weight.roll(layer, 0)
        w = lb.AffineTensor(codes, scale.clone(), None, spec, (4096, 4096), torch.bfloat16)
        state[f"{layer}.weight"] = w
    lb.save(state, path)
    return 11 * int(weight.view(torch.int64).sum())


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
def test_host_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    checksum = checkpoint(path)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), str(tmp_path / "small.safetensors")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["checksum"] == checksum
    size = path.stat().st_size
    assert size > 90e6 and 0.9 * size < found["peak"] < 1.1 * size


@pytest.mark.gpu
def test_gpu_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    checkpoint(path)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(11)))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model.load_state_dict(lb.load(path, device="cuda"), assign=True)
    assert model[3].weight.is_cuda
    assert torch.cuda.max_memory_allocated() - before < 1.1 * path.stat().st_size


@pytest.mark.gpu
def test_quantizing_holds_one_layer_beyond_the_model() -> None:
    model = nn.Sequential(
        *(nn.Linear(4096, 14336, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    )
    lb.quantize_(nn.Linear(128, 64, device="cuda"), lb.Int4WeightOnly(128))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer = model[0].weight.nbytes
    lb.quantize_(model, lb.Int4WeightOnly(128))
    assert torch.cuda.max_memory_allocated() - before < layer

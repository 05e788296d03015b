"""No result depends on `torch.set_default_dtype`, which programs set to build their models in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.formats import gguf_scheme
from lowbit.inference import AWQ, GPTQ, Prune24, SmoothQuant

DEFAULTS = [torch.bfloat16, torch.float16, torch.float64]
INT4 = lb.Int4WeightOnly(32)
INT8 = lb.Int8StaticActivationInt8Weight()
FP4 = lb.NVFP4WeightOnly()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def model() -> nn.Sequential:
    made = nn.Sequential(
        nn.Linear(64, 96, dtype=torch.float32), nn.ReLU(), nn.Linear(96, 64, dtype=torch.float32)
    )
    with torch.no_grad():
        for seed, param in enumerate(made.parameters()):
            param.copy_(numbers(*param.shape, seed=seed) / 8)
    return made


def calibrated(scheme: Any, *steps: Any) -> list[Tensor]:
    made, x = model(), numbers(16, 64, seed=9)
    lb.calibrate(made, scheme, [x], steps=steps)
    return [made(x)]


def with_static_inputs() -> list[Tensor]:
    made, x = model(), numbers(16, 64, seed=9)
    prepared = model()
    lb.qat.prepare_(prepared, INT8)
    with lb.calibrate(made, INT8), lb.calibrate(prepared):
        made(x), prepared(x)
    lb.quantize_(made, INT8)
    return [made(x), *made.state_dict().values(), *prepared.state_dict().values()]


def in_training(scheme: Any) -> list[Tensor]:
    made, x = model(), numbers(16, 64, seed=9).requires_grad_()
    lb.train.prepare_(made, scheme)
    optimizer = lb.optim.Muon([made[0].weight, made[2].weight], row_beta2=0.9)
    y = made(x)
    y.square().mean().backward()
    optimizer.step()
    return [y, x.grad, made(x), optimizer.state[made[0].weight]["row_moment"]]


def of_k_quant() -> list[Tensor]:
    layer = nn.Sequential(nn.Linear(256, 8, dtype=torch.float32))
    with torch.no_grad():
        layer[0].weight.copy_(numbers(8, 256))
    lb.quantize_(layer, gguf_scheme("Q4_K"), scales="searched")
    return [layer[0].weight.dequantize()]


def in_bitsandbytes(folder: Path) -> list[Tensor]:
    pytest.importorskip("safetensors")
    made = model()
    lb.quantize_(made, lb.NF4WeightOnly(32, double_quantization=True))
    lb.export(made, folder, "bitsandbytes-4bit")
    from safetensors.torch import load_file

    again = lb.load_pretrained(folder, model())
    return [
        again.get_parameter("0.weight").dequantize(),
        *load_file(folder / "model.safetensors").values(),
    ]


CASES: dict[str, Callable[[Path], list[Tensor]]] = {
    "gptq": lambda _: calibrated(INT4, GPTQ()),
    "gptq-fp4": lambda _: calibrated(FP4, GPTQ()),
    "prune": lambda _: calibrated(INT4, Prune24(), GPTQ()),
    "awq": lambda _: calibrated(INT4, AWQ()),
    "smoothquant": lambda _: calibrated(lb.Int8DynamicActivationInt8Weight(), SmoothQuant(0.5)),
    "static": lambda _: with_static_inputs(),
    "train-int8": lambda _: in_training(lb.Int8MixedPrecision(always=True)),
    "train-int8-weight": lambda _: in_training(lb.Int8Weight()),
    "train-bitnet": lambda _: in_training(lb.BitNet()),
    "k-quant": lambda _: of_k_quant(),
    "bitsandbytes": in_bitsandbytes,
}


@pytest.fixture(params=DEFAULTS, ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.cover("values")
@pytest.mark.parametrize("case", CASES)
def test_results_are_the_same(case: str, default: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = CASES[case](tmp_path / "expected")
    torch.set_default_dtype(default)
    torch.manual_seed(3)
    found = CASES[case](tmp_path / "found")
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == other.dtype and torch.equal(own, other)

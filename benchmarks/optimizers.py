"""The optimizers that the benchmarks compare, the parameters that they step, and the times of repeated steps.

An optimizer is imported when it is made. If its package is missing, only its row of the report is empty.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

LLAMA_1B: list[tuple[int, ...]] = [
    (128_256, 2048),
    *[
        *[(2048, 2048), (512, 2048), (512, 2048), (2048, 2048)],
        *[(8192, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,)],
    ]
    * 16,
    (2048,),
]
"""The shapes of Llama-3.2-1B: 146 tensors, 1.236e9 elements, embedding and head tied."""
REFERENCE = "torch AdamW fused"


def from_module(module: str, name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """``module.name(params, **options)``. ImportError without the module."""
    return getattr(importlib.import_module(module), name)(params, **options)


@dataclass(frozen=True)
class OptimizerChoice:
    """One optimizer with its options.

    Attributes:
        name: in the report.
        make: makes it over a list of parameters.
        dtype: dtype of the weights and gradients.
        gradient_reads: times that a step must read the gradient; clipping reads it once more, for the norm.
    """

    name: str
    make: Callable[..., torch.optim.Optimizer]
    dtype: torch.dtype = torch.bfloat16
    gradient_reads: int = 1


def lowbit_choice(
    label: str, name: str, *, gradient_reads: int = 1, **options: Any
) -> OptimizerChoice:
    options.setdefault("lr", 1e-4)
    make = partial(from_module, "lowbit.optim", name, **options)
    return OptimizerChoice(f"lowbit {label}", make, gradient_reads=gradient_reads)


def lowbit_formats() -> list[OptimizerChoice]:
    """AdamW in each format of its states."""
    return [
        lowbit_choice("AdamWFp8", "AdamWFp8"),
        lowbit_choice("AdamW8bit", "AdamW8bit"),
        lowbit_choice("AdamW4bit", "AdamW4bit"),
        lowbit_choice("AdamW, bf16 states", "AdamW", state="bf16"),
    ]


def lowbit_options() -> list[OptimizerChoice]:
    """Other algorithms and options than the state format."""
    rounded: dict[str, Any] = {"bf16_stochastic_round": True}
    corrected: dict[str, Any] = {"weight_correction": "8bit"}
    exact: dict[str, Any] = {"weight_correction": "16bit"}
    clipped: dict[str, Any] = {"max_grad_norm": 1.0, "gradient_reads": 2}
    return [
        lowbit_choice("Lion8bit", "Lion8bit"),
        # updates of about 1e-4, as the others have; smaller ones would not change a bfloat16 weight
        lowbit_choice("SGD8bit, momentum", "SGD8bit", lr=0.1, momentum=0.9),
        lowbit_choice("AdEMAMix8bit", "AdEMAMix8bit"),
        lowbit_choice("AdamWFp8, stochastic rounding", "AdamWFp8", **rounded),
        lowbit_choice("AdamW8bit, stochastic rounding", "AdamW8bit", **rounded),
        lowbit_choice("AdamW4bit, stochastic rounding", "AdamW4bit", **rounded),
        lowbit_choice("AdamW8bit, weight correction", "AdamW8bit", **corrected),
        lowbit_choice("AdamW8bit, exact weights", "AdamW8bit", **exact),
        lowbit_choice("AdamW8bit, clipping", "AdamW8bit", **clipped),
    ]


def torch_fused(dtype: torch.dtype = torch.bfloat16) -> OptimizerChoice:
    name = REFERENCE if dtype == torch.bfloat16 else f"{REFERENCE}, fp32 weights"
    make = partial(from_module, "torch.optim", "AdamW", lr=1e-4, fused=True)
    return OptimizerChoice(name, make, dtype)


def peers() -> list[OptimizerChoice]:
    """Low-bit optimizers of other libraries."""
    named = [("bitsandbytes", "bitsandbytes.optim", name) for name in ("AdamW8bit", "Lion8bit")]
    named += [("torchao", "torchao.optim", f"AdamW{form}") for form in ("8bit", "4bit", "Fp8")]
    return [
        OptimizerChoice(f"{package} {name}", partial(from_module, module, name, lr=1e-4))
        for package, module, name in named
    ]


def random_parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str
) -> list[Tensor]:
    """Parameters and gradients as large as a model's, from one seed."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        weight, grad = (
            torch.empty(shape, dtype=dtype, device=device).normal_(0, std, generator=generator)
            for std in (0.02, 1e-3)
        )
        params.append(weight.requires_grad_())
        params[-1].grad = grad
    return params


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all state tensors of any optimizer; shared memory counts once."""
    return tensor_bytes(value for state in optimizer.state.values() for value in state.values())


def tensor_bytes(values: Iterable[Any]) -> int:
    """Bytes of all tensors among `values`, of wrappers those inside; shared memory counts once."""
    sizes: dict[int, int] = {}

    def add(value: Any) -> None:
        if not isinstance(value, Tensor):
            return
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                add(getattr(value, name))
        else:
            sizes[value.data_ptr()] = value.numel() * value.element_size()

    for value in values:
        add(value)
    return sum(sizes.values())


def synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def step_seconds(step: Callable[[], object], repeats: int, on_gpu: bool) -> list[float]:
    """Seconds of each of ``repeats`` steps in a row; on a GPU between the events after them, two more steps first."""
    if not on_gpu:
        times = [time.perf_counter()]
        for _ in range(repeats):
            step()
            times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2)]
    for event in events:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events[1:])]

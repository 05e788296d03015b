"""The optimizers that the benchmarks compare, and the parameters that they step.

Each is looked up when it is made, so that one that isn't installed costs a line of the report and nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

LLAMA_1B: list[
    tuple[int, ...]
] = [  # Llama-3.2-1B: 146 tensors, 1.236e9 elements, embedding and head tied
    (128_256, 2048),
    *[
        *[(2048, 2048), (512, 2048), (512, 2048), (2048, 2048)],
        *[(8192, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,)],
    ]
    * 16,
    (2048,),
]
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
        dtype: of the weights and gradients.
        gradient_reads: how often a step must read the gradient: clipping knows the norm after one whole reading.
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
    """Other algorithms, and what can be asked for beside the format."""
    rounded: dict[str, Any] = {"bf16_stochastic_round": True}
    corrected: dict[str, Any] = {"weight_correction": "8bit"}
    clipped: dict[str, Any] = {"max_grad_norm": 1.0, "gradient_reads": 2}
    return [
        lowbit_choice("Lion8bit", "Lion8bit"),
        # A step of 1e-4 as the others' have, or a bfloat16 weight would not move.
        lowbit_choice("SGD8bit, momentum", "SGD8bit", lr=0.1, momentum=0.9),
        lowbit_choice("AdEMAMix8bit", "AdEMAMix8bit"),
        lowbit_choice("AdamWFp8, stochastic rounding", "AdamWFp8", **rounded),
        lowbit_choice("AdamW8bit, stochastic rounding", "AdamW8bit", **rounded),
        lowbit_choice("AdamW4bit, stochastic rounding", "AdamW4bit", **rounded),
        lowbit_choice("AdamW8bit, weight correction", "AdamW8bit", **corrected),
        lowbit_choice("AdamW8bit, clipping", "AdamW8bit", **clipped),
    ]


def torch_fused(dtype: torch.dtype = torch.bfloat16) -> OptimizerChoice:
    name = REFERENCE if dtype == torch.bfloat16 else f"{REFERENCE}, fp32 weights"
    make = partial(from_module, "torch.optim", "AdamW", lr=1e-4, fused=True)
    return OptimizerChoice(name, make, dtype)


def peers() -> list[OptimizerChoice]:
    """What else has low-bit states."""
    named = [("bitsandbytes", "bitsandbytes.optim", name) for name in ("AdamW8bit", "Lion8bit")]
    named += [("torchao", "torchao.optim", f"AdamW{form}") for form in ("8bit", "4bit", "Fp8")]
    return [
        OptimizerChoice(f"{package} {name}", partial(from_module, module, name, lr=1e-4))
        for package, module, name in named
    ]


def random_parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str
) -> list[Tensor]:
    """Parameters of the size of a model's weights, with gradients, from one seed."""
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
    """Bytes of all state tensors, each memory counted once, of any optimizer."""
    sizes: dict[int, int] = {}

    def add(value: Any) -> None:
        if not isinstance(value, Tensor):
            return
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                add(getattr(value, name))
        else:
            sizes[value.data_ptr()] = value.numel() * value.element_size()

    for state in optimizer.state.values():
        for value in state.values():
            add(value)
    return sum(sizes.values())

"""Shared by the optimizer tests: the optimizers and formats under test, and small seeded problems."""

from __future__ import annotations

import io

import torch
from torch import nn

FORMATS = ["4bit", "8bit", "float8", "bf16", "fp32"]
LOW = FORMATS[:-1]


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(*shapes, dtype=torch.float32):
    return [nn.Parameter(rand(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def set_grads(params, step):
    """Gradients that depend on the step and on each parameter's index, not on its value."""
    for i, p in enumerate(params):
        p.grad = rand(*p.shape, seed=1000 * (step + 1) + i).to(p.dtype) + 0.3


def run(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step()


def saved(state_dict):
    """As read back from a file, by weights_only=True."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def copied(cls, params, **options):
    """An optimizer of copies of the parameters, and the copies."""
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    return cls(copies, **options), copies


def is_beside(stored, value):
    """For each element of a moment in 4 bits, whether it is the value of the table above or below the exact `value`, or
    the smallest second moment there is."""
    cols = stored.cols_of(stored.shape)
    scale = stored.scale.repeat_interleave(stored.block_size, -1)[..., :cols]
    scale = scale.reshape(stored.shape).double()

    def level(x):
        y = x.double() / scale
        return y.sign() * (49 * y.abs()).sqrt() if stored.signed else y.log2().clamp_min(-15)

    return (level(stored.dequantize()) - level(value)).abs() < 1.0001


def relative(a, b):
    """Norm of the difference, relative to b's."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp_min(1e-300)).item()

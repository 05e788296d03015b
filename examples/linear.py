"""One linear layer in each format: its bytes, its error, and its time for a few tokens.

    python examples/linear.py

The times are those of this machine. `python -m benchmarks weight_linear` measures a GPU properly.
"""

import copy
import time

import torch
from torch import nn

import lowbit

SCHEMES = {
    "int8": lowbit.Int8WeightOnly(),
    "int4": lowbit.Int4WeightOnly(group_size=128),
    "int2": lowbit.Int2WeightOnly(group_size=128),
    "float8": lowbit.Float8WeightOnly(),
    "nf4": lowbit.NF4WeightOnly(),
    "mxfp4": lowbit.MXFP4WeightOnly(),
    "int8 x int8": lowbit.Int8DynamicActivationInt8Weight(),
}


def milliseconds(layer: nn.Module, inputs: torch.Tensor) -> float:
    """The shortest of five calls, after one that may compile a kernel."""
    times = []
    for _ in range(6):
        started = time.perf_counter()
        layer(inputs)
        times.append(time.perf_counter() - started)
    return min(times[1:]) * 1e3


torch.manual_seed(0)
plain = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
inputs = torch.randn(4, 1024)
expected = plain(inputs)
print(
    f"{'float32':<12} {plain.weight.nbytes:>9,} bytes {0:6.1%} {milliseconds(plain, inputs):7.3f} ms"
)
for name, scheme in SCHEMES.items():
    layer = copy.deepcopy(plain)
    lowbit.quantize_(layer, scheme)
    assert isinstance(layer.weight, lowbit.LowbitTensor)
    size = layer.weight.nbytes_stored()
    error = (layer(inputs) - expected).norm() / expected.norm()
    print(f"{name:<12} {size:>9,} bytes {error:6.1%} {milliseconds(layer, inputs):7.3f} ms")
    assert size < 0.3 * plain.weight.nbytes

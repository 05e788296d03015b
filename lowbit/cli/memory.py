"""Bytes that training and serving a decoder take, part by part.

Weights, gradients and states are exact: lowbit's own tensors, made on meta, are counted. Activations are a formula.
With h the width of the residual stream, q and k the outputs of the query and key projections, i the width between up
and down, V the vocabulary, per token, in elements that autograd keeps for the backward pass:

    a layer     2 h            inputs of the two norms
                2 h + q + i    inputs of the products: of q, k, v; of gate and up; of o; of down
                q + 2 k        queries, keys and values, which attention keeps
                3 i            gate, up and silu(gate)
    the end     2 h            inputs of the last norm and of the head

These are the elements that compiled layers keep. Without torch.compile a norm also keeps its input in float32 and the
normalized values, 2 h more for each norm. 16-bit elements take 2 bytes. With int8 products the inputs of the products
take 1 byte. With recomputation a layer keeps its input alone, and one layer at a time has all of its elements. A logit
takes 10 bytes: 2 in bfloat16, 4 in float32, 4 for its gradient; compiled, 2 and 2. Attention runs in a fused kernel,
which keeps no T x T matrix.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowbit import optim
from lowbit.cli.shapes import DecoderSizes, ModelShapes, Shape
from lowbit.optim.state import state
from lowbit.schemes import presets
from lowbit.schemes.low_bit_weights import Int8Weight
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.trained.int8_weight import Int8WeightTensor
from lowbit.train import prepare_

HIGH = torch.bfloat16
HALF = 2
"""Bytes of an element of HIGH."""
RANK = 16
"""The rank of LoRA's adapters."""
_STEP = 4
"""Bytes of torch's step counter, one a parameter."""


@dataclass(frozen=True)
class Run:
    """The run: batch x sequence tokens.

    Attributes:
        recompute: each layer is computed again in the backward pass.
        compiled: layers and loss run under torch.compile.
    """

    batch: int
    sequence: int
    recompute: bool = False
    compiled: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def logit_bytes(self) -> int:
        return 4 if self.compiled else 10

    @property
    def norm_elements(self) -> int:
        """How many times its input a norm keeps."""
        return 1 if self.compiled else 3


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one choice. `activations`: in inference, the cache of keys and values and one layer at work."""

    weights: int
    gradients: int
    states: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.states + self.activations


def plain_bytes(model: ModelShapes) -> int:
    return HALF * model.parameters


def quantized_bytes(model: ModelShapes, scheme: Scheme) -> int:
    """Bytes of all weights with the matrices in `scheme`, the others in bfloat16."""
    matrices = {*model.matrices()}
    return sum(
        _in_scheme(shape, scheme) if name in matrices else HALF * math.prod(shape)
        for name, shape in model.weights.items()
    )


@functools.cache
def _in_scheme(shape: Shape, scheme: Scheme) -> int:
    if scheme.obstacle(shape, {"linear"}) is not None:
        return HALF * math.prod(shape)
    empty = torch.empty(shape, dtype=HIGH, device="meta")
    return AffineTensor.from_float(empty, scheme).nbytes_stored()


def int8_weight_bytes(model: ModelShapes) -> int:
    """Bytes of all weights with the matrices as `Int8Weight` trains them."""
    matrices = {*model.matrices()}
    return sum(
        _as_int8_weight(shape) if name in matrices and len(shape) == 2 else HALF * math.prod(shape)
        for name, shape in model.weights.items()
    )


@functools.cache
def _as_int8_weight(shape: Shape) -> int:
    layer = nn.Linear(shape[1], shape[0], bias=False, device="meta", dtype=HIGH)
    holder = nn.ModuleDict({"layer": layer})
    prepare_(holder, Int8Weight())
    weight: Any = holder["layer"].weight
    if not isinstance(weight, Int8WeightTensor):
        return HALF * math.prod(shape)
    weight.set_offsets("")  # a weight on meta has none yet
    return weight.nbytes_stored()


def torch_states(shapes: Mapping[str, Shape]) -> int:
    """torch.optim.AdamW with weights in bfloat16: two moments in bfloat16."""
    return sum(2 * HALF * math.prod(shape) + _STEP for shape in shapes.values())


def lowbit_states(shapes: Mapping[str, Shape], kind: type[optim.AdamW]) -> int:
    """A lowbit optimizer's states of weights in bfloat16."""
    alike = Counter(shapes.values())
    return sum(count * _states_of(shape, kind) for shape, count in alike.items())


def _states_of(shape: Shape, kind: type[optim.AdamW]) -> int:
    weight = nn.Parameter(torch.empty(shape, dtype=HIGH, device="meta"))
    optimizer = kind([weight])
    group = optimizer.param_groups[0]
    made = [
        state.new_state(weight, optimizer.state_format(group, name), signed)
        for name, signed in optimizer.state_names(group).items()
    ]
    return sum(map(state.nbytes, [state.new_step(weight), *made]))


def adapters(model: ModelShapes) -> dict[str, Shape]:
    """The two factors of LoRA for each matrix of two dimensions."""
    found: dict[str, Shape] = {}
    for name in model.matrices():
        shape = model.weights[name]
        if len(shape) == 2:
            found |= {f"{name}.A": (RANK, shape[1]), f"{name}.B": (shape[0], RANK)}
    return found


def activation_bytes(sizes: DecoderSizes, run: Run, input_bytes: float = HALF) -> int:
    """Bytes that a training step keeps for its backward pass. `input_bytes`: of an element of a product's input."""
    layer, inputs = _kept_by_layer(sizes, run)
    each = HALF * layer + input_bytes * inputs
    layers = sizes.layers * each
    if run.recompute:
        layers = sizes.layers * HALF * sizes.hidden + each
    end = HALF * (run.norm_elements + 1) * sizes.hidden + run.logit_bytes * sizes.vocabulary
    return int(run.tokens * (layers + end))


def _kept_by_layer(sizes: DecoderSizes, run: Run) -> tuple[int, int]:
    """Elements per token that a layer keeps: those that are not inputs of products, and those that are."""
    h, q, k, i = sizes.hidden, sizes.query, sizes.key_value, sizes.inner
    return 2 * run.norm_elements * h + q + 2 * k + 3 * i, 2 * h + q + i


def cache_bytes(sizes: DecoderSizes, run: Run) -> int:
    """Keys and values of all positions in bfloat16, one layer at work on one token a sequence, and its logits."""
    cache = 2 * HALF * sizes.layers * sizes.key_value * run.tokens
    layer, inputs = _kept_by_layer(sizes, run)
    return cache + run.batch * (HALF * (layer + inputs) + run.logit_bytes * sizes.vocabulary)


def training(model: ModelShapes, run: Run) -> dict[str, MemoryUse]:
    shapes, sizes = model.weights, model.sizes
    plain, kept = plain_bytes(model), activation_bytes(sizes, run)
    low_inputs = activation_bytes(sizes, run, input_bytes=1)
    eight = lowbit_states(shapes, optim.AdamW8bit)
    four = lowbit_states(shapes, optim.AdamW4bit)
    small = adapters(model)
    factors = HALF * sum(map(math.prod, small.values()))
    frozen = quantized_bytes(model, presets.Int4WeightOnly())
    return {
        "bf16, torch AdamW": MemoryUse(plain, plain, torch_states(shapes), kept),
        "bf16, AdamW8bit": MemoryUse(plain, plain, eight, kept),
        "bf16, AdamW4bit": MemoryUse(plain, plain, four, kept),
        "int8 products, AdamW8bit": MemoryUse(plain, plain, eight, low_inputs),
        "int8 weights, AdamW8bit": MemoryUse(int8_weight_bytes(model), plain, eight, kept),
        "QAT int4, AdamW8bit": MemoryUse(plain, plain, eight, kept),
        f"LoRA rank {RANK} over int4": MemoryUse(
            frozen + factors, factors, lowbit_states(small, optim.AdamW8bit), kept
        ),
    }


_SERVED: dict[str, Callable[[], Scheme] | None] = {
    "bf16": None,
    "int8": presets.Int8WeightOnly,
    "int4": presets.Int4WeightOnly,
}


def serving(model: ModelShapes, run: Run) -> dict[str, MemoryUse]:
    cache = cache_bytes(model.sizes, run)
    return {
        f"inference {name}": MemoryUse(
            plain_bytes(model) if make is None else quantized_bytes(model, make()), 0, 0, cache
        )
        for name, make in _SERVED.items()
    }

"""What each product of each layer ran in, and why, noted as the products run.

- Products of weights that `lowbit.train` prepared call `note` and `record`, forward and backward.
- `lowbit.linear.frozen` runs each product of a quantized weight inside of `running`, and calls `record` in backward.
- `lowbit.tracing.watched` sees the products of all other parameters: plain layers, QAT, nn.MultiheadAttention.
- Kernels report which variant runs (`lowbit_kernels.runtime.launches`). The report belongs to the product that runs
  then.

Without a trace, a product pays one test: is `active` None?
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.numerics.sharded import held_locally
from lowbit.schemes.scheme import Scheme
from lowbit.schemes.training import PRODUCTS
from lowbit.tracing.report import LOW_BITS, TracedProduct, weight_format

PLAIN_WEIGHT = "a plain weight"
BY_SCHEME = "its scheme keeps this product in high precision"
DEQUANTIZED = "the weight is dequantized"
WEIGHT_ONLY = "its scheme quantizes the weight only"
ROUNDED = "rounded values, multiplied in high precision"
SWITCHED_OFF = "fake quantization is switched off"
OPERAND_OPS = (
    *("dequantize", "dequantize_flat", "int4_to_int8", "quantize_blocks", "quantize_experts"),
    *("quantize_flat", "quantize_grouped", "quantize_rowcol", "round_rows", "transpose_codes"),
)
"""The ops of `lowbit_kernels` that only prepare operands; a trace counts the others."""
LEFT_ALONE = "_lowbit_left"
"""Attribute of the modules of a prepared model: the reason by name for each weight that `lowbit.train.prepare_` left
alone. It shows that a model was prepared even if no weight was. State dicts do not hold it."""


@dataclass
class Ran:
    """A product that ran. `launches`: (op, implementation) of the kernels that it launched."""

    ran_in: str
    implementation: str
    why: str
    launches: list[tuple[str, str]] = field(default_factory=list)

    @property
    def description(self) -> str:
        """The implementation and its kernels, an op of the same name once."""
        kernels = ", ".join(dict.fromkeys(" ".join(launch) for launch in self.launches))
        if not kernels or not self.implementation:
            return kernels or self.implementation or "lowbit"
        is_op = self.launches[0][0] == self.implementation
        return kernels if is_op else f"{self.implementation}: {kernels}"


@dataclass
class Note:
    """One call of a layer: an input of `m` rows, a weight [n, k], and which of `PRODUCTS` ran how.

    `why`: the reason why none of them runs in low bits. Then PyTorch computes them, and the tracer notes when. None
    where the products `record` themselves.
    """

    layer: str
    m: int
    n: int
    k: int
    weight: str
    why: str | None
    ran: dict[str, Ran] = field(default_factory=dict)


def note(m: int, n: int, k: int, why: str | None, weight: Tensor | None = None) -> Note | None:
    """Note one call of a layer with this weight; None without a trace. Arguments: see `Note`."""
    return None if active is None else active.note(m, n, k, weight, why)


def record(
    note: Note | None, product: str, ran_in: str | torch.dtype, why: str | None = None
) -> None:
    """Note that one of `PRODUCTS` runs now in a format of `lowbit_kernels.quantize.quantize_rowcol` or a dtype."""
    if note is None:
        return
    name = str(ran_in).removeprefix("torch.")
    low = name in LOW_BITS
    made = Ran(name, "" if low else "torch", "" if low else why or note.why or BY_SCHEME)
    note.ran[product] = made
    if active is not None:
        active.thread.product = made


def rounded(values: Tensor, weight: Tensor) -> None:
    """Note that `values` are the rounded ones of `weight`. A product of them, or of what is computed from them, is one
    of rounded values."""
    if active is not None:
        active.remember_rounded(values, (weight_format(held_locally(weight)), active.find(weight)))


def running(
    x: Tensor, weight: Tensor, implementation: str, rows: int | None = None
) -> AbstractContextManager[Note | None]:
    """The context in which `implementation` multiplies x [..., K] by a quantized weight [N, K] or [E, N, K], or one
    that holds these transposed. It gives the note, in which `record` notes the gradient of x. `rows`: of the result;
    None: those of x."""
    # In backward no module runs, and the product that is differentiated notes its gradients.
    if active is None or not active.thread.modules:
        return _OFF
    return _running(active, x, weight, implementation, rows)


def multiplies_in(format: str) -> None:
    """Note that the product inside of `running` multiplies codes of this format, and not x's dtype."""
    if active is not None and active.thread.product is not None:
        active.thread.product.ran_in, active.thread.product.why = format, ""


_OFF: AbstractContextManager[None] = nullcontext(None)


@contextmanager
def _running(
    watch: Notes, x: Tensor, weight: Tensor, implementation: str, rows: int | None
) -> Iterator[Note]:
    n, k = weight.shape[-2:]
    if x.shape[-1] != k:
        n, k = k, n
    m = x.shape[:-1].numel() if rows is None else rows
    thread = watch.thread
    was_inside, outer = thread.inside, thread.product  # an implementation may run another one
    made = watch.note(m, n, k, weight, DEQUANTIZED)
    rounds_input = getattr(weight, "activation", None) is not None
    record(made, "output", x.dtype, ROUNDED if rounds_input else WEIGHT_ONLY)
    made.ran["output"].implementation = implementation
    thread.inside = True
    try:
        yield made
    finally:
        thread.inside, thread.product = was_inside, outer


RoundedWeight = tuple[str, str | None]
"""The format of a weight that was read rounded, and its layer; None where no layer is known to have it."""


class ThreadState(threading.local):
    """The modules and the product that run in this thread; autograd has a thread for each device.

    `modules`: the innermost last. `product`: the one to which launches belong. `inside`: `running` is active.
    """

    def __init__(self) -> None:
        self.modules: list[tuple[str, nn.Module]] = []
        self.product: Ran | None = None
        self.inside = False


class Notes:
    """The notes on one model."""

    def __init__(self, model: nn.Module) -> None:
        self.notes: list[Note] = []
        self.launches: Counter[tuple[str, str]] = Counter()
        self.thread = ThreadState()
        self.parameters = sorted(
            (*_memory(p), layer_name(*_split(name))) for name, p in model.named_parameters()
        )
        self.prepared = {
            layer_name(*_split(name)): held_locally(p)
            for name, p in model.named_parameters(remove_duplicate=False)
            if is_qat(held_locally(p))
        }
        """The prepared weight of a layer. Products may see its rounded values alone, as with learned scales."""
        self.selected: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        """id of a copy of experts, `weight[indices]` → the copy, and the layer."""
        self.rounded: dict[int, tuple[weakref.ref[Tensor], RoundedWeight]] = {}
        """id of a plain tensor → the tensor, computed from rounded values of a weight, and the weight."""
        self.last_rounded: RoundedWeight | None = None
        """The weight whose rounded values were read last."""
        self.left_alone = {
            layer_name(plain_name(name), attribute): reason
            for name, module in model.named_modules()
            for attribute, reason in getattr(module, LEFT_ALONE, {}).items()
        }

    def note(self, m: int, n: int, k: int, weight: Tensor | None, why: str | None) -> Note:
        layer = None if weight is None else self.find(weight)
        if layer is None:
            layer = self.thread.modules[-1][0] if self.thread.modules else ""
        form = "" if weight is None else weight_format(held_locally(weight))
        self.notes.append(Note(layer, m, n, k, form, why))
        return self.notes[-1]

    def find(self, weight: Tensor) -> str | None:
        """The layer that has this weight, found by the memory, which views share with the parameter.

        The running module comes first: it is the right one for a tied weight, and only it knows the memory that FSDP2
        gathers.
        """
        alive, layer = self.selected.get(id(weight), (None, None))
        if alive is not None and alive() is weight:
            return layer
        start, _ = _memory(weight)
        if start == 0:
            return None
        if self.thread.modules:
            name, module = self.thread.modules[-1]
            for attribute, p in module._parameters.items():
                if p is not None and _covers(_memory(p), start):
                    return layer_name(name, attribute)
        at = bisect_right(self.parameters, start, key=lambda entry: entry[0]) - 1
        found = at >= 0 and _covers(self.parameters[at][:2], start)
        return self.parameters[at][2] if found else None

    def remember_rounded(self, values: Tensor, weight: RoundedWeight) -> None:
        self.last_rounded = weight
        self.rounded[id(values)] = weakref.ref(values), weight

    def rounded_from(self, values: Any) -> RoundedWeight | None:
        """The weight from whose rounded values a tensor was computed; None for others."""
        alive, weight = self.rounded.get(id(values), (None, None))
        return weight if alive is not None and alive() is values else None

    def launched(self, op: str, implementation: str) -> None:
        if op in OPERAND_OPS:
            return
        self.launches[op, implementation] += 1
        if self.thread.product is not None:
            self.thread.product.launches.append((op, implementation))

    def products(self) -> Iterator[TracedProduct]:
        """The products of all notes, equal ones counted."""
        order = ("embedding", *PRODUCTS)
        counts: Counter[TracedProduct] = Counter()
        for note in self.notes:
            for name in filter(note.ran.__contains__, order):
                ran, sizes = note.ran[name], (note.m, note.n, note.k)
                how = (note.weight, ran.ran_in, ran.description)
                counts[TracedProduct(note.layer, name, *sizes, *how, calls=1, why=ran.why)] += 1
        for product, calls in counts.items():
            yield replace(product, calls=calls)


active: Notes | None = None
"""The notes of the running trace; None without one."""


def plain_name(name: str) -> str:
    """Without the module that torch.compile puts around another."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _split(name: str) -> tuple[str, str]:
    """The module and the attribute of a parameter."""
    module, _, attribute = plain_name(name).rpartition(".")
    return module, attribute


def layer_name(module: str, attribute: str) -> str:
    if attribute == "weight":
        return module
    return f"{module}.{attribute}" if module else attribute


def is_low_bit(weight: Any) -> bool:
    """True if a local tensor is a LowbitTensor, whose module imports this one."""
    return hasattr(type(weight), "inner_tensors")


def is_qat(weight: Any) -> bool:
    """True if `lowbit.qat` prepared this local tensor."""
    return is_low_bit(weight) and isinstance(getattr(weight, "scheme", None), Scheme)


def _memory(weight: Tensor) -> tuple[int, int]:
    """The first address and the one after the last, of the first inner tensor; 0 and 0 where there is none."""
    local: Any = held_locally(weight)
    if isinstance(local, nn.UninitializedParameter):
        return 0, 0
    first = next(iter(local.inner_tensors().values())) if is_low_bit(local) else local
    if first.is_meta or first.numel() == 0:
        return 0, 0
    try:
        start = first.data_ptr()
    except RuntimeError:  # a wrapper around other tensors, without memory
        return 0, 0
    return (start, start + first.nbytes) if start else (0, 0)


def _covers(memory: tuple[int, int], address: int) -> bool:
    return memory[0] <= address < memory[1]

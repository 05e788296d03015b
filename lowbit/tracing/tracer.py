"""trace: the format and implementation of every product of every layer, and why it did not run in low bits.

    trace = lowbit.trace(model, tokens)
    print(trace)
    trace.write("shapes.json")        # python -m benchmarks weight_linear --shapes shapes.json

Products are noted as they run:

- Products of weights that `lowbit.train` prepared call `note` and `record`, forward and backward.
- `lowbit.linear.frozen` runs each product of a quantized weight inside of `running`, and calls `record` in backward.
- A torch function mode sees the products of all other parameters: plain layers, QAT, nn.MultiheadAttention.
- Where PyTorch computes the backward products, a hook on the output's autograd node notes them.
- Kernels report which variant runs (`lowbit_kernels.runtime.launches`). The report belongs to the product that runs
  then.

Without a trace, a product pays one test: is `active` None? The mode sees the products of a plain weight that are
functions in `_OPERANDS` with the weight as second operand. It does not see an einsum.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lowbit.numerics.sharded import is_dtensor
from lowbit.schemes.scheme import Scheme
from lowbit.schemes.training import IN_ATTENTION, LOOKED_UP, PRODUCTS
from lowbit.tracing.report import (
    LOW_BITS,
    Trace,
    TracedProduct,
    weight_format,
)
from lowbit_kernels.runtime import launches

NOT_REACHED = "not reached by these inputs"
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


# ---- the functions that products call -------------------------------------------------------------------------


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
        active.remember_rounded(values, (weight_format(_local(weight)), active.find(weight)))


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


# ---- notes ----------------------------------------------------------------------------------------------------


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
            (*_memory(p), _layer(*_split(name))) for name, p in model.named_parameters()
        )
        self.prepared = {
            _layer(*_split(name)): _local(p)
            for name, p in model.named_parameters(remove_duplicate=False)
            if _is_qat(_local(p))
        }
        """The prepared weight of a layer. Products may see its rounded values alone, as with learned scales."""
        self.selected: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        """id of a copy of experts, `weight[indices]` → the copy, and the layer."""
        self.rounded: dict[int, tuple[weakref.ref[Tensor], RoundedWeight]] = {}
        """id of a plain tensor → the tensor, computed from rounded values of a weight, and the weight."""
        self.last_rounded: RoundedWeight | None = None
        """The weight whose rounded values were read last."""
        self.left_alone = {
            _layer(_plain_name(name), attribute): reason
            for name, module in model.named_modules()
            for attribute, reason in getattr(module, LEFT_ALONE, {}).items()
        }

    def note(self, m: int, n: int, k: int, weight: Tensor | None, why: str | None) -> Note:
        layer = None if weight is None else self.find(weight)
        if layer is None:
            layer = self.thread.modules[-1][0] if self.thread.modules else ""
        form = "" if weight is None else weight_format(_local(weight))
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
                    return _layer(name, attribute)
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
_one_at_a_time = threading.Lock()


@contextmanager
def watched(model: nn.Module) -> Iterator[Notes]:
    """Note all products that run inside. Raises RuntimeError while another trace runs, in any thread."""
    global active
    # Products and launches are noted for the whole process, so two traces would mix their notes.
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError(
            "another lowbit.trace runs in this process; trace one model at a time, in threads one after the other"
        )
    try:
        active = watch = Notes(model)
        with launches.listening(watch.launched), _hooked(model, watch.thread, _Products(watch)):
            yield watch
    finally:
        active = None
        _one_at_a_time.release()


@contextmanager
def _hooked(model: nn.Module, thread: ThreadState, mode: TorchFunctionMode) -> Iterator[None]:
    """Keep `thread.modules` up to date, and `mode` on while any module runs.

    Checkpointing runs modules again in backward, for which torch turns the modes of the caller off. It also leaves
    modules by an exception.
    """

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if not thread.modules:
                mode.__enter__()
            thread.modules.append((name, module))

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        thread.modules.pop()
        if not thread.modules:
            mode.__exit__(None, None, None)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(_plain_name(name)), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _plain_name(name: str) -> str:
    """Without the module that torch.compile puts around another."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _split(name: str) -> tuple[str, str]:
    """The module and the attribute of a parameter."""
    module, _, attribute = _plain_name(name).rpartition(".")
    return module, attribute


def _layer(module: str, attribute: str) -> str:
    if attribute == "weight":
        return module
    return f"{module}.{attribute}" if module else attribute


def _local(weight: Tensor) -> Tensor:
    return weight._local_tensor if is_dtensor(weight) else weight


def is_low_bit(weight: Any) -> bool:
    """True if a local tensor is a LowbitTensor, whose module imports this one."""
    return hasattr(type(weight), "inner_tensors")


def _is_qat(weight: Any) -> bool:
    """True if `lowbit.qat` prepared this local tensor."""
    return is_low_bit(weight) and isinstance(getattr(weight, "scheme", None), Scheme)


def _memory(weight: Tensor) -> tuple[int, int]:
    """The first address and the one after the last, of the first inner tensor; 0 and 0 where there is none."""
    local: Any = _local(weight)
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


# ---- products that don't note themselves ----------------------------------------------------------------------

_MATMULS = (
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm),
    *(torch._grouped_mm, getattr(F, "grouped_mm", torch._grouped_mm)),
)
_ADDMMS = (torch.addmm, Tensor.addmm)
_OPERANDS: dict[Any, tuple[tuple[int, str], tuple[int, str]]] = {
    **dict.fromkeys(_MATMULS, ((0, "input"), (1, "mat2"))),
    **dict.fromkeys((torch.matmul, Tensor.matmul), ((0, "input"), (1, "other"))),
    **dict.fromkeys(_ADDMMS, ((1, "mat1"), (2, "mat2"))),
    **dict.fromkeys((F.linear, F.embedding), ((0, "input"), (1, "weight"))),
    **dict.fromkeys((F.conv1d, F.conv2d), ((0, "input"), (1, "weight"))),
}
"""Input and weight among the arguments of a function: position and name."""
_CONVOLUTIONS = (F.conv1d, F.conv2d)


class _Products(TorchFunctionMode):
    """Notes the products of parameters that don't note themselves, and PyTorch's products in backward."""

    def __init__(self, watch: Notes) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, thread = kwargs or {}, self.watch.thread
        looked_at = func in _OPERANDS or func is F.multi_head_attention_forward
        if not looked_at or thread.inside:
            result = self._followed(func, args, kwargs)
            if func is Tensor.__getitem__ and isinstance(result, Tensor):
                self._selected(args[0], result)
            return result
        before = len(self.watch.notes)
        result = func(*args, **kwargs)
        notes = self.watch.notes[before:]
        if func is F.multi_head_attention_forward:
            self._attention(notes, args, kwargs, result[0])
            return result
        (i, x_name), (j, weight_name) = _OPERANDS[func]
        x = args[i] if len(args) > i else kwargs[x_name]
        weight = args[j] if len(args) > j else kwargs[weight_name]
        if not is_low_bit(_local(weight)) and self._is_stack(x):  # experts from the left
            experts, x = x, weight.transpose(-2, -1)
            weight = self._followed(Tensor.transpose, (experts, -2, -1), {})
            self._selected(experts, weight)
        if func is F.embedding:
            self._lookup(x, weight, result)
            return result
        if not notes and isinstance(weight, Tensor) and weight.ndim >= 2:
            notes = self._noticed(func, x, weight, result)
        self._follow(notes, x.requires_grad, weight.requires_grad, result)
        return result

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`func(*args, **kwargs)`, whose results are remembered if it reads rounded values."""
        watch = self.watch
        watch.last_rounded = None
        result = func(*args, **kwargs)
        weight = watch.last_rounded
        if weight is None and watch.rounded:
            found = map(watch.rounded_from, tree_leaves((args, kwargs)))
            weight = next((own for own in found if own is not None), None)
        if weight is not None:
            for t in tree_leaves(result):
                if isinstance(t, Tensor) and t.is_floating_point() and not is_low_bit(_local(t)):
                    watch.remember_rounded(t, weight)
        return result

    def _is_stack(self, x: Any) -> bool:
        """True if x is a weight of experts, or a copy of some."""
        if not isinstance(x, Tensor) or x.ndim != 3:
            return False
        return is_low_bit(_local(x)) or self.watch.find(x) is not None

    def _selected(self, weight: Tensor, experts: Tensor) -> None:
        """Remember the layer of a copy of experts."""
        if weight.ndim == experts.ndim == 3 and (layer := self.watch.find(weight)) is not None:
            self.watch.selected[id(experts)] = weakref.ref(experts), layer

    def _noticed(self, func: Any, x: Tensor, weight: Tensor, result: Tensor) -> list[Note]:
        local = _local(weight)
        is_plain = not is_low_bit(local)
        takes_weights = func is F.linear or func in _CONVOLUTIONS
        if is_plain and not takes_weights and self.watch.find(weight) is None:
            return []  # a product of two activations
        if func in _CONVOLUTIONS:
            n, k = _sizes_of_conv(local)
            rows = _local(result).numel() // max(n, 1)
            made = self.watch.note(rows, n, k, weight, PLAIN_WEIGHT)
        else:
            n, k = local.shape[-2:] if func is F.linear else local.shape[-2:][::-1]
            made = self._note(x, n, k, weight, PLAIN_WEIGHT)
        read = self.watch.rounded_from(weight)
        made.layer = made.layer if read is None else read[1] or made.layer
        prepared: Any = self.watch.prepared.get(made.layer)
        if read is not None:
            made.weight = read[0] if prepared is None else weight_format(prepared)
            made.why = ROUNDED
        elif prepared is not None and prepared.off is not None:
            made.weight = weight_format(prepared)
            made.why = SWITCHED_OFF if prepared.off == "all" else ROUNDED
        elif not is_plain:
            rounds_input = getattr(local, "activation", None) is not None
            made.why = ROUNDED if _is_qat(local) or rounds_input else DEQUANTIZED
        elif made.layer in self.watch.left_alone:
            made.why = f"left alone: {self.watch.left_alone[made.layer]}"
        return [made]

    def _note(self, x: Tensor, n: int, k: int, weight: Tensor, why: str) -> Note:
        return self.watch.note(_local(x).shape[:-1].numel(), n, k, weight, why)

    def _lookup(self, indices: Tensor, table: Tensor, found: Tensor) -> None:
        local = _local(table)
        if is_low_bit(local):
            rows, columns = local.shape
            made = self.watch.note(indices.numel(), rows, columns, table, LOOKED_UP)
            record(made, "embedding", found.dtype)

    def _attention(self, notes: list[Note], args: Any, kwargs: Any, result: Tensor) -> None:
        """The products of nn.MultiheadAttention with its inputs, and with the attended values."""
        given = signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
        query, key, value = given["query"], given["key"], given["value"]
        joint, out = given["in_proj_weight"], given["out_proj_weight"]
        k = query.shape[-1]
        if joint is None:
            weights = [given[f"{name}_proj_weight"] for name in "qkv"]
            parts = [(x, w, *w.shape) for x, w in zip((query, key, value), weights, strict=True)]
        elif query is key is value:
            parts = [(query, joint, 3 * k, k)]
        elif key is value:
            parts = [(query, joint, k, k), (key, joint, 2 * k, k)]
        else:
            parts = [(x, joint, k, k) for x in (query, key, value)]
        for x, weight, n, columns in parts:
            noted = self._note(x, n, columns, weight, IN_ATTENTION)
            self._follow([noted], x.requires_grad, weight.requires_grad, result)
        attended = any(t.requires_grad for part in parts for t in part[:2])
        n, k = out.shape
        notes = notes or [self._note(query, n, k, out, IN_ATTENTION)]
        self._follow(notes, attended, out.requires_grad, result)

    def _follow(
        self, notes: list[Note], grad_input: bool, grad_weight: bool, result: Tensor
    ) -> None:
        """Record the output, and the backward products that are needed, once the result's gradient is there."""
        needed = [
            name for name, need in zip(PRODUCTS[1:], (grad_input, grad_weight), strict=True) if need
        ]
        notes = [made for made in notes if made.why is not None]

        def backward(grads: Any) -> None:
            for made in notes:
                for name in needed:
                    record(made, name, result_dtype)

        result_dtype, node = result.dtype, result.grad_fn
        for made in notes:
            if "output" not in made.ran:
                record(made, "output", result_dtype)
        if notes and needed and node is not None:
            node.register_prehook(backward)


def _sizes_of_conv(weight: Tensor) -> tuple[int, int]:
    """N and K of a weight [N, C/groups, k…], of which an output position takes K products for each of N."""
    return weight.shape[0], weight.shape[1:].numel()


# ---- trace ----------------------------------------------------------------------------------------------------


def trace(model: nn.Module, *args: Any, backward: bool | None = None, **kwargs: Any) -> Trace:
    """Run `model(*args, **kwargs)` once, and report the format of every product of every layer, and why.

    Args:
        backward: also run a backward pass, from the sum of the outputs. By default, if the model is in training mode,
            and a parameter or an argument requires a gradient. Without it, the model runs without gradients.

    A compiled model runs eagerly here. Shapes, dtypes, devices and schemes decide what runs in what, so the compiled
    model makes the same choices, with two exceptions. It keeps the implementations that were registered when it was
    compiled (`register_linear`). Where the eager model runs "cpu_linear" or "cpu_half_linear", the graph has
    "plain_linear".

    Afterwards gradients (those of the arguments too), buffers and random states are as before. Hooks on gradients of
    parameters (`register_hook`, `register_post_accumulate_grad_hook`) do not run, as an optimizer step may be one.
    Hooks of modules do. Under FSDP2 and tensor parallelism all ranks must call it.

    Raises:
        TypeError: the model is not a module.
        ValueError: `backward=True`, but no output requires a gradient.
        RuntimeError: another trace runs, in this thread or another one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    args, kwargs = _detached(args, kwargs)
    with_grad = model.training and _learns(model, args, kwargs) if backward is None else backward
    with (
        watched(model) as watch,
        torch.compiler.set_stance("force_eager"),
        state_restored(model),
        torch.set_grad_enabled(with_grad),
    ):
        outputs = [t for t in tree_leaves(model(*args, **kwargs)) if isinstance(t, Tensor)]
        ends = [t for t in outputs if t.requires_grad and with_grad]
        if backward and not ends:
            raise ValueError("backward=True, but no output of the model requires a gradient")
        if ends:  # contiguous gradients, which grouped products of torch require
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    ran = tuple(watch.products())
    return Trace((*ran, *_not_reached(model, {p.layer for p in ran})), watch.launches)


def _detached(args: Any, kwargs: Any) -> Any:
    """The arguments as detached tensors, so that the caller's gradients stay; one tensor stays one."""
    made: dict[int, Tensor] = {}

    def detached(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            made[id(x)] = x.detach().requires_grad_(x.requires_grad)
        return made[id(x)]

    return tree_map(detached, (args, kwargs))


def _learns(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """True if a parameter or an argument requires a gradient."""
    tensors = (*model.parameters(), *tree_leaves((args, kwargs)))
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _not_reached(model: nn.Module, reached: set[str]) -> Iterator[TracedProduct]:
    """Linear layers, and other modules with low-bit weights, that did not run."""
    for name, module in model.named_modules():
        is_linear, is_lookup = isinstance(module, nn.Linear), isinstance(module, nn.Embedding)
        for attribute, p in module._parameters.items():
            if p is None or not (is_low_bit(_local(p)) or (is_linear and attribute == "weight")):
                continue
            layer = _layer(_plain_name(name), attribute)
            if layer not in reached:
                product, form = "embedding" if is_lookup else "output", weight_format(_local(p))
                is_conv = isinstance(module, nn.Conv1d | nn.Conv2d) and p.ndim > 2
                n, k = _sizes_of_conv(p) if is_conv else p.shape[-2:]
                yield TracedProduct(layer, product, 0, n, k, form, "", "", 0, NOT_REACHED)


@contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Put gradients, buffers and random states back, and let no hook on a parameter's gradient run."""
    parameters = list(model.parameters())
    hooks = [h for p in parameters for h in (p._backward_hooks, p._post_accumulate_grad_hooks) if h]
    waiting = [dict(h) for h in hooks]
    grads = [p.grad for p in parameters]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    for p in parameters:
        p.grad = None
    for h in hooks:
        h.clear()  # in place: autograd holds the dict itself
    try:
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        for h, own in zip(hooks, waiting, strict=True):
            h.update(own)
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # forward may have put another in its place
                if buffer is not None and value is not None:
                    buffer.copy_(value)

"""Activations that autograd saves for the backward pass, in 8 bits.

    with lowbit.train.save_in_int8(model):
        hidden = model(tokens)
    loss_of(hidden).backward()

A saved tensor becomes int8 codes with one scale for each 128 elements, in the order in which they lie in memory: 1.02
bytes an element for 16-bit tensors, 1.03 for float32. `lowbit_kernels.quantize.quantize_flat` has the formula. An
element is off by at most 1/252 of its block's largest magnitude. Values round to nearest: the same bits on every rank
and after a restart.

The forward pass stays as it is. The backward pass reads rounded values: a linear layer multiplies its gradient by the
rounded input, and a norm or an activation function takes its derivative there.

Related work rounds stochastically, to 2 to 4 bits: ActNN (arXiv 2104.14129), GACT (arXiv 2206.11357).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import lowbit_kernels as kernels
from lowbit.numerics.settings import is_whole
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROUNDING: WeakKeyDictionary[nn.Module, dict[int, _Rounding]] = WeakKeyDictionary()
"""By model and `min_numel`."""
_EXACT = {
    *("log", "log2", "log10", "log1p", "logit", "xlogy", "sqrt", "rsqrt", "reciprocal"),
    *("div", "div_", "divide", "true_divide", "__truediv__", "__rtruediv__", "__rdiv__"),
    *("logsumexp", "logcumsumexp", "scaled_dot_product_attention"),
}
"""Operations whose derivative divides by what they save, or exponentiates it, and attention."""
_POWERS = {"pow", "pow_", "__pow__"}
_SAME_VALUES = {
    *("convert_element_type", "_to_copy", "view", "_unsafe_view", "expand", "clone"),
    *("alias", "detach", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice"),
}
_SMOOTH = {
    *("add", "sub", "rsub", "mul", "div", "neg", "pow", "square", "sum", "mean", "cat"),
    *("exp", "sigmoid", "sigmoid_backward", "tanh", "tanh_backward", "erf"),
    *("silu", "silu_backward", "gelu", "gelu_backward"),
    *("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_int_mm", "_scaled_mm"),
    *("native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward"),
}
"""Operations of backward graphs that do not tell 0 from small values, as comparisons do."""
_EXPONENTIATED = "LogSoftmaxBackward0"
"""The node whose result backward exponentiates: an absolute error would become a relative one."""


class save_in_int8(torch.autograd.graph.saved_tensors_hooks):
    """Within this context autograd keeps activations in int8 for the backward pass; the module has the formula.

    This holds for every module and every custom function that saves its tensors by autograd, and for the inputs of
    `torch.utils.checkpoint`: the block is computed again from its rounded inputs. Tensors that save the same elements
    share one copy. Outputs of the forward pass are those of a plain run. A double backward differentiates at the
    rounded values.

    These stay as they are:

    - parameters and buffers, their views, and copies of parameters;
    - integers, float64, tensors of fewer than `min_numel` elements, and subclasses, as low-bit tensors and DTensors;
    - tensors without a gradient, as constants, masks and the statistics of attention; second results, as those of
      norms; results of `log_softmax`;
    - one value a row (a last dimension of 1), as the statistics of norms that are written in PyTorch operations;
    - what `log`, `sqrt`, `rsqrt`, `reciprocal`, quotients and powers below 1 save: their derivatives divide by it; what
      `logsumexp` saves: its derivative exponentiates it;
    - queries and keys of `F.scaled_dot_product_attention`: backward computes probabilities from them again.

    A value below 1/252 of its block's largest one becomes 0, or the smallest code in a block without negative values.
    Run other operations whose derivative divides by what they save outside of the context. torch calls only the
    innermost hooks. So
    `torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)` around an operation keeps what it saves exact.

    torch.compile takes the rounding into its graphs. There 16-bit tensors that the graph alone sees are rounded, by the
    same rules; its inputs and float32 tensors stay. Where the backward graph compares a tensor with nothing, its small
    positive values may become 0, and a block with an infinity or NaN becomes infinite or NaN. Open the context around
    the compiled function: within it torch.compile breaks the graph.

    A rounded tensor may change in place afterwards, because backward reads the values that were saved. For a tensor
    that stays as it is, backward raises, as without this context. Autograd does not count changes by `.data`.

    Args:
        model: its parameters and buffers stay as they are.
        min_numel: the fewest elements of a tensor that is rounded, at least 1.

    Raises:
        TypeError, ValueError: another argument.
        RuntimeError: in backward, a tensor that stays as it is has changed in place.
    """

    def __init__(self, model: nn.Module, *, min_numel: int = 2**16) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                "save_in_int8 takes the nn.Module whose parameters and buffers stay as they are, got "
                f"{type(model).__name__}"
            )
        if not is_whole(min_numel):
            raise TypeError(f"min_numel must be an int, got {min_numel!r}")
        if min_numel < 1:
            raise ValueError(f"min_numel must be at least 1, got {min_numel}")
        min_numel = int(min_numel)
        rounding = _ROUNDING.setdefault(model, {})
        self._rounding = rounding.setdefault(min_numel, _Rounding(min_numel))
        super().__init__(*self._rounding.hooks)
        self._model = model

    def __enter__(self) -> None:
        self._rounding.leave(list(_plain_tensors(self._model)))
        self._operations = _Operations()
        self._operations.__enter__()
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._operations.__exit__(*args)


class _Present(threading.local):
    """The operation that this thread runs."""

    exact: Set[int] | None = frozenset()
    """Addresses that it keeps exact; None: all."""


_PRESENT = _Present()


class _Operations(TorchFunctionMode):
    """Says which operation saves a tensor. torch.compile's graphs show it themselves."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not _is_exact_call(func.__name__, args):
            return func(*args, **kwargs)
        exact: set[int] | None = None
        if func is F.scaled_dot_product_attention:
            exact = {
                _address(t)
                for t in (*args[:2], kwargs.get("query"), kwargs.get("key"))
                if type(t) is Tensor
            }
        before, _PRESENT.exact = _PRESENT.exact, exact
        try:
            return func(*args, **kwargs)
        finally:
            _PRESENT.exact = before


class _Rounding:
    """What the hooks of a model do.

    torch.compile takes hooks into its graphs if they are graphs themselves, and compiles again for other ones. So a
    model keeps its hooks from step to step. Each is a graph of one call, `pack` or `unpack`. Autograd makes this call
    with every tensor that eager code saves, and torch.compile traces it for every tensor that only the compiled code
    sees.
    """

    def __init__(self, min_numel: int) -> None:
        self._min_numel = min_numel
        self._own: dict[int, StorageWeakRef] = {}
        self._shapes: set[tuple[int, ...]] = set()
        # Codes hold a weak reference to the storage that they were made from, so no other storage takes its address
        # while they are in this dictionary.
        self._made: WeakValueDictionary[Any, _Codes] = WeakValueDictionary()
        self.hooks = _graph_of(self.pack), _graph_of(unpack)

    def leave(self, plain: list[Tensor]) -> None:
        """Do not round these tensors, nor 16-bit copies of float32 ones."""
        # FSDP2 frees some of these storages, as those of a sharded low-bit weight, and an activation could take the
        # address of one. A weak reference keeps the address.
        self._own = {_address(t): StorageWeakRef(t.untyped_storage()) for t in plain}
        shapes = {tuple(t.shape) for t in plain if t.dtype is torch.float32 and t.dim() > 1}
        self._shapes = shapes | {(*s[:-2], s[-1], s[-2]) for s in shapes}

    @torch._disable_dynamo
    def pack(self, t: Tensor) -> Any:
        if _is_traced(t):
            return self._traced(t)
        region = _region(t) if self._may_round(t) else None
        if region is None:
            # A result of the node that saves it would keep the node alive, and the node keeps the result.
            return t if t.is_leaf else t.detach(), t._version
        key = (_address(t), t.dtype, t._version, t.storage_offset(), region.values_key)
        codes = self._made.get(key)
        if codes is None:
            with torch.no_grad():
                made = kernels.quantize_flat.quantize_flat(region.flat(t))
            count = math.prod(region.core)
            codes = self._made[key] = _Codes(*made, count, StorageWeakRef(t.untyped_storage()))
        return codes, region

    def _traced(self, t: Tensor) -> Any:
        """Codes and scales by operations that torch.compile fuses with their neighbours, the shape in memory, the
        dimensions of the tensor in it, and whether codes have signs and special values; or the tensor."""
        rounds = t.dtype in _DTYPES[1:] and t.numel() >= self._min_numel and t.dim() > 0
        if not rounds or t.shape[-1] == 1 or tuple(t.shape) in self._shapes:
            return t
        uses = _uses_in_graph()
        if uses.exact:
            return t
        strides = t.stride()
        order = sorted(range(t.dim()), key=lambda i: -strides[i])
        in_memory = t.permute(order)
        if not in_memory.is_contiguous():  # it repeats elements or leaves gaps
            return t
        blocks = F.pad(in_memory.reshape(-1), (0, -t.numel() % 128)).view(-1, 128)
        if len(blocks) % 8 == 0:
            # On a GPU Inductor fuses a reduction with an elementwise operation on the same elements only if both have
            # the same loops, or numbers of loops that differ. Few elementwise operations have five.
            blocks = blocks.view(-1, 2, 2, 2, 128)
        flat = kernels.quantize_flat
        codes, scale = flat.codes_of(blocks) if uses.special else flat.finite_codes_of(blocks)
        return codes, scale, tuple(in_memory.shape), tuple(order), uses.special

    def _may_round(self, t: Tensor) -> bool:
        if type(t) is not Tensor or t.dtype not in _DTYPES or t.numel() < self._min_numel:
            return False
        if t.layout is not torch.strided or t.is_meta or t.is_neg():
            return False
        exact = _PRESENT.exact
        if exact is None or _address(t) in self._own or _address(t) in exact:
            return False
        if t.dim() and (t.shape[-1] == 1 or t.stride(-1) == 0):  # one value a row, as statistics
            return False
        source = t if t._base is None else t._base
        # Constants, as masks, and what a function makes before it saves it, as copies of weights, have no node.
        # Pieces of a split are views with numbers of their own.
        node = source.grad_fn
        return node is not None and source.output_nr == 0 and not _is_exact(node)


def _plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers that have a storage: those of a shard, and those within a low-bit tensor."""
    for t in map(local, chain(model.parameters(), model.buffers())):
        if isinstance(t, LowbitTensor):
            yield from (inner for inner in t.inner_tensors().values() if inner is not None)
        elif t.layout is torch.strided and not nn.parameter.is_lazy(t):
            yield t


def _is_exact_call(name: str, args: Any) -> bool:
    if name not in _POWERS:
        return name in _EXACT
    # x**p has the derivative p x**(p - 1).
    return len(args) < 2 or not isinstance(args[1], int | float) or args[1] < 1


class _Uses(NamedTuple):
    """How the graph that torch.compile makes of the backward pass reads a tensor."""

    exact: bool
    """It divides by the tensor, exponentiates it, or computes the scores of attention from it."""
    special: bool
    """It may compare elements with 0, as the derivative of ReLU does."""


def _uses_in_graph() -> _Uses:
    """Those of the tensor that torch.compile asks the hook about."""
    # A slow module, which is there while torch.compile calls this.
    from torch._functorch._aot_autograd import graph_compile

    context = getattr(graph_compile, "_get_saved_tensor_hook_context", None)
    if context is None:  # a torch without it does not say which tensors are divided by
        return _Uses(exact=True, special=True)
    found = context()
    if found is None:
        return _Uses(exact=False, special=True)
    name = found["_node"].name
    inputs = [n for n in found["_bw_graph"].find_nodes(op="placeholder") if n.name == name]
    uses = [use for n in inputs for use in _uses(n)]
    return _Uses(any(_is_exact_use(*u) for u in uses), any(_is_special_use(*u) for u in uses))


_Use = tuple[str, torch.fx.Node, list[int]]


def _uses(value: torch.fx.Node) -> Iterator[_Use]:
    """The operations on this value, by name, and its places among their arguments. Copies, multiples and differences
    to it stand for the value itself."""
    for user in value.users:
        name = getattr(user.target, "__name__", "").split(".")[0]
        places = [i for i, arg in enumerate(user.args) if arg is value]
        multiple = name == "mul" and not all(isinstance(a, torch.fx.Node) for a in user.args)
        if multiple or name in _SAME_VALUES or (name == "sub" and places == [0]):
            yield from _uses(user)
        else:
            yield name, user, places


def _is_exact_use(name: str, user: torch.fx.Node, places: list[int]) -> bool:
    """True where the value is a divisor, exponent or logarithm, or a query or a key."""
    if "scaled_dot_product" in name:
        return 1 in places or 2 in places  # (gradient, query, key, …)
    if name == "div":
        return 1 in places
    return name == "exp" or _is_exact_call(name, user.args)


def _is_special_use(name: str, user: torch.fx.Node, places: list[int]) -> bool:
    """True for what may compare the value with 0."""
    own = getattr(user.target, "namespace", "") == "lowbit"
    return not (own or name in _SMOOTH or "scaled_dot_product" in name)


def _is_traced(t: Tensor) -> bool:
    """True for a tensor of torch.compile's tracers."""
    return type(t).__module__.startswith("torch._subclasses.")


def _graph_of(hook: Callable[[Any], Any]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(hook, (graph.placeholder("saved"),)))
    return torch.fx.GraphModule(nn.Module(), graph)


def _address(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _is_exact(node: Any) -> bool:
    """True if the result of this node must not be rounded: of log_softmax, or autocast's copy of a parameter."""
    if node is None:
        return False
    if node.name() != "ToCopyBackward0":
        return node.name() == _EXPONENTIATED
    return hasattr(node.next_functions[0][0], "variable")  # AccumulateGrad, the end of a parameter


@dataclass(frozen=True)
class _Region:
    """The elements of a tensor without those that it repeats.

    Attributes:
        shape: of the tensor.
        core: of the elements; 1 where the tensor repeats one (stride 0).
        stride: of these in memory if they lie there without gaps; else None, and they are saved in logical order.
    """

    shape: tuple[int, ...]
    core: tuple[int, ...]
    stride: tuple[int, ...] | None
    values_key: Any
    """Equal for tensors at one address whose codes are equal."""

    def flat(self, t: Tensor) -> Tensor:
        if self.stride is not None:
            return t.as_strided((math.prod(self.core),), (1,), t.storage_offset())
        return t.as_strided(self.core, t.stride(), t.storage_offset()).reshape(-1)

    def of(self, flat: Tensor) -> Tensor:
        core = (
            flat.view(self.core) if self.stride is None else flat.as_strided(self.core, self.stride)
        )
        return core.expand(self.shape)


def _region(t: Tensor) -> _Region | None:
    """None where elements overlap otherwise, as windows do: their codes would take more than the storage."""
    core = tuple(1 if step == 0 else size for size, step in zip(t.shape, t.stride(), strict=True))
    count = math.prod(core)
    steps = sorted((step, size) for size, step in zip(core, t.stride(), strict=True) if size > 1)
    next_step, is_dense = 1, True
    for step, size in steps:
        if step < next_step:
            return None
        is_dense = is_dense and step == next_step
        next_step = step * size
    if is_dense:
        return _Region(tuple(t.shape), core, t.stride(), count)
    return _Region(tuple(t.shape), core, None, (core, t.stride()))


@dataclass(eq=False)
class _Codes:
    """The values of a storage's elements.

    Attributes:
        codes: int8 [blocks, 128]; the last block is padded with zeros.
        scale: [blocks, 1] in the dtype of the values, the largest finite magnitude of a block; 1 for a block of zeros.
            Below 0 for a block without negative values.
        count: elements.
        source: the storage.
    """

    codes: Tensor
    scale: Tensor
    count: int
    source: StorageWeakRef


@torch._disable_dynamo
def unpack(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):  # in a graph, as the next
        return saved
    if isinstance(saved[0], Tensor) and len(saved) == 5:
        codes, scale, shape, order, special = saved
        flat = kernels.quantize_flat
        values = (flat.values_of if special else flat.finite_values_of)(codes, scale, scale.dtype)
        values = values.view(-1)[: math.prod(shape)].view(shape)
        return values.permute([order.index(i) for i in range(len(order))])
    if isinstance(saved[0], _Codes):
        codes, region = saved
        return region.of(
            kernels.quantize_flat.dequantize_flat(codes.codes, codes.scale, codes.count)
        )
    t, version = saved
    if t._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(t.shape)} that save_in_int8 kept as it is has changed in place: it is at "
            f"version {t._version}, backward needs version {version}. Change it after backward, or change a clone"
        )
    return t

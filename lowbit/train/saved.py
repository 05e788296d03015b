"""Activations that autograd saves for the backward pass, in 8 bits.

    with lowbit.train.save_in_int8(model):
        hidden = model(tokens)
    loss_of(hidden).backward()

A saved tensor becomes int8 codes with one scale for each 128 elements, in the order in which they lie in memory: 1.02
bytes an element for 16-bit tensors, 1.03 for float32. A block of values x whose largest finite magnitude is a becomes

    code = round(126 · x / a)        x ≈ a · (code / 126)        |x - a · code / 126| ≤ a / 252

The largest magnitude of a block and its zeros are exact. Codes 127, -127 and -128 stand for infinity, -infinity and
NaN, so such an element costs its neighbours nothing. In a block without negative values code -1 stands for a / 504, a
value that would round to 0: the derivative of ReLU depends on whether its result is 0, and those of log, sqrt and
division are infinite there. Values round to nearest: the same bits on every rank and after a restart.

The forward pass stays as it is. The backward pass reads rounded values: a linear layer multiplies its gradient by the
rounded input, and a norm or an activation function takes its derivative there.

Related work rounds stochastically, to 2 to 4 bits: ActNN (arXiv 2104.14129), GACT (arXiv 2206.11357).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 128
_MOST = 126  # the code of a block's largest magnitude
_PIECE = 2**24 // _BLOCK  # blocks that are rounded at once: 64 MiB of float32 values
_EXPONENTIATED = "LogSoftmaxBackward0"
"""The node whose result backward exponentiates: an absolute error would become a relative one."""


class save_in_int8(torch.autograd.graph.saved_tensors_hooks):
    """Within this context autograd keeps activations in int8 for the backward pass; the module has the formula.

    This holds for every module and every custom function that saves its tensors by autograd, and for the inputs of
    `torch.utils.checkpoint`: the block is computed again from its rounded inputs. Tensors that save the same elements
    share one copy. Outputs of the forward pass are those of a plain run. A double backward differentiates at the
    rounded values.

    These stay as they are:

    - parameters and buffers, their views, and the copies of parameters that autocast makes;
    - integers, float64, tensors of fewer than `min_numel` elements, and subclasses, as low-bit tensors and DTensors;
    - float32 tensors without a gradient, as the statistics of attention, second results, as those of norms, and results
      of `log_softmax`;
    - one value a row (a last dimension of 1), as the statistics of norms that are written in PyTorch operations.

    A value below 1/252 of its block's largest one becomes 0, or the smallest code in a block without negative values.
    Keep operations that divide by what they save out of the context: logarithms, square roots, division by an
    activation. Their gradients may be far off, or infinite. torch calls the innermost hooks alone. So
    `torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)` around an operation keeps what it saves exact.

    Code compiled by torch.compile hands what it saves to this context too. There 16-bit tensors are rounded and float32
    ones stay. Open the context around the compiled function: within it torch.compile breaks the graph.

    A 16-bit mask of attention is rounded. It is exact where it holds 0 and one other value, or -inf. A large finite
    number beside a bias, as in ALiBi, takes the bias from its block: write -inf there.

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
        if isinstance(min_numel, bool) or not isinstance(min_numel, int):
            raise TypeError(f"min_numel must be an int, got {min_numel!r}")
        if min_numel < 1:
            raise ValueError(f"min_numel must be at least 1, got {min_numel}")
        super().__init__(self._pack, _unpack)
        self._model = model
        self._min_numel = min_numel
        self._own: set[int] = set()
        self._shapes: set[tuple[int, ...]] = set()
        # Codes hold a weak reference to the storage that they were made from, so no other storage takes its address
        # while they are in this dictionary.
        self._made: WeakValueDictionary[Any, _Codes] = WeakValueDictionary()

    def __enter__(self) -> None:
        plain = list(_plain_tensors(self._model))
        self._own = {_address(t) for t in plain}
        shapes = {tuple(t.shape) for t in plain if t.dtype is torch.float32 and t.dim() > 1}
        self._shapes = shapes | {(*s[:-2], s[-1], s[-2]) for s in shapes}
        super().__enter__()

    @torch._disable_dynamo  # compiled code calls the hooks, and Dynamo would trace them
    def _pack(self, t: Tensor) -> Any:
        region = _region(t) if self._may_round(t) else None
        if region is None:
            # A result of the node that saves it would keep the node alive, and the node keeps the result.
            return t if t.is_leaf else t.detach(), t._version
        key = (_address(t), t.dtype, t._version, t.storage_offset(), region.values_key)
        codes = self._made.get(key)
        if codes is None:
            with torch.no_grad():
                codes = _encode(region.flat(t), StorageWeakRef(t.untyped_storage()))
            self._made[key] = codes
        return codes, region, t.dtype

    def _may_round(self, t: Tensor) -> bool:
        if type(t) is not Tensor or t.dtype not in _DTYPES or t.numel() < self._min_numel:
            return False
        if t.layout is not torch.strided or t.is_meta or t.is_neg() or _address(t) in self._own:
            return False
        if t.dim() and (t.shape[-1] == 1 or t.stride(-1) == 0):  # one value a row, as statistics
            return False
        source = t if t._base is None else t._base
        if isinstance(source, nn.Parameter) or (source.is_leaf and source.requires_grad):
            return False
        node = source.grad_fn
        if node is None and not t.requires_grad:
            # a constant, or made within a function that saves it, as all that compiled code saves
            is_copy = tuple(t.shape) in self._shapes or tuple(source.shape) in self._shapes
            return t.dtype is not torch.float32 and not is_copy
        # of the source, because pieces of a split are views with numbers of their own
        return source.output_nr == 0 and not _is_exact(node)


def _plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers that have a storage: those of a shard, and those within a low-bit tensor."""
    for t in map(local, chain(model.parameters(), model.buffers())):
        if isinstance(t, LowbitTensor):
            yield from (inner for inner in t.inner_tensors().values() if inner is not None)
        elif t.layout is torch.strided and not nn.parameter.is_lazy(t):
            yield t


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

    def decode(self, dtype: torch.dtype) -> Tensor:
        values = torch.empty_like(self.codes, dtype=dtype)
        for out, codes, scale in zip(
            *(t.split(_PIECE) for t in (values, self.codes, self.scale)), strict=True
        ):
            largest = scale.float().abs()
            x = codes.float().div_(_MOST).mul_(largest)
            small = largest.div_(4 * _MOST).clamp_min_(torch.finfo(dtype).smallest_normal)
            x = torch.where((codes == -1) & (scale < 0), small, x)
            x.masked_fill_(codes == _MOST + 1, math.inf).masked_fill_(
                codes == -_MOST - 1, -math.inf
            )
            out.copy_(x.masked_fill_(codes == -128, math.nan))
        return values.view(-1)[: self.count]


def _encode(flat: Tensor, source: StorageWeakRef) -> _Codes:
    blocks = -(-flat.numel() // _BLOCK)
    made = flat.new_empty(blocks, _BLOCK, dtype=torch.int8)
    scale = flat.new_empty(blocks, 1)
    for part, codes, scales in zip(
        flat.split(_PIECE * _BLOCK), made.split(_PIECE), scale.split(_PIECE), strict=True
    ):
        x = F.pad(part.float(), (0, -part.numel() % _BLOCK)).view(-1, _BLOCK)
        low, high = x.nan_to_num(0, 0, 0).aminmax(dim=1, keepdim=True)
        largest = torch.maximum(-low, high)
        largest.masked_fill_(largest == 0, 1)
        scales.copy_(torch.where(low < 0, largest, -largest))
        code = (x / largest).mul_(_MOST).round_().clamp_(-_MOST - 1, _MOST + 1)
        code.masked_fill_((code == 0) & (x > 0) & (low >= 0), -1)
        codes.copy_(code.nan_to_num_(nan=-128))
    return _Codes(made, scale, flat.numel(), source)


@torch._disable_dynamo
def _unpack(saved: Any) -> Tensor:
    if len(saved) == 3:
        codes, region, dtype = saved
        return region.of(codes.decode(dtype))
    t, version = saved
    if t._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(t.shape)} that save_in_int8 kept as it is has changed in place: it is at "
            f"version {t._version}, backward needs version {version}. Change it after backward, or change a clone"
        )
    return t

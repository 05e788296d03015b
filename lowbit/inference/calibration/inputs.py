"""The inputs of weights: what products multiply a weight by, summed over all batches.

    H = Σ x xᵀ        over the input rows x [K] of a weight [N, K], for a rounded weight Q the error of its outputs is

    Σ ‖Q x − W x‖² = tr((Q − W) H (Q − W)ᵀ)

`Watch` sees every product of the weights that it watches, whichever module computes it: linears, convolutions (by the
patches that the kernel covers), the output projection of `nn.MultiheadAttention`, and experts that are stacked in one
parameter, each of which has a Hessian of its own. It sees what the function multiplies, so that an input counts as the
product gets it.

An embedding reads rows, one a token. Its error is Σ ‖Q − W‖², so its Hessian is a multiple of the identity. A head tied
to it has both: H / mean(diag H) + I.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lowbit.convert import Target, shape_of_blocks
from lowbit.files.on_disk import zeros_on_disk
from lowbit.inference.calibration.batches import counted_rows
from lowbit.inference.calibration.ranks import Ranks
from lowbit.numerics.unseen_inputs import own_sums
from lowbit.tensor.frozen.rotated_tensor import rotated_blocks


class Moments:
    """Sums over the inputs of one weight, or of several that multiply the same inputs.

    Attributes:
        full: True if `square` is all of H, False if its diagonal.
        square: float32 [E, K, K] or [E, K], of E matrices: experts, the groups of a convolution, or one.
        cross, drift: float32 [E, K, K], Σ (x − x̂) x̂ᵀ and Σ (x − x̂) (x − x̂)ᵀ, where x is the input in high precision
            and x̂ that of the rounded model, which `square` is about. With `weight` instead what a layer reads of them,
            W Σ (x − x̂) x̂ᵀ, float32 [E, N, K], and Σ ‖W (x − x̂)‖², float64 [E]. None without pairs.
        weight: W [E · N, K] of the only weight, where N <= K makes that less work; None: that of `cross` and `drift`.
        rows: int64 [E], the input rows that each matrix saw.
        looked_up: rows that an embedding read.
        once: True if a batch multiplies the weight once.
        of_inputs: False if the weight itself stands for the inputs (`of_weight`).
        shared: what steps made of these sums, for the weights that share them; None: they are of one weight.
    """

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        full: bool,
        pairs: bool,
        once: bool = False,
        disk: Path | None = None,
    ) -> None:
        self._disk = disk if len(shape) == 3 and device.type == "cpu" else None
        """The folder on whose disk the sums of a stack lie; None: in memory."""
        self.full, self.pairs, self.once = full, pairs, once
        self.size = shape[-1]
        self._device = device
        self.square: Tensor | None = None
        self.cross: Tensor | None = None
        self.drift: Tensor | None = None
        self.weight: Tensor | None = None
        self.of_inputs = True
        self.shared: dict[Any, Any] | None = None
        self.stack = len(shape) == 3
        self.matrices = shape[0] if self.stack else 1
        self.rows = [0] * self.matrices
        self.looked_up = 0
        self._mean: Tensor | None = None
        """The mean of x xᵀ over all matrices, once it was needed."""
        self._all: Moments | None = None
        """The sums of the whole stack, where these are of some of its experts."""

    @classmethod
    def of_weight(cls, weight: Tensor, groups: int = 1) -> Moments:
        """An estimate of the sums over the inputs of a float32 weight [..., N, K] that no batch reaches. Each of the
        `groups` of a convolution, N / groups rows, has inputs of its own.

        H = A + I, with A of `lowbit.numerics.unseen_inputs`. The identity keeps the error of all other directions
        small. The root of A, which suits scales alone, is worse for codes that make up for each other."""
        made = cls(weight.shape, weight.device, True, False)
        matrices = (
            weight.unflatten(0, (groups, len(weight) // groups)) if weight.ndim == 2 else weight
        )
        made.matrices = len(matrices)
        made.square = own_sums(matrices)
        made.square.diagonal(dim1=-2, dim2=-1).add_(1)
        made.rows = [made.size] * made.matrices
        made.of_inputs = False
        return made

    def add(self, index: int, x: Tensor, high: Tensor | None = None, matrices: int = 1) -> None:
        """Count x [T, K] as inputs of the matrix `index`, and `high`, the same rows in high precision."""
        if self.square is None:
            self.matrices = max(self.matrices, matrices)
            self.rows = [0] * self.matrices
            self.square = self._zeros()
        x, self._mean = x.to(self._device), None
        self.rows[index] += x.shape[0]
        if not self.full:
            self.square[index] += x.float().square().sum(0)
            return
        _add_product(self.square[index], x, x)
        if self.pairs and high is not None and high.shape == x.shape:
            cross, drift = self._pairs()
            apart = high.to(self._device) - x
            if self.weight is None:
                _add_product(drift[index], apart, apart)
            else:
                w = self.weight.unflatten(0, (self.matrices, -1))[index]
                with torch.autocast(self._device.type, enabled=False):
                    apart = F.linear(apart, w.to(self._device, apart.dtype))
                drift[index] += torch.linalg.vector_norm(apart, dtype=torch.float64).square()
            _add_product(cross[index], apart, x)

    def _zeros(self) -> Tensor:
        shape = (self.matrices, self.size, *((self.size,) if self.full else ()))
        if self._disk is not None:
            return zeros_on_disk(self._disk, shape, torch.float32)
        return torch.zeros(shape, dtype=torch.float32, device=self._device)

    def _pairs(self) -> tuple[Tensor, Tensor]:
        """`cross` and `drift`, at first zeros."""
        if self.cross is None or self.drift is None:
            self.cross, self.drift = self._zeros(), self._zeros()
            if self.weight is not None:
                self.cross = self.cross.new_zeros(
                    self.matrices, -(-len(self.weight) // self.matrices), self.size
                )
                self.drift = self.drift.new_zeros(self.matrices, dtype=torch.float64)
        return self.cross, self.drift

    def add_up(self, ranks: Ranks) -> None:
        """Add the sums of all processes."""
        own = self.matrices, self.rows, self.square is not None, self.cross is not None
        found = ranks.gathered((*own, self.looked_up))
        if len(found) == 1:
            return
        self.looked_up = sum(looked_up for *_, looked_up in found)
        rows = [rows for _, rows, is_seen, *_ in found if is_seen]
        if not rows:
            return
        self.matrices, self.rows = len(rows[0]), [sum(each) for each in zip(*rows, strict=True)]
        self.square = self._zeros() if self.square is None else self.square
        ranks.add_up(self.square)
        if any(has_pairs for _, _, _, has_pairs, _ in found):
            ranks.add_up(*self._pairs())

    @property
    def total(self) -> int:
        """Input rows of all matrices together, for some experts those of the whole stack."""
        return sum(self.rows if self._all is None else self._all.rows)

    def some(self, first: int, last: int) -> Moments:
        """Those of the experts from `first` to `last`, as views. Where one of them lacks rows, the mean over all
        experts counts."""
        made = copy.copy(self)
        made.square = None if self.square is None else self.square[first:last]
        made.rows = self.rows[first:last]
        made.matrices, made._all = len(made.rows), self
        return made

    @property
    def is_finite(self) -> bool:
        sums = (t for t in (self.square, self.drift) if t is not None)
        return all(map(bool, (t.isfinite().all() for t in sums)))

    def rotated(self, size: int) -> Moments:
        """The sums over the same inputs, rotated in blocks of `size`. Needs `full`."""
        made = copy.copy(self)
        made.shared = None
        names = ("square", "cross", "drift") if self.weight is None else ("square",)
        for name in names:
            t = getattr(self, name)
            setattr(made, name, None if t is None else rotated_blocks(t, size, (-2, -1)))
        if self.weight is not None and self.cross is not None:
            made.cross = rotated_blocks(self.cross, size)
        return made

    def pair(self, index: int, w: Tensor) -> tuple[Tensor, float] | None:
        """W Σ (x − x̂) x̂ᵀ, float32 [N, K], and Σ ‖W (x − x̂)‖² of a matrix W [N, K]; None without pairs."""
        if self.cross is None or self.drift is None:
            return None
        if self.weight is not None:
            return self.cross[index], float(self.drift[index])
        return product(w, self.cross[index]), energy(w, self.drift[index])

    def hessian(self, index: int) -> Tensor | None:
        """H [K, K], or its diagonal [K], of one matrix; None if none saw an input. With an embedding beside it, the sum
        that the module names. For an expert with fewer rows T than inputs K: H + (K − T) · H̄, where H̄ is the mean of
        x xᵀ over all experts."""
        found: Tensor | None = None
        total = self.total
        if self.square is not None and total:
            found = self.square[index]
            missing = self.size - self.rows[index]
            if self.stack and missing > 0:
                whole = self if self._all is None else self._all
                if whole._mean is None:
                    assert whole.square is not None
                    whole._mean = whole.square.sum(0) / total
                found = torch.add(found, whole._mean, alpha=missing)
        if self.looked_up:
            eye = torch.ones(self.size, dtype=torch.float32, device=self._device)
            own = torch.diag(eye) if self.full else eye
            if found is None:
                return own
            diagonal = found.diagonal() if self.full else found
            return found / diagonal.mean().clamp(min=1e-30) + own
        return found


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add aᵀ b to the float32 `total`. The matrix units of a GPU multiply 16-bit inputs without rounding, and add them
    up in float32."""
    halves = a.dtype in (torch.bfloat16, torch.float16) and b.dtype == a.dtype
    if halves and a.is_cuda and torch.version.hip is None:
        total.copy_(torch.addmm(total, a.T, b, out_dtype=torch.float32))
    else:
        total.addmm_(a.float().T, b.float())


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b of float32 matrices. On a GPU matrix units multiply the upper and the lower halves of their numbers, in
    bfloat16: each term keeps 16 bits, at four times the speed of float32."""
    if not a.is_cuda or torch.version.hip or torch.cuda.get_device_capability(a.device) < (8, 0):
        return a @ b
    highs = a.bfloat16(), b.bfloat16()
    lows = [(x - high).bfloat16() for x, high in zip((a, b), highs, strict=True)]
    found = torch.mm(highs[0], lows[1], out_dtype=torch.float32)
    for pair in ((lows[0], highs[1]), highs):
        found = torch.addmm(found, *pair, out_dtype=torch.float32)
    return found


def energy(w: Tensor, hessian: Tensor | None) -> float:
    """Σ ‖w x‖² for this Σ x xᵀ [K, K], or its diagonal [K]; None: for independent x."""
    if hessian is None:
        return float(w.square().sum(dtype=torch.float64))
    if hessian.ndim == 1:
        return float((w.square() * hessian).sum(dtype=torch.float64))
    return float((product(w, hessian) * w).sum(dtype=torch.float64))


Seen = Callable[[int, int, int, Any, Any], None]
"""Called with the number of a target, of the matrix, how many matrices there are, the rows x [T, K], or how many rows
an embedding read, and the tensor that they come from."""


class Reached(Exception):
    """A `Watch` has seen as many products as it waited for."""


class Watch(TorchFunctionMode):
    """The context in which `seen` gets the inputs of each product of `targets`.

    Args:
        targets: the weights, plain. Products of quantized weights are not seen.
        seen: gets the inputs of each matrix.
        mask: the tokens that count, bool, of the shape of the leading dimensions of inputs; None: all.
        most: raise `Reached` in place of computing the last of so many products of these weights. None: run on.
        own: `seen` gets the inputs of so many of the targets, the first ones. None: of all.
        unread: numbers of targets whose outputs no later product of these weights reads. Where the run ends early,
            linears get zeros in their place.

    Attributes:
        products: how many of each weight were seen.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        seen: Seen,
        mask: Tensor | None = None,
        most: int | None = None,
        own: int | None = None,
        unread: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.unread = unread if most is not None else ()
        self.products, self.most = [0] * len(targets), most
        self.own = len(targets) if own is None else own
        self.targets, self.seen, self.mask = targets, seen, mask
        self.known = {t.weight.untyped_storage().data_ptr(): i for i, t in enumerate(targets)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = _READERS.get(func)
        if read is not None:
            for weight, inputs in read(args, kwargs):
                index = None if self.is_over else self._count(weight, inputs)
                if self.is_over:
                    raise Reached
                if index in self.unread and func is F.linear:
                    x = _argument(args, kwargs, 0, "input")
                    if x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type):
                        return x.new_zeros(*x.shape[:-1], weight.shape[0])
        return func(*args, **kwargs)

    @property
    def is_over(self) -> bool:
        """True once all products that it waits for were seen. A model that catches `Reached` shows no more of them."""
        return self.most is not None and sum(self.products) >= self.most

    def _count(
        self, weight: Any, inputs: Callable[[Tensor], Iterator[tuple[int, int, Any]]]
    ) -> int | None:
        """Count a product, and give the number of its target; None for another weight."""
        if type(weight) not in (Tensor, torch.nn.Parameter) or weight.layout is not torch.strided:
            return None
        index = self.known.get(weight.untyped_storage().data_ptr())
        if index is None:
            return None
        self.products[index] += 1
        if index >= self.own:
            return index
        target = self.targets[index]
        shape = shape_of_blocks(target)
        first = 0
        if len(shape) == 3 and weight.ndim == 2:
            first = (weight.storage_offset() - target.weight.storage_offset()) // (
                shape[1] * shape[2]
            )
        for matrix, matrices, x in inputs(weight):
            if isinstance(x, int):
                self.seen(index, 0, 1, x, x)
            elif x.shape[-1] == shape[-1]:
                self.seen(index, first + matrix, matrices, counted_rows(x, self.mask), x)
        return index


# ---- functions, and where their weight and its inputs are ------------------------------------------------------

Read = Iterator[tuple[Any, Callable[[Tensor], Iterator[tuple[int, int, Any]]]]]


def _argument(args: Any, kwargs: Any, at: int, *names: str, default: Any = None) -> Any:
    if at < len(args):
        return args[at]
    return next((kwargs[name] for name in names if name in kwargs), default)


def _linear(args: Any, kwargs: Any) -> Read:
    x, weight = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
    yield weight, lambda _: iter([(0, 1, x)])


def _matmul(args: Any, kwargs: Any) -> Read:
    x, weight = args[0], _argument(args, kwargs, 1, "other", "mat2")

    def inputs(w: Tensor) -> Iterator[tuple[int, int, Any]]:
        if w.ndim == 2:
            yield 0, 1, x
        elif w.ndim == 3:
            stack = x.expand(w.shape[0], *x.shape[-2:])
            yield from ((e, w.shape[0], stack[e]) for e in range(w.shape[0]))

    yield weight, inputs


def _grouped(args: Any, kwargs: Any) -> Read:
    x, weight = args[0], args[1]
    ends = _argument(args, kwargs, 2, "offs")

    def inputs(w: Tensor) -> Iterator[tuple[int, int, Any]]:
        if w.ndim != 3 or x.ndim != 2 or ends is None:
            return
        start = 0
        for e, end in enumerate(ends.tolist()):
            yield e, w.shape[0], x[start:end]
            start = end

    yield weight, inputs


def _embedding(args: Any, kwargs: Any) -> Read:
    ids, weight = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
    yield weight, lambda _: iter([(0, 1, int(ids.numel()))])


def _convolution(args: Any, kwargs: Any) -> Read:
    x, weight = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
    stride, padding, dilation = (
        _argument(args, kwargs, at, name, default=default)
        for at, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    groups = _argument(args, kwargs, 6, "groups", default=1)

    def inputs(w: Tensor) -> Iterator[tuple[int, int, Any]]:
        dims = w.ndim - 2
        each = [(v,) * dims if isinstance(v, int) else v for v in (stride, padding, dilation)]
        steps, pads, holes = each
        images = x if x.ndim == w.ndim else x.unsqueeze(0)
        if isinstance(padding, str):
            pads = (0,) * dims
            if padding == "same":
                whole = [d * (k - 1) for d, k in zip(holes, w.shape[2:], strict=True)]
                images = F.pad(images, [p for t in reversed(whole) for p in (t // 2, t - t // 2)])
        if dims == 1:
            images, steps, pads, holes = images.unsqueeze(-2), (1, *steps), (0, *pads), (1, *holes)
        kernel = (1,) * (2 - dims) + tuple(w.shape[2:])
        for image in images.split(1):
            for group, own in enumerate(image.chunk(groups, 1)):
                patches = F.unfold(own, kernel, dilation=holes, padding=pads, stride=steps)
                yield group, groups, patches[0].T

    yield weight, inputs


def _attention(args: Any, kwargs: Any) -> Read:
    """The output projection of F.multi_head_attention_forward: its input is the output with no projection."""
    weight = _argument(args, kwargs, 11, "out_proj_weight")

    def inputs(w: Tensor) -> Iterator[tuple[int, int, Any]]:
        plain = list(args)
        named = dict(kwargs)
        for at, name, value in (
            (11, "out_proj_weight", torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)),
            (12, "out_proj_bias", None),
        ):
            if at < len(plain):
                plain[at] = value
            else:
                named[name] = value
        yield 0, 1, F.multi_head_attention_forward(*plain, **named)[0]

    yield weight, inputs


_READERS: dict[Any, Callable[[Any, Any], Read]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attention,
    **dict.fromkeys((F.conv1d, F.conv2d), _convolution),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _matmul),
    **dict.fromkeys((Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__), _matmul),
    torch.linalg.matmul: _matmul,
    torch._grouped_mm: _grouped,
}
if hasattr(F, "grouped_mm"):
    _READERS[F.grouped_mm] = _grouped

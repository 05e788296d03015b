"""torch.einsum and its kind over a low-bit weight, written as the products that the weight has: F.linear and matmul.

    einsum("bk,nk->bn", x, w)   inner(x, w)   tensordot(x, w, ([1], [1]))       F.linear(x, w)
    einsum("bn,nk->bk", x, w)                                                  x @ w
    einsum("bk,enk->ebn", x, w)   x @ w.mT   of stacked experts [E, N, K]       x.expand(E, B, K) @ w.mT
    w @ x                         mv(w, x)                                     (x.mT @ w.mT).mT

So the input is rounded where the weight's scheme rounds it, gradients reach it, and the weight stays packed. A
contraction of another form reads the values of a weight-only weight, and is refused for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from lowbit.linear.frozen.adapted_stack import adapted_stack
from lowbit.linear.frozen.checks import autocast_dtype

ACCEPTED = (
    "accepted: two operands, of which one is the weight, that share its last dimension or the one before, such as "
    "'bk,nk->bn', 'ebk,enk->ebn' and 'bk,enk->ebn'"
)
MATMULS = (
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__),
    *(torch.mm, Tensor.mm, torch.bmm, Tensor.bmm),
)
"""torch's functions that multiply by a weight as the second operand."""


class NoProduct(NotImplementedError):
    """A contraction that is not a product of the weight."""


class NoView(NotImplementedError):
    """A view that a low-bit tensor does not have. An operation that computes with such a view may read values."""


def contracted(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], low: type) -> Tensor:
    """One of `CONTRACTIONS`, where an operand is of the class `low`. Raises NoProduct for another contraction."""
    return CONTRACTIONS[func](low, *args, **kwargs)


def _refusal(low: type, operands: Sequence[Any], what: str) -> NotImplementedError:
    """The error of the weight among these operands."""
    weight: Any = next(t for t in operands if isinstance(t, low))
    error: NotImplementedError = weight._unsupported(what)
    return error


# ---- as equations ----------------------------------------------------------------------------------------------------


def _einsum(low: type, equation: Any, *operands: Any) -> Tensor:
    """torch.einsum."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    weights = [t for t in operands if isinstance(t, low)]
    what = f"torch.einsum({equation!r}, …)"
    if not isinstance(equation, str) or not weights:
        lists = f"torch.einsum with lists of dimensions ({ACCEPTED}, as a string)"
        raise NoProduct(str(_refusal(low, (equation, *operands), lists)))
    weight: Any = weights[0]
    labels = _labels(equation, [t.ndim for t in operands])
    if labels is not None and len(operands) == 2 and len(weights) == 1:
        (x, inputs), (_, own) = sorted(
            zip(operands, labels[:2], strict=True), key=lambda pair: pair[0] is weight
        )
        found = _product(x, inputs, weight, own, labels[2])
        if found is not None:
            return found
    if len(weights) > 1 or weight.rounds_inputs:
        raise NoProduct(str(_refusal(low, weights, f"{what} ({ACCEPTED})")))
    dtype = next((t.dtype for t in operands if t is not weight), weight.dtype)
    plain = [t.dequantize().to(dtype) if t is weight else t for t in operands]
    return torch.einsum(equation, *plain)


def _inner(low: type, input: Any, other: Any) -> Tensor:
    """torch.inner."""
    if not (input.ndim and other.ndim):
        product: Tensor = input * other
        return product
    return _tensordot(low, input, other, ([input.ndim - 1], [other.ndim - 1]))


def _tensordot(low: type, a: Any, b: Any, dims: Any = 2, out: Any = None) -> Tensor:
    """torch.tensordot."""
    if out is not None:
        raise _refusal(low, (a, b), "torch.tensordot with out=")
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        dims = (list(range(a.ndim - dims, a.ndim)), list(range(dims)))
    names = iter(ascii_letters)
    first, second = [next(names) for _ in range(a.ndim)], [next(names) for _ in range(b.ndim)]
    for i, j in zip(*dims, strict=True):
        second[j] = first[i]
    shared = {*first} & {*second}
    kept = "".join(n for n in (*first, *second) if n not in shared)
    return _einsum(low, f"{''.join(first)},{''.join(second)}->{kept}", a, b)


def _multi_dot(low: type, tensors: Sequence[Any], *, out: Any = None) -> Tensor:
    """torch.linalg.multi_dot, from the left, so that each weight multiplies the product of those before it."""
    if out is not None:
        raise _refusal(low, tensors, "a product of matrices with out=")
    return reduce(torch.matmul, tensors)


def _added(multiply: Callable[[Any, Any], Tensor]) -> Callable[..., Tensor]:
    """beta · input + alpha · multiply(a, b), as torch.addmv, addbmm and baddbmm. A weight as `input` is dequantized,
    as in any sum; frozen experts, to which PEFT adds an adapter so, when something reads the sum."""

    def run(
        low: type, input: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1, out: Any = None
    ) -> Tensor:
        if out is not None:
            raise _refusal(low, (input, a, b), "a sum with a product with out=")
        if multiply is torch.bmm and beta == 1 and getattr(input, "stored_as", None) is not None:
            if (dtype := autocast_dtype(a.device.type)) is not None:
                a, b = a.to(dtype), b.to(dtype)
            if (y := adapted_stack(input, a, b, alpha)) is not None:
                return y
        y = multiply(a, b)
        y = y if alpha == 1 else alpha * y
        return y if beta == 0 else (input if beta == 1 else beta * input) + y

    return run


def _labels(equation: str, ndims: Sequence[int]) -> list[str] | None:
    """The subscripts of the operands and of the output, with letters for an ellipsis. None where torch raises
    the error."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ndims):
        return None
    free = [c for c in ascii_letters if c not in equation]
    hidden = [n - len(t.replace("...", "")) for t, n in zip(terms, ndims, strict=True)]
    most = max((h for t, h in zip(terms, hidden, strict=True) if "..." in t), default=0)
    if any(h < 0 or (h and "..." not in t) for t, h in zip(terms, hidden, strict=True)):
        return None
    dots = "".join(free[:most])
    found = [t.replace("...", dots[most - h :]) for t, h in zip(terms, hidden, strict=True)]
    if not arrow:
        joined = "".join(terms).replace("...", "")
        output = dots + "".join(c for c in sorted({*joined}) if joined.count(c) == 1)
    else:
        output = output.replace("...", dots)
    known = {*"".join(found)}
    if any(len({*t}) != len(t) for t in (*found, output)) or not {*output} <= known:
        return None
    return [*found, output]


def _product(x: Any, inputs: str, weight: Any, own: str, output: str) -> Tensor | None:
    """The product of x, whose dimensions are `inputs`, and the weight, of `own`, with the dimensions `output`. None
    where it is neither `F.linear` nor a product of stacked matrices."""
    if len(own) not in (2, 3):
        return None
    *expert, n, k = list(own)
    pairs = {(k, n): weight.mT, (n, k): weight}
    fitting = [
        (over, free)
        for over, free in pairs
        if over in inputs and over not in output and free in output and free not in inputs
    ]
    if not fitting:
        return None
    over, free = fitting[0]
    matrix = pairs[over, free]
    if any(c not in output and c not in own for c in inputs):  # sums of the input alone
        alone = [i for i, c in enumerate(inputs) if c not in output and c not in own]
        x, inputs = x.sum(alone), "".join(c for i, c in enumerate(inputs) if i not in alone)
    rest = [c for c in output if c in inputs and c not in own]
    if not expert:
        y = x.permute([inputs.index(c) for c in (*rest, over)]) @ matrix
        return y.permute([[*rest, free].index(c) for c in output])
    shared = [c for c in expert if c in inputs]
    x = x.permute([inputs.index(c) for c in (*shared, *rest, over)])
    if shared and x.shape[0] != len(weight):  # one of them is 1 and torch repeats it
        return None
    sizes = [*x.shape[:-1]] if shared else [len(weight), *x.shape[:-1]]
    rows = (len(weight), math.prod(sizes[1:]), x.shape[-1])
    x = x.reshape(rows) if shared else x.reshape(rows[1:]).expand(rows)
    y = (x @ matrix).view(*sizes, matrix.shape[-1])
    names = [*expert, *rest, free]
    if expert[0] not in output:
        y, names = y.sum(0), names[1:]
    return y.permute([names.index(c) for c in output])


CONTRACTIONS: dict[Any, Callable[..., Tensor]] = {
    torch.einsum: _einsum,
    torch.tensordot: _tensordot,
    torch.linalg.matmul: lambda low, input, other, **out: _multi_dot(low, (input, other), **out),
    torch.linalg.multi_dot: _multi_dot,
    torch.chain_matmul: lambda low, *matrices, **out: _multi_dot(low, matrices, **out),
    **dict.fromkeys((torch.inner, Tensor.inner), _inner),
    **dict.fromkeys(
        (torch.mv, Tensor.mv), lambda low, input, vec: _einsum(low, "nk,k->n", input, vec)
    ),
    **dict.fromkeys((torch.addmv, Tensor.addmv), _added(torch.mv)),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), _added(torch.bmm)),
    **dict.fromkeys((torch.addbmm, Tensor.addbmm), _added(lambda a, b: torch.bmm(a, b).sum(0))),
}
"""The functions of torch that are written as other products."""


# ---- matmul ----------------------------------------------------------------------------------------------------------


def of_swapped(weight: Any, x: Tensor) -> Tensor:
    """weight @ x by a product whose second operand is the weight."""
    return x @ weight.mT if x.ndim == 1 else (x.mT @ weight.mT).mT


def of_stack(x: Tensor, stack: Any) -> Tensor:
    """x @ stack with the shapes of torch.matmul, x [..., M, K] or [K], a stack [E, K, N], by one torch.bmm."""
    if x.ndim == 1:
        return of_stack(x.unsqueeze(0), stack).squeeze(-2)
    count = len(stack)
    batch = torch.broadcast_shapes(x.shape[:-2], (count,))
    if batch[-1] != count:  # one matrix for all
        return x @ stack[0]
    x = x.expand(*batch, *x.shape[-2:]).movedim(-3, 0)
    y = torch.bmm(x.reshape(count, -1, x.shape[-1]), stack)
    return y.view(*x.shape[:-1], y.shape[-1]).movedim(0, -3)

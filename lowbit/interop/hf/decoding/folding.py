"""Chains of operations in the graph of one token, each replaced by one kernel that computes the same.

    RMS norm in 16 bits, as transformers' models write it                   rms_norm
    silu(a) · b, gelu(a) · b by tanh                                        gated_activation
    rotated queries and keys before the attention                           decode_attention rotates them
    r + a low-bit linear                                                    the linear adds r
    the largest of a softmax, divided by their sum or not                   top_experts
    embedding                                                               index, which reads rows at once
    low-bit linears of one input whose weights lie side by side             one linear, and slices of its output
    gated_activation of the two halves of a low-bit linear                  gated_linear

A pattern is a tree of operations with names for what may stand in it. It is matched from its last operation upwards,
so that other readers of an intermediate result do not matter: what nobody reads any more is removed afterwards. The
kernels round once where the chains round after each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

import lowbit_kernels  # noqa: F401  (defines torch.ops.lowbit)
from lowbit.convert.side_by_side import holder_of, joint_of

aten: Any = torch.ops.aten
lowbit: Any = torch.ops.lowbit
LINEARS = {
    op: [argument.name for argument in op._schema.arguments]
    for op in (lowbit.weight_linear.default, lowbit.dynamic_linear.default)
}
"""The linears that add a residual, and the names of their arguments."""
RESIDUALS = {op: names.index("residual") for op, names in LINEARS.items()}
ROWS = ("codes", "scale", "zero_point", "bias")
"""Arguments of the linears whose dimension 0 runs along the outputs."""
VIEWS = (aten.view.default, aten._unsafe_view.default)
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Any_:
    """Matches any argument, always the same one where the pattern has it several times."""


@dataclass(frozen=True, eq=False)
class FoldedCall:
    """Matches a call of `op`; its arguments match by position, those that follow may be anything. The arguments of
    sums and products may be exchanged."""

    op: Any
    args: tuple[Any, ...]

    @property
    def is_symmetric(self) -> bool:
        return self.op in (aten.add.Tensor, aten.mul.Tensor) and len(self.args) == 2


def call(op: Any, *args: Any) -> FoldedCall:
    return FoldedCall(op, args)


def matched(pattern: Any, found: Any, bound: dict[Any, Any]) -> dict[Any, Any] | None:
    """`bound` and what the pattern's parts stand for; None where it does not match."""
    if isinstance(pattern, Any_ | FoldedCall) and pattern in bound:
        return bound if bound[pattern] is found else None
    if isinstance(pattern, Any_):
        return {**bound, pattern: found}
    if isinstance(pattern, FoldedCall):
        return _matched_call(pattern, found, bound)
    if isinstance(pattern, list):
        if not isinstance(found, list | tuple) or len(found) != len(pattern):
            return None
        return _matched_all(pattern, found, bound)
    return bound if type(found) in (int, float, bool, str) and pattern == found else None


def _matched_call(pattern: FoldedCall, found: Any, bound: dict[Any, Any]) -> dict[Any, Any] | None:
    if not _is_node(found) or found.target is not pattern.op:
        return None
    if len(found.args) < len(pattern.args) or "alpha" in found.kwargs:
        return None
    given = found.args[: len(pattern.args)]
    orders = [given, given[::-1]] if pattern.is_symmetric else [given]
    for order in orders:
        result = _matched_all(pattern.args, order, {**bound, pattern: found})
        if result is not None:
            return result
    return None


def _matched_all(patterns: Any, found: Any, bound: dict[Any, Any] | None) -> dict[Any, Any] | None:
    for pattern, one in zip(patterns, found, strict=True):
        bound = None if bound is None else matched(pattern, one, bound)
    return bound


# ---- the patterns --------------------------------------------------------------------------------------------------

X, WEIGHT, EPS, OTHER = Any_(), Any_(), Any_(), Any_()
WIDE = call(aten._to_copy.default, X)
MEAN = call(aten.mean.dim, call(aten.pow.Tensor_Scalar, WIDE, 2), [-1], True)


def _norms(inverse: Any) -> list[tuple[Any, float]]:
    """RMS norms that multiply by `inverse` of the mean square, and what their weights lack."""
    normed = call(aten.mul.Tensor, WIDE, inverse)
    wide = call(aten._to_copy.default, WEIGHT)
    products = (
        (call(aten.mul.Tensor, normed, call(aten.add.Tensor, wide, 1.0)), 1.0),
        (call(aten.mul.Tensor, normed, WEIGHT), 0.0),
        (call(aten.mul.Tensor, normed, wide), 0.0),
    )
    rounded_after = [(call(aten._to_copy.default, one), offset) for one, offset in products]
    rounded_before = call(aten.mul.Tensor, call(aten._to_copy.default, normed), WEIGHT)
    return [*rounded_after, (rounded_before, 0.0)]


SQUARE = call(aten.add.Tensor, MEAN, EPS)
NORMS = [
    *_norms(call(aten.rsqrt.default, SQUARE)),
    *_norms(call(aten.pow.Tensor_Scalar, SQUARE, -0.5)),
]

SILU = call(aten.mul.Tensor, call(aten.silu.default, X), OTHER)
GELU_OF_X = call(aten.gelu.default, X)
GELU = call(aten.mul.Tensor, GELU_OF_X, OTHER)

COS, SIN, HALF, END = Any_(), Any_(), Any_(), Any_()
SECOND = call(aten.neg.default, call(aten.slice.Tensor, X, 3, HALF, END))
TURNED = call(aten.cat.default, [SECOND, call(aten.slice.Tensor, X, 3, 0, HALF)], -1)
ROTATED, ROTATED_BY_TOKEN = (
    call(
        aten.add.Tensor,
        call(aten.mul.Tensor, X, call(aten.unsqueeze.default, COS, heads)),
        call(aten.mul.Tensor, TURNED, call(aten.unsqueeze.default, SIN, heads)),
    )
    for heads in (1, 2)
)
"""Of [B, heads, tokens, width], and of [B, tokens, heads, width], which is transposed afterwards."""

LAST = Any_()
CHOSEN = (
    call(
        aten.topk.default, call(aten._softmax.default, call(aten._to_copy.default, X), LAST, False)
    ),
    call(aten.topk.default, call(aten._softmax.default, X, LAST, True)),
)
QUOTIENTS = (aten.div.Tensor, aten.div_.Tensor)


def fold(module: fx.GraphModule) -> dict[str, int]:
    """Replace the chains in `module`, in place. Returns how many of each kind."""
    counts: dict[str, int] = {}
    rules: list[tuple[str, Callable[[Any], bool]]] = [
        ("rms_norm", _fold_norm),
        ("gated_activation", _fold_gate),
        ("rotated attention", _fold_rotation),
        ("residual", _fold_residual),
        ("router", _fold_router),
        ("siblings", _fold_siblings),
        ("gated_linear", _fold_gated_linear),
        ("embedding", _fold_embedding),
    ]
    for name, rule in rules:
        for node in list(module.graph.nodes):
            if node.op == "call_function" and rule(node):
                counts[name] = counts.get(name, 0) + 1
        module.graph.eliminate_dead_code()  # the next rule counts readers
    module.recompile()
    return counts


def _is_node(found: Any) -> bool:
    return isinstance(found, fx.Node)


def _value(node: Any) -> Any:
    """The shape and dtype that a node has, as a tensor; None for anything else."""
    return node.meta.get("val") if _is_node(node) else None


def _replace(node: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True once `op` takes the place of `node`, whose result must be contiguous, as those of kernels are: views of it
    read its strides."""
    own = _value(node)
    if isinstance(own, Tensor) and not own.is_contiguous():
        return False
    graph = node.graph
    with graph.inserting_before(node):
        new = graph.call_function(op, args, kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    return True


def _fold_norm(node: Any) -> bool:
    for pattern, offset in NORMS:
        bound = matched(pattern, node, {})
        if bound is None:
            continue
        x, weight, y = _value(bound[X]), _value(bound[WEIGHT]), _value(node)
        fits = weight is not None and weight.ndim == 1 and x.shape == y.shape
        fits = fits and isinstance(bound[EPS], float)
        if fits and x.dtype in HALVES and y.dtype == x.dtype and weight.shape[0] == x.shape[-1]:
            args = (bound[X], bound[WEIGHT])
            return _replace(
                node, lowbit.rms_norm.default, args, {"eps": bound[EPS], "offset": offset}
            )
    return False


def _fold_gate(node: Any) -> bool:
    for pattern, activation in ((SILU, "silu"), (GELU, "gelu_tanh")):
        bound = matched(pattern, node, {})
        if bound is None:
            continue
        if pattern is GELU and bound[GELU_OF_X].kwargs.get("approximate") != "tanh":
            continue
        gate, up = _value(bound[X]), _value(bound[OTHER])
        if (
            up is not None
            and gate.dtype in HALVES
            and (gate.shape, gate.dtype) == (up.shape, up.dtype)
        ):
            args = (bound[X], bound[OTHER])
            return _replace(node, lowbit.gated_activation.default, args, {"activation": activation})
    return False


def _fold_rotation(node: Any) -> bool:
    """Let the attention rotate its query and key."""
    if node.target is not lowbit.decode_attention.default:
        return False
    args = list(node.args) + [None] * (11 - len(node.args))
    if args[7] is not None:
        return False
    by_token = call(aten.transpose.int, ROTATED_BY_TOKEN, 1, 2)
    pattern = next((p for p in (ROTATED, by_token) if matched(p, args[0], {}) is not None), None)
    query, key = (None if pattern is None else matched(pattern, args[n], {}) for n in (0, 1))
    if query is None or key is None:
        return False
    if query[COS] is not key[COS] or query[SIN] is not key[SIN]:
        return False
    x, cos, sin = (_value(query[part]) for part in (X, COS, SIN))
    width = x.shape[-1]
    fits = query[HALF] == key[HALF] == width // 2 and cos.shape[-1] == width
    if not fits or any(t.dtype != x.dtype or not t.is_contiguous() for t in (cos, sin)):
        return False
    args[0], args[1], args[7], args[8] = query[X], key[X], query[COS], query[SIN]
    if pattern is by_token:
        with node.graph.inserting_before(node):
            args[:2] = [node.graph.call_function(aten.transpose.int, (x, 1, 2)) for x in args[:2]]
    node.args = tuple(args)
    return True


def _fold_residual(node: Any) -> bool:
    """Let a low-bit linear add what is added to its output."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    for linear, residual in (node.args, node.args[::-1]):
        at = RESIDUALS.get(linear.target) if _is_node(linear) else None
        if at is None or len(linear.users) > 1 or len(linear.args) <= at:
            continue
        own, other = _value(linear), _value(residual)
        fits = other is not None and (other.shape, other.dtype) == (own.shape, own.dtype)
        if linear.args[at] is None and fits:
            args = (*linear.args[:at], residual, *linear.args[at + 1 :])
            return _replace(node, linear.target, args, dict(linear.kwargs))
    return False


def _fold_router(node: Any) -> bool:
    """Let one kernel choose a token's experts, divide their weights by the sum, and round these."""
    bound = next((b for b in (matched(p, node, {}) for p in CHOSEN) if b is not None), None)
    if bound is None or len(node.args) > 2 or node.kwargs:
        return False
    logits, parts = _value(bound[X]), {user.args[1]: user for user in node.users}
    if logits is None or logits.ndim != 2 or bound[LAST] not in (-1, 1) or 0 not in parts:
        return False
    weights = parts[0]
    total = next((u for u in weights.users if u.target is aten.sum.dim_IntList), None)
    quotient = next((u for u in weights.users if u.target in QUOTIENTS), None)
    is_normalized = (
        total is not None
        and quotient is not None
        and total.args == (weights, [-1], True)
        and quotient.args == (weights, total)
        and (len(weights.users), len(total.users)) == (2, 1)
    )
    dead: list[Any] = [quotient, total] if is_normalized else []
    last: Any = quotient if is_normalized else weights
    rounded: Any = next(iter(last.users), None)
    dtype = torch.float32
    is_rounded = len(last.users) == 1 and rounded.target is aten._to_copy.default
    if is_rounded and rounded.kwargs.keys() == {"dtype"}:
        dead, last, dtype = [rounded, *dead], rounded, rounded.kwargs["dtype"]
    kwargs = {"normalized": is_normalized, "dtype": dtype}
    _replace(node, lowbit.top_experts.default, (bound[X], node.args[1]), kwargs)
    if dead:
        last.replace_all_uses_with(weights)
    for one in dead:
        node.graph.erase_node(one)
    return True


def _fold_embedding(node: Any) -> bool:
    """torch's embedding of a few tokens reads one row after the other: 8 us for 16 rows of 4096, and this 2."""
    if node.target is not aten.embedding.default:
        return False
    weight, ids = node.args[:2]
    return _replace(node, aten.index.Tensor, (weight, [ids]), {})


def _fold_siblings(node: Any) -> bool:
    """Compute linears of the same input by one product, where their weights are slices of joint ones."""
    own = _rows(node)
    holder = holder_of(own["codes"]) if own and node.users else None
    if holder is None:
        return False
    found = []
    for other in node.args[0].users:
        rows = _rows(other) if _differs_in_rows(node, other) else {}
        if list(rows) == list(own) and holder_of(rows["codes"]) is holder:
            found.append((rows["codes"].data_ptr(), other, rows))
    found.sort(key=lambda one: one[0])
    sizes = [_value(other).shape[-1] for _, other, _ in found]
    for (_, _, rows), size in zip(found, sizes, strict=True):
        if any(len(t) != size for t in rows.values()):
            return False
    joint = {name: joint_of([rows[name] for _, _, rows in found]) for name in own}
    if any(t is None for t in joint.values()):
        return False
    return _join(node, [other for _, other, _ in found], sizes, joint)


def _fold_gated_linear(node: Any) -> bool:
    """Let the linear of gate and up, which `_fold_siblings` made, compute the activation as well."""
    if node.target is not lowbit.gated_activation.default or len(node.args) != 2:
        return False
    size, last = _value(node).shape[-1], _value(node).dim() - 1
    if any(part.target is not aten.slice.Tensor or len(part.users) != 1 for part in node.args):
        return False
    product = node.args[0].args[0]
    halves = [(product, last, start, start + size) for start in (0, size)]
    if [part.args for part in node.args] != halves:
        return False
    if product.target is not lowbit.weight_linear.default or len(product.users) != 2:
        return False
    given = dict(zip(LINEARS[product.target], product.args, strict=False)) | product.kwargs
    addends = given.pop("bias", None), given.pop("residual", None)
    if addends != (None, None) or _value(product).shape[-1] != 2 * size:
        return False
    given["activation"] = node.kwargs["activation"]
    return _replace(node, lowbit.gated_linear.default, (), given)


def _rows(node: Any) -> dict[str, Tensor]:
    """The constants among the arguments of a linear that have a row for each output; none where it adds a residual, or
    where they are not all constants."""
    at = RESIDUALS.get(node.target)
    if at is None or len(node.args) <= at or node.args[at] is not None:
        return {}
    given = zip(LINEARS[node.target], node.args, strict=False)
    nodes = {name: arg for name, arg in given if name in ROWS and arg is not None}
    if any(not _is_node(arg) or arg.op != "get_attr" for arg in nodes.values()):
        return {}
    return {name: getattr(node.graph.owning_module, arg.target) for name, arg in nodes.items()}


def _differs_in_rows(node: Any, other: Any) -> bool:
    """True if `other` is the same linear up to `ROWS`, and its readers take a slice of a wider output."""
    if other.target is not node.target or not other.users or len(other.args) != len(node.args):
        return False
    given = zip(LINEARS[node.target], node.args, other.args, strict=False)
    equal = [a is b or (type(a) is int and a == b) for name, a, b in given if name not in ROWS]
    if not all(equal) or other.kwargs != node.kwargs:
        return False
    shape = _value(other).shape
    wide = torch.empty((*shape[:-1], shape[-1] + 1), device="meta")[..., :-1]
    for reader in other.users:
        if reader.target in VIEWS:
            try:
                wide.view(reader.args[1])
            except RuntimeError:
                return False
    return True


def _join(node: Any, siblings: list[Any], sizes: list[int], joint: dict[str, Any]) -> bool:
    """Replace the siblings, of which `node` stands first, by slices of one product."""
    graph, value, total, names = node.graph, _value(node), sum(sizes), LINEARS[node.target]
    args = list(node.args)
    with graph.inserting_before(node):
        for name, t in joint.items():
            attribute = f"_joint_{node.name}_{name}"
            graph.owning_module.register_buffer(attribute, t)
            args[names.index(name)] = graph.get_attr(attribute)
        product = graph.call_function(node.target, tuple(args), dict(node.kwargs))
        product.meta["val"] = value.new_empty((*value.shape[:-1], total))
        start = 0
        for sibling, size in zip(siblings, sizes, strict=True):
            bounds = (value.dim() - 1, start, start + size)
            part = graph.call_function(aten.slice.Tensor, (product, *bounds))
            part.meta["val"] = _value(sibling)
            sibling.replace_all_uses_with(part)
            start += size
    return True

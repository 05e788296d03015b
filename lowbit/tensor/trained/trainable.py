"""`TrainableTensor`, the base of every weight that lowbit trains. Those that keep a high-precision master weight derive
`lowbit.tensor.trained.master_weight.MasterWeightTensor`.

A representation is one subclass in one file. Besides what `LowbitTensor` asks for it gives

- `schemes`: the schemes that it carries out. `lowbit.train.prepare_` finds the class by them;
- `_encode` (to nearest), and `update_`, which takes what an optimizer computed from `master()`;
- `linear`, and other entries of `products`, where the defaults do not fit: they dequantize the weight, multiply in high
  precision, and pass the gradient straight through to the weight;
- `frozen()`: the weight for inference, or `stays`, why there is none.

Every other function (optimizers, norms, initialisers, regularisers) sees the master values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from lowbit.linear.dequantized import dequantized_linear, grouped_in_high_precision
from lowbit.linear.frozen.checks import TRANSFORMS, in_transform
from lowbit.linear.lazy_stack import GROUPED
from lowbit.linear.operands import Values
from lowbit.numerics import class_names
from lowbit.schemes.training import IN_ATTENTION
from lowbit.tensor.core import (
    MATMULS,
    LowbitTensor,
    NoProduct,
    NoView,
    aten,
    count_change,
    count_on_lists,
    in_forward,
    of_swapped,
    writes,
    written,
)
from lowbit.tensor.trained.of_values import changed, is_of_values, is_view, may_set, memory
from lowbit.tracing import tracer

KEEP_OUT = (
    "leave this weight out by filter_fn, call lowbit.dequantize_(model) for a plain model, or .dequantize() for a "
    "plain tensor, from which no gradient reaches it"
)
"""The way out for a weight that is trained: a plain tensor in its place would silently stop learning."""

_ON_LISTS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
"""Prefixes of the operations by which torch's optimizers and weight averages update many weights at once."""


class OtherOperands(NotImplementedError):
    """A product whose second operand is not its only weight."""


class TrainableTensor(LowbitTensor):
    """The base of weights that train. `cls(weight, scheme)` makes one from a plain weight [..., N, K]."""

    meta_attrs: ClassVar[tuple[str, ...]] = ("scheme",)
    caches = (*LowbitTensor.caches, "_known_products", "_alias")
    _known_products: tuple[Any, ...] = ()
    way_out = KEEP_OUT
    schemes: ClassVar[tuple[type[Any], ...]] = ()
    """The classes of schemes, subclasses included, that this class carries out."""
    stays: ClassVar[str] = ""
    """Why `lowbit.train.convert_` leaves such a weight as it is; "" where `frozen` makes one for inference."""
    products: ClassVar[dict[Any, str]] = {
        F.linear: "linear",
        F.embedding: "embedding",
        F.multi_head_attention_forward: "attention",
        **dict.fromkeys(MATMULS, "matmul"),
        **dict.fromkeys((torch.addmm, Tensor.addmm), "addmm"),
        torch._grouped_mm: "grouped_mm",
        GROUPED[1]: "grouped_mm",
    }
    """torch's functions that it replaces, and the name of the classmethod, called with the same arguments, for each."""
    _by_scheme: ClassVar[dict[type, type[TrainableTensor]]] = {}

    scheme: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        schemes = cls.__dict__.get("schemes", ())
        for scheme in schemes:
            holder = TrainableTensor._by_scheme.get(scheme)
            class_names.check_free(holder, cls, f"the scheme {scheme.__name__}")
        super().__init_subclass__(**kwargs)
        TrainableTensor._by_scheme.update(dict.fromkeys(schemes, cls))

    @staticmethod
    def of(scheme: Any) -> type[TrainableTensor]:
        """The class that carries `scheme` out. Raises TypeError where there is none."""
        for kind in type(scheme).__mro__:
            if kind in TrainableTensor._by_scheme:
                return TrainableTensor._by_scheme[kind]
        known = ", ".join(kind.__name__ for kind in TrainableTensor._by_scheme)
        raise TypeError(f"no representation carries out {scheme!r}; schemes that have one: {known}")

    @staticmethod
    def for_schemes(base: type) -> tuple[type[TrainableTensor], ...]:
        """The classes that carry out subclasses of `base`."""
        table = TrainableTensor._by_scheme.items()
        return tuple({kind: None for scheme, kind in table if issubclass(scheme, base)})

    @classmethod
    def prepared(cls, weight: Tensor, scheme: Any, name: str) -> TrainableTensor:
        """The tensor that trains in place of the parameter `name` of a model."""
        return cls(weight, scheme)

    def frozen(self) -> LowbitTensor:
        """The weight for inference with the values that this one has now. Subclasses with `stays` have none."""
        raise self._unsupported("conversion for inference")

    def over(self, values: Tensor) -> Self:
        """One like this from other plain values of this shape, in their dtype. Raises ValueError as making one does."""
        made: Any = torch.empty_like(self, device=values.device if self.is_meta else None)
        return made.copy_(values)

    def _assign_data(self, values: Tensor) -> None:
        """Takes plain values of this shape, dtype and device too, as `torch.nn.utils.prune.remove` assigns them. Warns
        where it rounds them to codes."""
        alike = (values.shape, values.dtype, values.device) == (self.shape, self.dtype, self.device)
        is_turned = self.transposed or self.flat_from is not None
        if isinstance(values, LowbitTensor) or is_turned or not alike:
            super()._assign_data(values)
            return
        if self.updated_in_place() is None:
            warnings.warn(
                f"{type(self).__name__} takes new values by .data, rounded to its own codes: changes below half the "
                "distance of two of them are lost; weight.copy_(values), under no_grad, keeps what an average loses, "
                "and an optimizer rounds as the scheme says",
                stacklevel=1,  # this line, so that all weights together warn once
            )
        with torch.no_grad():
            self._take_over(self.over(values.detach()))

    # ---- values ----------------------------------------------------------------------------------------------

    def master(self) -> Tensor:
        """The values in float32, a new tensor: `update_` takes what an optimizer computes from them."""
        return self._with(dtype=torch.float32).dequantize()

    def values(self) -> Tensor:
        """The operand of high-precision products: plain, without gradient."""
        return self.dequantize()

    def row_counter(self) -> Tensor | None:
        """What autograd keeps beside the inner tensors so that it sees writes to rows. None where rows are copies."""
        return None

    def was_read(self) -> None:
        """Arithmetic outside of products, such as that of an average, reads the values."""

    def operand(self) -> Tensor:
        """The operand of such arithmetic: plain, in this tensor's dtype, without gradient."""
        self.was_read()
        return self.dequantize()

    def values_again(self, dtype: torch.dtype) -> Tensor:
        """`values()` in this dtype, for a backward pass."""
        return self.values().to(dtype)

    def scale_(self, factor: Any) -> bool:
        """Multiply by `factor` in place and without rounding, where the representation can. Returns whether it did."""
        return False

    # ---- sharding --------------------------------------------------------------------------------------------

    def check_placement(self, param: Tensor) -> None:
        """Raise NotImplementedError where `param`, a DTensor over this tensor, cuts through blocks of this one."""

    def was_placed(self, param: Tensor) -> None:
        """`param`, a DTensor over this tensor, is now a module's parameter."""

    def locate(self, param: Tensor, name: str) -> None:
        """Learn which part of the parameter `name` this tensor is. `param`: a DTensor over this tensor, or itself."""

    def sharded_product(self, x: Tensor, param: Tensor) -> Tensor:
        """x [M, K] times this part of the DTensor `param`, transposed."""
        return F.linear(x, self)

    # ---- products --------------------------------------------------------------------------------------------

    @classmethod
    def check_operands(cls, x: Any, weight: Any) -> None:
        """Raise OtherOperands unless `weight` is the low-bit operand, and the only one."""
        if not isinstance(weight, TrainableTensor) or isinstance(x, LowbitTensor):
            first = isinstance(x, TrainableTensor) and x.ndim == 3
            experts = 'experts of transformers by model.set_experts_implementation("grouped_mm"), '
            raise OtherOperands(
                f"a product of a {type(x).__name__} and a {type(weight).__name__}: only the weight, the second, may be "
                f"in low bits; accepted: input @ weight, {experts if first else ''}or {KEEP_OUT}"
            )

    @classmethod
    def linear(cls, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """input [..., K] times weight [N, K] transposed, plus bias [N]."""
        cls.check_operands(input, weight)
        return dequantized_linear(input, weight, bias)

    @classmethod
    def embedding(cls, input: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Tensor:
        return F.embedding(input, Values.apply(weight), *args, **kwargs)

    @classmethod
    def matmul(cls, x: Tensor, weight: Any) -> Tensor:
        """x [..., K] by weight [K, N], or x [E, M, K] by weight [E, K, N]: the linear of the transposed weight, one
        for each expert."""
        cls.check_operands(x, weight)
        cls.check_stacked(x, weight)
        stored_as_linear = weight.transpose(-2, -1)
        if weight.ndim == 2:
            return F.linear(x, stored_as_linear)
        pairs = zip(x.unbind(), stored_as_linear.unbind(), strict=True)
        return torch.stack([cls.product_of_expert(own, expert) for own, expert in pairs])

    @classmethod
    def product_of_expert(cls, x: Tensor, weight: Any) -> Tensor:
        """x [M, K] times one expert [N, K], transposed."""
        return F.linear(x, weight)

    @classmethod
    def check_stacked(cls, x: Tensor, weight: Tensor) -> None:
        """Raise NotImplementedError or ValueError unless x and the weight have shapes that `matmul` takes."""
        if weight.ndim != 2 and not x.ndim == weight.ndim == 3:
            raise NotImplementedError(
                f"a product of {tuple(x.shape)} and {weight!r}; accepted: a weight [K, N], or [E, K, N] with an input "
                "[E, M, K]"
            )
        if x.shape[-1] != weight.shape[-2] or (weight.ndim == 3 and x.shape[0] != weight.shape[0]):
            raise ValueError(
                f"a product of {tuple(x.shape)} and {tuple(weight.shape)}: K or the number of experts differs"
            )

    @classmethod
    def addmm(
        cls, input: Tensor, mat1: Tensor, mat2: Any, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        """`mat1` [M, K] by the weight `mat2` [K, N], plus `input`."""
        cls.check_operands(mat1, mat2)
        if (beta, alpha) != (1, 1):
            raise mat2._unsupported(f"addmm with beta={beta}, alpha={alpha} (accepted: 1, 1)")
        product = cls.matmul(mat1, mat2)
        return product + input.to(product.dtype)

    @classmethod
    def grouped_mm(
        cls,
        x: Tensor,
        weight: Any,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [M, K] by the experts [E, K, N] of `weight`; `offs`, int32 [E]: the end of each expert's rows. Without
        `offs`, x [E, M, K] by the same."""
        cls.check_operands(x, weight)
        if bias is not None:
            raise weight._unsupported("a grouped product with a bias, as torch has none either")
        if offs is None:
            y = cls.matmul(x, weight)
        else:
            cls.check_grouped(x, weight, offs)
            y = cls.product_of_experts(x, weight, offs)
        return y if out_dtype is None else y.to(out_dtype)

    @classmethod
    def check_grouped(cls, x: Tensor, weight: Any, offs: Tensor) -> None:
        """Raise ValueError for shapes, dtypes or devices of a grouped product that do not fit."""
        if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[1]:
            raise ValueError(
                f"a grouped product of {tuple(x.shape)} and {tuple(weight.shape)}; accepted: [M, K] and [E, K, N] with "
                "offs, such as w.transpose(-2, -1) of experts stored as [E, N, K]"
            )
        if offs.dtype is not torch.int32 or tuple(offs.shape) != (weight.shape[0],):
            raise ValueError(
                f"offs of a grouped product must be int32 [{weight.shape[0]}], the end of each expert's rows, got "
                f"{offs.dtype} {tuple(offs.shape)}"
            )
        if not x.device == weight.device == offs.device:
            raise ValueError(
                f"a grouped product of an input on {x.device}, a weight on {weight.device} and offs on {offs.device}; "
                "accepted: all on one device"
            )

    @classmethod
    def product_of_experts(cls, x: Tensor, weight: Any, offs: Tensor) -> Tensor:
        """`grouped_mm` of checked operands: by default in high precision, since torch has no product of codes."""
        n, k = weight.shape[-1], weight.shape[-2]
        tracer.note(x.shape[0], n, k, "grouped products run in high precision", weight)
        return grouped_in_high_precision(cls.rounded_input(x), weight, offs)

    @classmethod
    def rounded_input(cls, x: Tensor) -> Tensor:
        """`x` [..., K] as the low-bit products of this class round it, for one that runs in high precision."""
        return x

    @classmethod
    def attention(cls, *args: Any, **kwargs: Any) -> Any:
        """nn.MultiheadAttention multiplies by its out_proj.weight in C++, where F.linear is not overridden."""
        rows = args[0].shape[:-1].numel()

        def plain(x: Any) -> Any:
            return x.in_attention(rows) if isinstance(x, TrainableTensor) else x

        return F.multi_head_attention_forward(*map(plain, args), **tree_map(plain, kwargs))

    def in_attention(self, rows: int) -> Tensor:
        """The plain differentiable weight that nn.MultiheadAttention multiplies `rows` rows by."""
        n, k = self.shape
        tracer.note(rows, n, k, f"{IN_ATTENTION}, in high precision", self)
        return Values.apply(self).to(self.dtype)

    # ---- torch protocols --------------------------------------------------------------------------------------

    @classmethod
    def computed(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # `out` serves functions with a backward of their own, which would round gradients as inputs are rounded.
        if in_transform() or (kwargs and kwargs.get("out") is not None):
            operands = (x for x in tree_leaves((args, kwargs)) if isinstance(x, TrainableTensor))
            refused = TRANSFORMS if in_transform() else f"{func.__name__} with out="
            raise next(operands)._unsupported(refused)
        try:
            return getattr(cls, cls.products[func])(*args, **kwargs)
        except OtherOperands:
            weights = [x for x in tree_leaves((args, kwargs)) if isinstance(x, LowbitTensor)]
            if len(weights) > 1 and all(isinstance(x, TrainableTensor) for x in weights):
                return func(*tree_map(_read_whole, args), **tree_map(_read_whole, kwargs))
            if func in MATMULS and len(args) == 2 and len(weights) == 1 and args[0].ndim == 2:
                return of_swapped(*args)
            raise

    @classmethod
    def _special(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in (Tensor.numpy, Tensor.__array__, Tensor.tolist):
            return func(_read_whole(args[0]), *args[1:], **kwargs)
        try:
            return super()._special(func, args, kwargs)
        except NoView as error:
            return cls._without_views(func, args, kwargs, error)
        except NoProduct:
            own, named = tree_map(_read_whole, (args, kwargs))
            if any(isinstance(x, LowbitTensor) for x in tree_leaves((own, named))):
                raise  # a frozen weight is among them
            return func(*own, **named)

    @classmethod
    def _without_views(cls, func: Any, args: Any, kwargs: Any, error: NotImplementedError) -> Any:
        """Compute with the values. Raises `error` for a view itself, which would not share memory with the weight, and
        for a write, except to elements that lists or tensors of positions choose, and for a weight that FSDP2 has
        gathered."""
        if func is Tensor.__setitem__ and isinstance(args[0], TrainableTensor) and may_set(*args):
            args[0].write_at(args[1], args[2])
            return None
        given = tree_leaves((args, kwargs))
        if writes(func) or any(getattr(x, "is_gathered", False) for x in given):
            return super()._without_views(func, args, kwargs, error)
        own, named = tree_map(_read_whole, (args, kwargs))
        result = func(*own, **named)
        read = {memory(x) for x in tree_leaves((own, named)) if isinstance(x, Tensor)}
        if any(memory(x) in read for x in tree_leaves(result) if isinstance(x, Tensor)):
            return super()._without_views(func, args, kwargs, error)
        return result

    @classmethod
    def _unimplemented(cls, func: Any, args: Any, kwargs: Any, error: NotImplementedError) -> Any:
        """Compute with the values of the weights, and write to those that the operation changes. Raises `error` for an
        operation that does more than that, and for one that a forward pass calls below autograd, where values of a
        weight that is rounded later would not be rounded."""
        given: list[Any] = [x for x in tree_leaves((args, kwargs)) if isinstance(x, LowbitTensor)]
        targets: list[Any] = [x for x in changed(func, args, kwargs) if isinstance(x, LowbitTensor)]
        train = all(isinstance(x, TrainableTensor) for x in given)
        if train and not targets and is_view(func):
            raise NoView(error)
        rounds = not targets and any(x.rounds_reads for x in given)
        if not (is_of_values(func) and train) or (rounds and in_forward()):
            raise error
        values = {id(x): x.whole(any(x is t for t in targets)) for x in given}

        def whole(x: Any) -> Any:
            return values.get(id(x), x)

        result = func(*tree_map(whole, args), **tree_map(whole, kwargs))
        for target in targets:
            target.write_whole(values[id(target)])
        count_change(targets)
        return targets[0] if targets else result

    def whole(self, changes: bool) -> Tensor:
        """The values for an operation that reads, or `changes`, any of them: plain and without gradient."""
        return self.master() if changes else self.dequantize()

    def write_whole(self, values: Tensor) -> None:
        """Take over what an operation in place made of `whole(True)`, rounded to nearest."""
        self.copy_(values)

    def write_at(self, index: Any, value: Any) -> None:
        """`self[index] = value` by an index of which torch takes a view first."""
        values = self.whole(True)
        values[index] = value
        self.write_whole(values)
        count_change([self])
        torch.autograd.graph.increment_version(self)

    @classmethod
    def on_lists(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A `_foreach_` or `_fused_` operation. Runs one tensor at a time, so that one at a time is dequantized."""
        return _one_at_a_time(func, args, kwargs)

    def meta_to_json(self) -> dict[str, Any]:
        return {"scheme": self.scheme.to_dict()}

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        """Raises ValueError for another scheme than `schemes`."""
        scheme = cls.schemes[0].from_dict(data["scheme"])
        if not isinstance(scheme, cls.schemes):
            raise ValueError(f"{scheme} is not {' or '.join(s.__name__ for s in cls.schemes)}")
        return {"scheme": scheme}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith(_ON_LISTS):
            result = cls.on_lists(func, args, kwargs or {})
            if func._schema.is_mutable:
                count_on_lists(func, args)
            return result
        return super().__torch_dispatch__(func, types, args, kwargs)


# ---- operations of optimizers, initialisers and norms --------------------------------------------------------------

INITIALISE = (
    *(aten.zero_.default, aten.fill_.Scalar, aten.normal_.default, aten.uniform_.default),
    *(aten.clamp_.default, aten.erfinv_.default),
)
UPDATE = (
    *(aten.add_.Tensor, aten.add_.Scalar, aten.sub_.Tensor, aten.mul_.Tensor, aten.mul_.Scalar),
    *(aten.div_.Tensor, aten.div_.Scalar, aten.addcmul_.default, aten.addcdiv_.default),
    *(aten.lerp_.Scalar, aten.lerp_.Tensor),
)
ARITHMETIC = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor),
    *(aten.add.Scalar, aten.sub.Scalar, aten.div.Scalar),
    *(aten.lerp.Scalar, aten.lerp.Tensor),
)
READ = (
    *ARITHMETIC,
    *(aten.pow.Tensor_Scalar, aten.neg.default, aten.abs.default, aten.sgn.default),
    *(aten.eq.Tensor, aten.ne.Tensor, aten.eq.Scalar, aten.ne.Scalar),
    *(aten.isfinite.default, aten.isnan.default, aten.where.self),
    *(aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
    *(aten.sum.default, aten.mean.default, aten.amax.default, aten.std.correction),
    *(aten.sum.dim_IntList, aten.mean.dim, aten.amin.default),
    *(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim),
    *(aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default),
)


def _read_whole(x: Any) -> Any:
    """The values of a weight, plain, with its gradient: of the master outside of a forward pass."""
    return x * 1 if isinstance(x, TrainableTensor) else x


@TrainableTensor.implements(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def _like(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Optimizer states and gradients of a trainable weight are plain tensors.

    Only `empty_like` makes another trainable weight, because `Module.to_empty` calls it to move a model off meta.
    """
    self = args[0]
    options = {"dtype": self.dtype, "device": self.device}
    options |= {name: value for name, value in kwargs.items() if value is not None}
    return func(torch.empty(self.shape, device="meta"), *args[1:], **options)


@TrainableTensor.implements(*INITIALISE)
def _initialise(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Rounds to nearest."""
    self = args[0]
    self.copy_(func(self.master(), *args[1:], **kwargs))
    return self


@TrainableTensor.implements(*UPDATE)
def _update(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Computes in float32, then `update_` rounds."""
    if not (func.__name__.startswith("mul_") and _scales(args[0], args[1])):
        _on_masters(func, args, kwargs)
    return args[0]


@TrainableTensor.implements(*READ)
def _read(func: Any, args: Any, kwargs: Any) -> Any:
    """Norms and checks read the values; averages compute with the operands."""

    def values(x: Any) -> Any:
        if not isinstance(x, TrainableTensor):
            return x
        return x.operand() if func in ARITHMETIC else x.dequantize()

    return func(*tree_map(values, args), **tree_map(values, kwargs))


@TrainableTensor.implements(aten.t_.default)
def _turn(func: Any, args: Any, kwargs: Any) -> Tensor:
    """`nn.init.orthogonal_` turns a new tensor like a weight with more columns than rows."""
    turned = aten.t.default(args[0])
    with torch._C._DisableTorchDispatch():
        func(*args)  # sizes and strides of the wrapper
    for name, value in turned.meta().items():
        setattr(args[0], name, value)
    args[0]._take_over(turned)
    return args[0]


def _scales(target: Any, factor: Any) -> bool:
    """Multiply by a number without rounding, where `target` can. Returns whether it did."""
    return isinstance(target, TrainableTensor) and target.scale_(factor)


def _one_at_a_time(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.__name__.startswith("_foreach_copy_"):
        for target, source in zip(args[0], args[1], strict=True):
            target.copy_(source)
        return None
    count = next(len(a) for a in args if isinstance(a, list | tuple))

    def entry(i: int) -> Callable[[Any], Any]:
        return lambda a: [a[i]] if isinstance(a, list | tuple) and len(a) == count else a

    results = []
    for i in range(count):
        own_args = tuple(map(entry(i), args))
        own_kwargs = {k: entry(i)(v) for k, v in kwargs.items()}
        factor = own_args[1] if len(own_args) > 1 else None
        factor = factor[0] if isinstance(factor, list) else factor
        if not (func.__name__.startswith("_foreach_mul_") and _scales(own_args[0][0], factor)):
            results.append(_on_masters(func, own_args, own_kwargs))
    return None if func._schema.is_mutable else [r[0] for r in results]


def _on_masters(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` on float32 values, and write back those that it changed."""
    work: dict[int, tuple[Any, Tensor]] = {}

    def widened(x: Any) -> Any:
        if isinstance(x, TrainableTensor):
            if not func._schema.is_mutable:
                x.was_read()
            work[id(x)] = (x, x.master())
        elif isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16):
            work[id(x)] = (x, x.float())
        return work[id(x)][1] if id(x) in work else x

    result = func(*tree_map(widened, args), **tree_map(widened, kwargs))
    for tensor in written(func, args):
        if id(tensor) in work:
            target, values = work[id(tensor)]
            if isinstance(target, TrainableTensor):
                target.update_(values)
            else:
                target.copy_(values)
    return result

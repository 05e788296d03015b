"""BitNetTensor: a high-precision weight that its products see ternary, for training BitNet b1.58 (arXiv 2402.17764).

    weight  W ≈ γ · round(W / γ) clamped to -1, 0, 1       γ = mean |W|, over the whole [N, K] matrix
    input   x ≈ s · round(x / s)                           s = max(−min x / 128, max x / 127), over each token
    output  y[m, n] = s[m] · γ · Σ_k x̂[m, k] ŵ[n, k]       an int8 product with exact sums

The paper has s = max |x| / 127; here int8's code more for negative numbers is used, as by all int8 rows of lowbit.

Gradients pass straight through both roundings. The input's gradient is the product with the ternary weight; the
weight's gradient is the product with the rounded input, which backward keeps in one byte an element. Both run in high
precision, or int8 x int8 with `BitNet(grad_input=True, grad_weight=True)`: the ternary weight is exact in either.

γ belongs to the whole weight, however it is sharded. Under FSDP2 the ternary codes travel, 2 bits an element, after
the ranks have reduced γ: for one weight at its gather, or for all in one reduction, if
`lowbit.train.precompute_bitnet_scale(model)` is called after every optimizer step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

from lowbit.linear.frozen.ternary import rounded_tokens
from lowbit.linear.ternary import bitnet_linear
from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.schemes.low_bit_weights import BitNet
from lowbit.tensor.core import (
    ROUNDING_INPUTS,
    Gather,
    InnerShapes,
    LowbitTensor,
    Wire,
    in_forward,
    rounding_inputs,
)
from lowbit.tensor.frozen.ternary import (
    TernaryTensor,
    magnitude,
    pack_ternary,
    scale_of,
    shapes_of_ternary,
    ternarize,
    unpack_ternary,
)
from lowbit.tensor.trained.master_weight import MasterWeightTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class PackedTernary:
    """The codec of a BitNetTensor: its ternary codes, packed at 2 bits, and its scale, which all ranks know before."""

    tensor_attrs: ClassVar[tuple[str, ...]] = ("codes", "scale")

    @staticmethod
    def encode(shard: Any, gather: Gather) -> Wire:
        scale = shard.known_scale()
        if scale is None:
            scale = shard._reduced_scale(gather.mesh, gather.shape)
        codes, _ = shard.ternary(scale)
        tensors = {"codes": pack_ternary(codes), "scale": scale}
        return Wire(shard.gathered, tensors, ("scale",) if shard.ndim == 2 else ())

    def inner_shapes(self: Any, shape: Sequence[int]) -> InnerShapes:
        return shapes_of_ternary(shape)

    def _row_attrs(self: Any) -> tuple[str, ...]:
        return ("codes",) if self.ndim == 2 else ("codes", "scale")

    def decoded_values(self: Any) -> Tensor:
        return unpack_ternary(self.codes, self.shape[-1]) * self.scale

    def ternary(self: Any, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return unpack_ternary(self.codes, self.shape[-1]), self.scale

    def own_scale(self: Any) -> Tensor:
        return self.scale

    def settled(self: Any) -> Tensor:
        return self

    @property
    def has_rows_alone(self: Any) -> bool:
        return self.ndim == 2

    def _transposed(self: Any) -> Any:
        codes = pack_ternary(unpack_ternary(self.codes, self.shape[-1]).mT)
        n, k = self.matrix
        meta, shape = {**self.meta(), "matrix": (k, n)}, (*self.shape[:-2], *self.shape[:-3:-1])
        return self.from_inner({"codes": codes, "scale": self.scale}, meta, shape, self.dtype)


class BitNetTensor(MasterWeightTensor, codec=PackedTernary):
    """A trainable weight [..., N, K] with ternary products. `weight` is the high-precision tensor inside."""

    meta_attrs = ("scheme", "matrix")
    caches = (*MasterWeightTensor.caches, "precomputed", "writes")
    already = (
        "prepared for training already; lowbit.train.convert_(model) makes it ternary for good"
    )

    schemes = (BitNet,)

    scheme: BitNet
    matrix: tuple[int, int]
    """N and K of the whole weight, of which this tensor may be a part."""
    precomputed: tuple[Tensor, tuple[int, int]] | None = None
    """The scale that `precompute_scales` found, and the state of the weight at that time."""
    writes: list[int] | None = None
    """How often this tensor, or one derived from it (which may share its memory, as `param.data` does), was written."""

    @classmethod
    def _meta_of(cls, weight: Tensor) -> dict[str, Any]:
        n, k = weight.shape[-2:]
        return {"matrix": (n, k)}

    def stored_format(self) -> str:
        return "BitNet"

    def frozen(self) -> LowbitTensor:
        """The ternary weight for inference. Its products equal those of this weight to the bit."""
        return TernaryTensor(self.weight).to(self.dtype)  # type: ignore[return-value]

    @property
    def is_whole(self) -> bool:
        return tuple(self.shape[-2:]) == self.matrix

    def _with(self, *args: Any, **kwargs: Any) -> Self:
        made = super()._with(*args, **kwargs)
        if self.writes is None:
            self.writes = [0]
        made.writes = self.writes
        return made

    def remember_scale(self, scale: Tensor) -> None:
        """Have `known_scale` return `scale` until the weight changes."""
        self.precomputed = (scale, self._state())

    def known_scale(self) -> Tensor | None:
        """The precomputed scale, unless the weight has changed since."""
        if self.precomputed is None or self.precomputed[1] != self._state():
            return None
        return self.precomputed[0]

    def _state(self) -> tuple[int, int]:
        """Changes with every write: kernels increase the version of `weight`, operations on this tensor `writes`."""
        return self.weight._version, 0 if self.writes is None else self.writes[0]

    def ternary(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """int8 codes [..., N, K] and scale [..., 1, 1].

        Raises NotImplementedError for a part without `scale`, that of the whole weight.
        """
        if scale is None:
            scale = self.own_scale()
        return ternarize(self.weight.detach(), scale), scale

    def own_scale(self) -> Tensor:
        if not self.is_whole:
            raise self._unsupported(
                f"products: it is a part of a weight {self.matrix}, whose scale is the mean magnitude of the whole "
                "(call lowbit.train.precompute_bitnet_scale(model) after sharding and after every optimizer step)"
            )
        return scale_of(magnitude(self.weight.detach()), self.weight.shape[-2:].numel())

    def _stored_values(self) -> Tensor:
        """The ternary values that products see."""
        codes, scale = self.ternary()
        return (codes * scale).to(self.dtype)

    def values(self) -> Tensor:
        return self.dequantize()

    def settled(self) -> Tensor:
        return rounding_inputs(self, self.read().to(self.dtype))

    def factor(self) -> Tensor:
        return self

    @property
    def has_rows_alone(self) -> bool:
        """Outside of a forward pass, where parts are shards: their products ask for the scale of the whole."""
        return not in_forward()

    def _transposed(self) -> Any:
        n, k = self.matrix
        weight = self.weight.mT
        return BitNetTensor.from_inner(
            {"weight": weight}, {**self.meta(), "matrix": (k, n)}, weight.shape, self.dtype
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:  # such an operation does not count the version of `weight`
            for written in args[0] if isinstance(args[0], list | tuple) else args[:1]:
                if isinstance(written, BitNetTensor):
                    written.writes = written.writes or [0]
                    written.writes[0] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    # ---- FSDP2 -----------------------------------------------------------------------------------------------

    def _reduced_scale(self, mesh: Any, outer_size: torch.Size) -> Tensor:
        total = magnitude(self.weight.detach())
        if tuple(outer_size[-2:]) != self.matrix:  # split by tensor parallelism as well
            return self._with(shape=outer_size).own_scale()  # raises, with the way out
        if self.ndim == 2:
            dist.all_reduce(total, group=mesh.get_group())
        return scale_of(total, outer_size[-2:].numel())

    # ---- LowbitTensor's methods ------------------------------------------------------------------------------

    def _is_stored_like(self, other: Tensor) -> bool:
        """Compares the schemes. The two may be parts of weights of different shapes."""
        if not isinstance(other, BitNetTensor) or type(self) is not type(other):
            return False
        return self.scheme == other.scheme

    def _cat(self, tensors: Sequence[Self], dim: int) -> Self:
        joined = super()._cat(tensors, dim)
        if all(t.is_whole for t in tensors):
            n, k = joined.shape[-2:]
            joined.matrix = (n, k)
        return joined

    def meta_to_json(self) -> dict[str, Any]:
        return {"scheme": self.scheme.to_dict(), "matrix": list(self.matrix)}

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        n, k = map(int, data["matrix"])
        return {**super().meta_from_json(data), "matrix": (n, k)}

    # ---- products --------------------------------------------------------------------------------------------

    @classmethod
    def linear(cls, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        cls.check_operands(input, weight)
        return bitnet_linear(input, weight, bias)

    @classmethod
    def embedding(cls, input: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Tensor:
        raise weight._without_product("as an embedding")

    def in_attention(self, rows: int) -> Tensor:
        raise self._without_product("in nn.MultiheadAttention")

    def _without_product(self, where: str) -> NotImplementedError:
        return NotImplementedError(
            f"{self!r} {where}, where BitNet b1.58 has no ternary product: leave that module, and what is tied to it, "
            "out by filter_fn or a pattern, e.g. {'lm_head': None, '*': BitNet()}"
        )

    @classmethod
    def rounded_input(cls, x: Tensor) -> Tensor:
        return rounded_tokens(x)

    def sharded_product(self, x: Tensor, param: Any) -> Tensor:
        return bitnet_linear(x, self, None, self._scale_across(param))

    def _scale_across(self, param: DTensor) -> Tensor | None:
        """The scale of the whole weight `param`; None where this tensor has it."""
        dims = split_dims(param)
        if self.is_gathered or not dims:
            return None
        known = None if torch.compiler.is_compiling() else self.known_scale()
        if known is not None:
            return known
        total = magnitude(self.weight.detach())
        for dim in dims:
            total = all_reduce(total, "sum", (param.device_mesh, dim))
        n, k = self.matrix
        return scale_of(total, n * k)


@BitNetTensor.implements(ROUNDING_INPUTS)
def _rounding_inputs(func: Any, args: Any, kwargs: Any) -> Tensor:
    weight = args[0]
    codes, scale = weight.ternary()
    tensors = {"codes": pack_ternary(codes), "scale": scale}
    return BitNetTensor.gathered.from_inner(tensors, weight.meta(), weight.shape, weight.dtype)


# ---- the scales of sharded weights -------------------------------------------------------------------------------


def split_dims(param: Any) -> tuple[int, ...]:
    """Dimensions of the mesh along which the [N, K] matrices of a DTensor are split."""
    inner = (param.ndim - 2, param.ndim - 1)
    # FSDP2's shards of tensor parallel ones are not `Shard` to torch, but have a dimension too
    split = (getattr(placed, "dim", None) for placed in param.placements)
    return tuple(mesh_dim for mesh_dim, dim in enumerate(split) if dim in inner)


def precompute_scales(params: Iterable[Tensor]) -> None:
    """Find the scales of all sharded BitNet weights of `params` in one reduction for each mesh."""
    found: defaultdict[Any, list[Any]] = defaultdict(list)
    for param in params:
        own = held_locally(param)
        is_shard = isinstance(own, BitNetTensor) and not own.is_gathered
        if is_dtensor(param) and is_shard:
            found[param.device_mesh, split_dims(param)].append(own)
    for (mesh, dims), members in found.items():
        own_sums = [magnitude(own.weight) for own in members]
        sums = torch.cat([s.view(-1) for s in own_sums]).to(mesh.device_type)
        for dim in dims:
            dist.all_reduce(sums, group=mesh.get_group(dim))
        parts = sums.to(own_sums[0].device).split([s.numel() for s in own_sums])
        for own, total, like in zip(members, parts, own_sums, strict=True):
            n, k = own.matrix
            own.remember_scale(scale_of(total.view(like.shape), n * k))

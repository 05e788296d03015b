"""Layers whose outputs have the same bits on every device, for any batch, padding and split of their work.

    linear        int8 by int8, of a frozen weight or one in QAT: exact int32 sums, then in float32
                  (sum · token scale) · row scale + bias, rounded once to the input's dtype
    norm, activation, rotary angles, attention      the ops of `lowbit_kernels.invariant`

A linear has straight-through gradients. The backward pass of every other layer computes the plain formula again, in
PyTorch's operations, and differentiates it. Gradients have no fixed order.

A linear whose weight tensor parallelism has split by columns of the input (`Shard(1)`) shares each token's extremes and
its int32 sums with the other ranks. So its output is that of the whole weight, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit.layers.stand_in import StandIn
from lowbit.linear.coded_linear import coded_linear, described
from lowbit.linear.frozen.checks import (
    autocast_inputs,
    check_linear,
    refuse_transforms,
    unflattened,
)
from lowbit.linear.frozen.codes_product import CodesProduct, codes_format
from lowbit.linear.frozen.row import Row
from lowbit.linear.operands import RoundedLinear
from lowbit.numerics.sharded import is_dtensor
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.quantizers import NO_SCALES

# ---- linears ---------------------------------------------------------------------------------------------------------


class InvariantProduct(CodesProduct):
    """A product of codes whose operations have the order that the module's docstring gives."""

    def multiply(
        self,
        codes: Tensor,
        scale: Tensor,
        weight_codes: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        if bias is None:
            return super().multiply(codes, scale, weight_codes, weight_scale, None, dtype)
        # A kernel may fuse the product with the scale and the sum with the bias, which would round once.
        y = super().multiply(codes, scale, weight_codes, weight_scale, None, torch.float32)
        return (y + bias.float()).to(dtype)


PRODUCT = InvariantProduct(by_kernel=True, quantizes=True)


def _frozen_product(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    return kernels.invariant_linear.invariant_linear(x, weight.codes, weight.scale, bias)


ROW = Row("invariant_linear", lambda x, weight, bias: True, _frozen_product)


class Linear(StandIn):
    """nn.Linear with an int8 weight, frozen or in QAT."""

    def forward(self: Any, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if is_dtensor(weight):
            return _sharded(input, weight, bias)
        if not isinstance(weight, FakeQuantizedTensor):
            return _frozen_linear(input, weight, bias)
        if weight.off is not None:
            raise NotImplementedError(
                f"an invariant linear whose rounding is off ({weight.off!r}); switch it on with lowbit.qat.enable_"
            )
        refuse_transforms(weight)
        asks = weight.quantizer.has_scales_beside
        scales = weight.quantizer.scales_in(self) if asks else NO_SCALES
        with torch._C.DisableTorchFunctionSubclass():
            input, bias = autocast_inputs(input, weight, bias)
        return coded_linear(input, weight, weight.coded_by(*scales), bias, PRODUCT)


def _frozen_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """x [..., K] times a frozen int8 weight [N, K] transposed, plus bias [N]: [..., N] in x's dtype."""
    with torch._C.DisableTorchFunctionSubclass():
        check_linear(x, weight, bias)
        x, bias = autocast_inputs(x, weight, bias)
        needs = x.requires_grad or (bias is not None and bias.requires_grad)
        if needs and torch.is_grad_enabled():
            y: Tensor = RoundedLinear.apply(x, weight, bias, ROW)
            return y
        return _frozen_product(x, weight, bias)


def _sharded(input: Any, weight: Any, bias: Any) -> Any:
    """The product of a frozen weight that one dimension of a mesh splits: replicated, or as `ColwiseParallel` and
    `RowwiseParallel` split it. The output is a DTensor, Shard(-1) or Replicate()."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    (placement,), mesh = weight.placements, weight.device_mesh
    local = weight.to_local()
    grad = torch.is_grad_enabled() and (
        input.requires_grad or isinstance(local, FakeQuantizedTensor)
    )
    if isinstance(local, FakeQuantizedTensor) or grad:
        raise NotImplementedError(
            "an invariant linear under tensor parallelism has no gradients; call it in torch.no_grad() with a weight "
            "that lowbit.qat.convert_ or lowbit.quantize_ has made"
        )
    last = input.ndim - 1
    splits_terms = placement == Shard(1)
    if not is_dtensor(input):
        input = DTensor.from_local(input, mesh, [Replicate()], run_check=False)
    x = input.redistribute(mesh, [Shard(last) if splits_terms else Replicate()]).to_local()
    if is_dtensor(bias):
        bias = bias.redistribute(mesh, [Replicate() if splits_terms else placement]).to_local()
    group = mesh.get_group()
    y = _row_parallel(x, local, bias, group) if splits_terms else _frozen_linear(x, local, bias)
    gives: Any = Shard(last) if placement == Shard(0) else Replicate()
    return DTensor.from_local(
        y,
        mesh,
        [gives],
        run_check=False,
        shape=torch.Size((*input.shape[:-1], weight.shape[0])),
        stride=torch.empty((*input.shape[:-1], weight.shape[0]), device="meta").stride(),
    )


def _row_parallel(x: Tensor, weight: Any, bias: Tensor | None, group: Any) -> Tensor:
    """The whole product, of this rank's columns of x and the weight."""
    import torch.distributed as dist

    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    ends = torch.stack([-rows.amin(1), rows.amax(1)], 1).float()
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    # a row of both extremes has the scale of the whole token
    _, scale = PRODUCT.codes_of(ends * ends.new_tensor([-1.0, 1.0]), weight.activation)
    codes, _, _ = weight.activation.quantize(rows, qparams=(scale, None))
    sums = _int32_sums(codes, weight.codes)
    dist.all_reduce(sums, group=group)
    y = kernels.invariant_linear.scaled(sums, scale, weight.scale, bias, x.dtype)
    return unflattened(y, x)


def _int32_sums(codes: Tensor, weight: Tensor) -> Tensor:
    """int32 [M, N]. torch._int_mm takes more than 16 rows and multiples of 8 on a GPU."""
    (m, k), n = codes.shape, weight.shape[0]
    if codes.is_cuda:
        codes = F.pad(codes, (0, -k % 8, 0, max(17 - m, 0)))
        weight = F.pad(weight, (0, -k % 8, 0, -n % 8))
    return kernels.scaled_mm.int8_sums(codes, weight)[:m, :n].contiguous()


# ---- the other layers ------------------------------------------------------------------------------------------------


class _PlainGradients(torch.autograd.Function):
    """exact(*tensors) with the gradients of plain(*tensors), which the backward pass computes."""

    @staticmethod
    def forward(
        ctx: Any, exact: Callable[..., Tensor], plain: Callable[..., Tensor], *tensors: Tensor
    ) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*tensors)
        return exact(*tensors).detach()  # not a view, as in `RoundedLinear`

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        tensors: list[Any] = [
            t.detach().requires_grad_(need)
            for t, need in zip(ctx.saved_tensors, needs, strict=True)
        ]
        with torch.enable_grad():
            y = ctx.plain(*tensors)
        wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, grads[0]))
        return None, None, *[next(found) if need else None for need in needs]


def differentiable(
    exact: Callable[..., Tensor], plain: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """exact(*tensors), differentiable where a tensor asks for it."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        y: Tensor = _PlainGradients.apply(exact, plain, *tensors)
        return y
    return exact(*(t.detach() for t in tensors))


class NormForm(NamedTuple):
    """The formula of an RMS norm: x / sqrt(mean(x²) + eps) · (weight + offset)."""

    eps: float
    offset: float


def norm_form(module: nn.Module) -> NormForm | None:
    """The formula of a module that computes an RMS norm of its last dimension; None for any other module.

    The module has one parameter, `weight` [D], and a small float under the name `eps`, `variance_epsilon` or
    `norm_eps`. The formula is then tried on random rows.
    """
    own = dict(module.named_parameters())
    weight = own.get("weight")
    if len(own) != 1 or weight is None or weight.ndim != 1 or len(list(module.children())):
        return None
    names = ("eps", "variance_epsilon", "norm_eps")
    given: Any = next((vars(module)[n] for n in names if n in vars(module)), 0)
    if isinstance(module, nn.RMSNorm) and given is None:
        given = torch.finfo(weight.dtype).eps
    if not isinstance(given, float) or is_dtensor(weight):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, len(weight)), generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        try:
            got = module(x)
        except Exception:  # of a module that takes another input
            return None
        if not isinstance(got, Tensor) or got.shape != x.shape:
            return None
        for offset in (0.0, 1.0):
            wide = x.double()
            y = wide / (wide.square().mean(-1, keepdim=True) + given).sqrt()
            y = y * (weight.double() + offset)
            if (got.double() - y).norm() <= 0.02 * y.norm():
                return NormForm(given, offset)
    return None


class Norm(StandIn):
    """An RMS norm; `invariant_form` has its formula."""

    invariant_form: NormForm

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        eps, offset = self.invariant_form

        def exact(x: Tensor, weight: Tensor) -> Tensor:
            return kernels.invariant_norm.invariant_norm(x, weight, eps=eps, offset=offset)

        def plain(x: Tensor, weight: Tensor) -> Tensor:
            wide = x.float()
            factor = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
            return (wide * factor * (weight.float() + offset)).to(x.dtype)

        return differentiable(exact, plain, hidden_states, self.weight)


ACTIVATIONS: dict[str, str] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
"""The kind of `invariant_activation` for each class, of torch or transformers."""


def activation_kind(module: nn.Module) -> str | None:
    """The `kind` of `invariant_activation` that computes this module; None for any other module."""
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else None
    return ACTIVATIONS.get(type(module).__name__)


class Activation(StandIn):
    """silu or the tanh form of gelu; `invariant_kind` says which."""

    invariant_kind: str

    def forward(self: Any, input: Tensor) -> Tensor:
        kind = self.invariant_kind

        def exact(x: Tensor) -> Tensor:
            return kernels.invariant_activation.invariant_activation(x, kind=kind)

        def plain(x: Tensor) -> Tensor:
            return F.silu(x) if kind == "silu" else F.gelu(x, approximate="tanh")

        return differentiable(exact, plain, input)


def has_rotary_form(module: nn.Module) -> bool:
    """True if a module has `inv_freq` and `attention_scaling`, and gives the cosines and sines of `Rotary`."""
    own = vars(module)
    inv_freq = dict(module.named_buffers(recurse=False)).get("inv_freq")
    kind = str(own.get("rope_type", "default"))
    if inv_freq is None or "attention_scaling" not in own or kind in ("dynamic", "longrope"):
        return False  # these two scale by the longest sequence of a batch
    x = torch.zeros((1, 3, 8), device=inv_freq.device)
    positions = torch.tensor([[0, 1, 9]], device=inv_freq.device)
    with torch.no_grad():
        try:
            got = module(x, positions)
        except Exception:  # of a module that takes another input
            return False
        pairs = zip(got, Rotary.forward(module, x, positions), strict=True)
        return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-4) for a, b in pairs)


class Rotary(StandIn):
    """The rotary angles of transformers' models: `inv_freq` [H] and `attention_scaling`."""

    @torch.no_grad()
    def forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.invariant_rotary.invariant_rotary(
            position_ids.long(),
            self.inv_freq.float(),
            scale=float(self.attention_scaling),
            out_dtype=x.dtype,
        )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` with the same bits on every device, for any batch, padding and chunks.

        y = lowbit.inference.invariant_attention(q, k, v, is_causal=True)

    Queries, keys and values are rounded to int8 with a scale a token and head. A token's output depends only on its
    query and on the keys and values that the mask shows it, in any order.

    Args:
        query: float [B, H, T, D].
        key: float [B, K, S, D]; K divides H, and head h reads key head h // (H / K).
        value: float [B, K, S, E].
        mask: bool [1 or B, 1 or H, T, S], True where a query sees a key; None: all.
        is_causal: query t sees key s only where s <= t + S - T, so the last query sees the last key.
        scale: of the scores; None: 1 / sqrt(D).

    Returns:
        [B, H, T, E] in the query's dtype; 0 where a query sees nothing.

    Raises TypeError and ValueError as `lowbit_kernels.invariant.invariant_attention`.
    """
    own = query.shape[-1] ** -0.5 if scale is None else scale

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernels.invariant_attention.invariant_attention(
            q, k, v, mask, scale=own, causal=is_causal
        )

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sees = mask
        if is_causal:
            tokens, keys = q.shape[2], k.shape[2]
            sees = torch.ones((tokens, keys), dtype=torch.bool, device=q.device)
            sees = sees.tril(keys - tokens)
            sees = sees if mask is None else sees & mask
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, sees, scale=own).transpose(1, 2)

    return differentiable(exact, plain, query, key, value).transpose(1, 2)


attention_setters: list[Callable[[nn.Module], None]] = []
"""Functions that give the attention of a framework's models the form above."""
STAND_INS = (Linear, Norm, Activation, Rotary)


def why_no_linear(weight: Any) -> str | None:
    """Why a linear with this weight is not invariant; None if it is."""
    own: Any = weight.to_local() if is_dtensor(weight) else weight
    spec: Any = None
    activation: Any = None
    if isinstance(own, FakeQuantizedTensor):
        spec, activation = own.scheme.weight, own.scheme.activation
    elif getattr(own, "stored_as", None) == "integers":
        spec, activation = own.spec, own.activation
    if spec is None or activation is None:
        return "its weight is not in int8 with int8 inputs"
    is_int8 = codes_format(described(own.shape, Scheme(spec, activation))) == "int8"
    is_usual = activation.mapping == "symmetric_no_clipping_err" and not activation.static
    if not (is_int8 and is_usual):
        return f"its scheme is {spec} with inputs {activation}"
    if own.shape[-1] > kernels.dynamic_linear.MOST_K:
        return (
            f"int32 sums hold {kernels.dynamic_linear.MOST_K} products, and it has {own.shape[-1]}"
        )
    return None

"""Reduce-scatter of gradients in 8 bits, and gathers of QAT weights in their own bits, under FSDP2.

    g = [g_0 … g_W-1]      a rank's gradient of all parameters of a unit, cut into a part for each of W ranks
    q_d, s_d = round(g_d)  int8 codes, up or down at random so that E[q s] = g, and a float32 scale of each 256 of them
    all-to-all             rank d receives q_d, s_d of every rank
    out_d = Σ_r s_d q_d    in float32, in the order of ranks

Every gradient is rounded once, by the rank that computed it, and no partial sum is rounded (arXiv 2410.15526). The
error of an element is at most the sum of its W scales, a scale being the block's largest magnitude / 127. Its mean is
zero, and errors of ranks are independent.

The random bits are a function of the seed, the name of the module, the rank and the gradient itself
(`lowbit_kernels.runtime.seeds`). So a checkpoint needs no counter, and equal gradients on equal ranks give equal bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit.convert import check_module
from lowbit.numerics.sharded import held_locally, is_fsdp_module
from lowbit.schemes.training import check_seed
from lowbit.tensor.core.regather import forget_gathered, reshard
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.quantizers import PresentScales
from lowbit_kernels.runtime.seeds import seed_of

BLOCK = 256
"""Elements of a gradient that share a scale."""


@torch.no_grad()
def compress_collectives_(
    model: nn.Module, *, gradients: bool = True, weights: bool = True, seed: int = 0
) -> None:
    """Let the FSDP2 modules of `model` communicate in fewer bits, from the next step on. Every rank makes this call
    after the last `fully_shard`.

        fully_shard(model)
        train.compress_collectives_(model)

    Args:
        model: sharded by `fully_shard`, also over a mesh of two dimensions (HSDP), whose all-reduce between replicas
            stays in torch's dtype.
        gradients: reduce-scatter gradients as int8 codes with stochastic rounding and a float32 sum, 1.016 bytes an
            element for torch's 4 (or 2 with `reduce_dtype=torch.bfloat16`). A block of 256 elements with a NaN or an
            infinity becomes NaN.
        weights: gather float32 weights that QAT rounds by present scales to 6 bits or fewer, MXFP4 and NF4 included, as
            packed codes instead of a byte an element: 4.27 bits for 4 bits, beside the scales. Products and gradients
            stay the same to the bit. Packing takes time on each gather. Other weights travel as before.
        seed: of the stochastic rounding, 0 to 2**31 - 1.

    Raises:
        TypeError: `model` is not a module, or `seed` not an int.
        ValueError: `seed` is out of range, both options are False, no module is sharded by `fully_shard`, or a
            parameter is in none that is, as before the last `fully_shard`.
    """
    check_module(model)
    seed = check_seed(seed)
    if not (gradients or weights):
        raise ValueError("gradients=False, weights=False: nothing to compress; set one of them")
    sharded = {name: module for name, module in model.named_modules() if is_fsdp_module(module)}
    if not sharded:
        raise ValueError(
            f"{type(model).__name__} has no module under FSDP2; call torch.distributed.fsdp.fully_shard first"
        )
    loose = [
        name
        for name, _ in model.named_parameters()
        if not any(not unit or name.startswith(f"{unit}.") for unit in sharded)
    ]
    if loose:
        raise ValueError(
            f"{type(model).__name__} has modules under FSDP2, but {loose[0]} is in none of them "
            f"({len(loose)} parameters); call this after the last fully_shard, or for each sharded module alone"
        )
    if gradients:
        for name, module in sharded.items():
            module.set_custom_reduce_scatter(Int8ReduceScatter(seed, name))  # type: ignore[arg-type]
    if weights:
        _pack_gathers(model)


def _pack_gathers(model: nn.Module) -> None:
    """Have the weights of QAT with present scales gathered as packed codes."""
    reshard(model)
    packed = set()
    for param in model.parameters():
        weight = held_locally(param)
        if isinstance(weight, FakeQuantizedTensor) and isinstance(weight.quantizer, PresentScales):
            weight.quantizer = replace(weight.quantizer, packs=True)
            packed.add(id(weight))
    forget_gathered(model, packed)


@dataclass(frozen=True)
class Int8ReduceScatter:
    """The formula of the module, as torch's `FSDPModule.set_custom_reduce_scatter` takes it.

    Args:
        seed: of the rounding.
        name: of the module, by which modules of equal gradients draw different numbers.
    """

    seed: int
    name: str

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write the reduced part of this rank.

        Args:
            output_tensor: [n], of a floating dtype, to which the float32 sum is rounded at the end.
            input_tensor: [W · n], n elements for each rank of `group`.
            group: W ranks.
            op: SUM, AVG, or a PREMUL_SUM of NCCL.
            async_op: False.

        Raises NotImplementedError for another op, and for `async_op`.
        """
        factor = _factor(op, group.size())
        if async_op:
            raise NotImplementedError("async_op=True; accepted: False, as FSDP2 calls it")
        parts = input_tensor.view(group.size(), -1)
        if not parts.numel():
            return
        sent = self._encoded(parts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        output_tensor.copy_((_summed(received) * factor)[: output_tensor.numel()])

    def _encoded(self, parts: Tensor) -> Tensor:
        """uint8 [W, B · 260] for parts [W, n]: the codes of B blocks, then their scales."""
        ranks = len(parts)
        padding = -parts.shape[1] % BLOCK
        if padding:  # F.pad by 0 would copy
            parts = F.pad(parts, (0, padding))
        blocks = parts.view(-1, BLOCK)
        if blocks.dtype is torch.float64:
            blocks = blocks.float()
        salt = zlib.crc32(f"{self.seed} {dist.get_rank()} {self.name}".encode())
        codes, scale, _, _ = kernels.quantize_rowcol.quantize_rowcol(
            blocks, "int8", columns=False, seed=seed_of(blocks, salt)
        )
        return torch.cat([t.view(torch.uint8).view(ranks, -1) for t in (codes, scale)], dim=1)


def _summed(received: Tensor) -> Tensor:
    """float32 [B · 256]: the sum over ranks of uint8 [W, B · 260], as `Int8ReduceScatter._encoded` made them."""
    count = received.shape[1] // (BLOCK + 4)
    total = received.new_zeros((count, BLOCK), dtype=torch.float32)
    for row in received:
        codes, scale = row.split([count * BLOCK, count * 4])
        scale = scale.clone().view(torch.float32)  # a view needs an address divisible by 4
        total.addcmul_(codes.view(torch.int8).view(count, BLOCK).float(), scale.view(count, 1))
    return total.view(-1)


def _factor(op: Any, ranks: int) -> Any:
    """The number, or the tensor of one element, by which `op` multiplies the sum. NotImplementedError for other ops."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    state = op.__getstate__()  # (kind, factor) of a PREMUL_SUM
    if isinstance(state, tuple) and state[0] == dist.ReduceOp.PREMUL_SUM:
        return state[1]
    raise NotImplementedError(f"a reduction by {op}; accepted: SUM, AVG, PREMUL_SUM")

"""int4 linears in torch's own kernel, known as tinygemm, for comparison."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit import AffineTensor, Int, PerGroup, Spec

INNER_K_TILES = 8


class TinygemmLinear(nn.Module):
    """`nn.Linear` without a bias over unsigned int4 codes with a floating-point zero point, in the kernel's own layout.

    The kernel multiplies in bfloat16; other activations are cast to it and back.
    """

    codes: Tensor
    scale_and_zero: Tensor

    def __init__(self, weight: Tensor, group_size: int) -> None:
        super().__init__()
        spec = Spec(Int(4, signed=False), PerGroup(group_size), "float_zero_point")
        quantized = AffineTensor.from_float(weight.detach().bfloat16(), spec)
        self.out_features, self.group_size = weight.shape[0], group_size
        packed = quantized.codes  # even columns in the low nibble
        if packed.is_cuda:
            swapped = (packed << 4) | (packed >> 4)
            codes = torch.ops.aten._convert_weight_to_int4pack(swapped, INNER_K_TILES)
        else:
            nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).int()
            codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
        assert quantized.zero_point is not None
        pairs = torch.stack([quantized.scale, quantized.zero_point], dim=-1)
        self.register_buffer("codes", codes)
        self.register_buffer("scale_and_zero", pairs.transpose(0, 1).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        aten = torch.ops.aten
        multiply = aten._weight_int4pack_mm if x.is_cuda else aten._weight_int4pack_mm_for_cpu
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        y = multiply(rows, self.codes, self.group_size, self.scale_and_zero)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


def use_tinygemm_(blocks: nn.Module, group_size: int) -> None:
    """Replace every `nn.Linear` in `blocks`, one by one."""
    for parent in list(blocks.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, TinygemmLinear(child.weight, group_size))

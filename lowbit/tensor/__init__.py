"""The tensor subclasses."""

import torch as _torch

from lowbit.granularity import PerBlock, PerGroup, PerRow, PerTensor, PerToken
from lowbit.scheme import Float8, Int, Scheme, Spec
from lowbit.tensor import affine_arithmetic as affine_arithmetic
from lowbit.tensor import affine_ops as affine_ops
from lowbit.tensor import base_ops as base_ops
from lowbit.tensor import int8_weight_ops as int8_weight_ops
from lowbit.tensor import train_products as train_products
from lowbit.tensor.affine_tensor import AffineTensor
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.bitnet import BitNetTensor
from lowbit.tensor.codebook_tensor import CodebookTensor
from lowbit.tensor.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.float8_tensor import Float8Tensor
from lowbit.tensor.int8_weight import Columns, Int8WeightTensor
from lowbit.tensor.mixed_precision import MixedPrecisionTensor
from lowbit.tensor.state_dict import joined
from lowbit.tensor.ternary import TernaryTensor
from lowbit.train_scheme import BitNet, Float8MixedPrecision, Int8MixedPrecision, Int8Weight

# what torch.load(weights_only=True) may meet inside them
_torch.serialization.add_safe_globals(
    [
        *(Int, Float8, Spec, Scheme, PerTensor, PerRow, PerToken, PerGroup, PerBlock),
        *(Int8MixedPrecision, Float8MixedPrecision, Int8Weight, BitNet, Columns),
    ]
)

__all__ = [
    "AffineTensor",
    "BitNetTensor",
    "CodebookTensor",
    "FakeQuantizedTensor",
    "Float8Tensor",
    "Int8WeightTensor",
    "LowbitTensor",
    "MixedPrecisionTensor",
    "TernaryTensor",
    "joined",
]

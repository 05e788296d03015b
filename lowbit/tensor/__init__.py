"""The tensor subclasses."""

from lowbit.tensor import base_ops as base_ops  # the aten operations of every class below
from lowbit.tensor import collectives as collectives
from lowbit.tensor import ordered_tensor as ordered_tensor  # a kind that files name
from lowbit.tensor.affine_tensor import AffineTensor
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.bitnet import BitNetTensor
from lowbit.tensor.block_mixed_precision import BlockMixedPrecisionTensor
from lowbit.tensor.codebook_tensor import CodebookTensor
from lowbit.tensor.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.float8_tensor import Float8Tensor
from lowbit.tensor.int8_weight import Int8WeightTensor
from lowbit.tensor.mixed_precision import MixedPrecisionTensor
from lowbit.tensor.state_dict import joined
from lowbit.tensor.table_tensor import TableTensor
from lowbit.tensor.ternary import TernaryTensor

__all__ = [
    "AffineTensor",
    "BitNetTensor",
    "BlockMixedPrecisionTensor",
    "CodebookTensor",
    "FakeQuantizedTensor",
    "Float8Tensor",
    "Int8WeightTensor",
    "LowbitTensor",
    "MixedPrecisionTensor",
    "TableTensor",
    "TernaryTensor",
    "joined",
]

"""The tensor subclasses."""

from lowbit.tensor.core import base_ops as base_ops  # the aten operations of every class below
from lowbit.tensor.core import collectives as collectives
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.state_dict import joined
from lowbit.tensor.frozen import affine_ops as affine_ops  # those of AffineTensor
from lowbit.tensor.frozen import ordered_tensor as ordered_tensor  # kinds that files name
from lowbit.tensor.frozen import rotated_tensor as rotated_tensor
from lowbit.tensor.frozen import sparse24_tensor as sparse24_tensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.codebook_tensor import CodebookTensor
from lowbit.tensor.frozen.float8_tensor import Float8Tensor
from lowbit.tensor.frozen.table_tensor import TableTensor
from lowbit.tensor.frozen.ternary import TernaryTensor
from lowbit.tensor.trained.bitnet import BitNetTensor
from lowbit.tensor.trained.block_mixed_precision import BlockMixedPrecisionTensor
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.int4_weight import Int4WeightTensor
from lowbit.tensor.trained.int8_weight import Int8WeightTensor
from lowbit.tensor.trained.microscaled import MicroscaledTensor
from lowbit.tensor.trained.mixed_precision import MixedPrecisionTensor

__all__ = [
    "AffineTensor",
    "BitNetTensor",
    "BlockMixedPrecisionTensor",
    "CodebookTensor",
    "FakeQuantizedTensor",
    "Float8Tensor",
    "Int4WeightTensor",
    "Int8WeightTensor",
    "LowbitTensor",
    "MicroscaledTensor",
    "MixedPrecisionTensor",
    "TableTensor",
    "TernaryTensor",
    "joined",
]

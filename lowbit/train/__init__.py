"""Train with int8 or float8 matrix products, with int8 or int4 weights, or BitNet: one call before the loop, and one
after the loop that restores plain weights or converts for inference."""

from lowbit.convert import Report
from lowbit.schemes.low_bit_weights import BitNet, Int4Weight, Int8Weight
from lowbit.schemes.mixed_precision import (
    Float8BlockMixedPrecision,
    Float8MixedPrecision,
    Int8MixedPrecision,
    MXFP8MixedPrecision,
)
from lowbit.schemes.training import TrainingScheme
from lowbit.train.collectives import compress_collectives_
from lowbit.train.convert import convert_
from lowbit.train.prepare import prepare_, restore_
from lowbit.train.recompute import keep_products
from lowbit.train.saved import save_in_int8
from lowbit.train.sharded import locate_, precompute_bitnet_scale

__all__ = [
    "BitNet",
    "Float8BlockMixedPrecision",
    "Float8MixedPrecision",
    "Int4Weight",
    "Int8MixedPrecision",
    "Int8Weight",
    "MXFP8MixedPrecision",
    "Report",
    "TrainingScheme",
    "compress_collectives_",
    "convert_",
    "keep_products",
    "locate_",
    "precompute_bitnet_scale",
    "prepare_",
    "restore_",
    "save_in_int8",
]

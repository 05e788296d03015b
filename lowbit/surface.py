"""The names that `lowbit` gives out. Importing this module registers lowbit's operators and its tensors.

`lowbit/__init__.py` imports it, unless the program is the command line, which does so when a command runs.
"""

from lowbit import inference, optim, qat, train
from lowbit.affine import (
    choose_qparams_affine,
    dequantize_affine,
    fake_quantize_affine,
    quantize_affine,
)
from lowbit.checkpoint import CheckpointError, load, load_metadata, save
from lowbit.convert.siblings import register_siblings
from lowbit.dequantize import dequantize_
from lowbit.granularity import PerBlock, PerGroup, PerRow, PerTensor, PerToken
from lowbit.inference import (
    Plan,
    Report,
    autoquant,
    calibrate,
    evaluate,
    quantize_,
    register_linear,
    unregister_linear,
)
from lowbit.interop import own_offloads, pretrained
from lowbit.interop.peft import own_merges
from lowbit.numerics.lookup_table import E2M1, NF4, LookupTable
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.spec import Spec
from lowbit.scheme import Scheme
from lowbit.schemes.low_bit_weights import BitNet, Int4Weight, Int8Weight
from lowbit.schemes.mixed_precision import (
    Float8BlockMixedPrecision,
    Float8MixedPrecision,
    Int8MixedPrecision,
    MXFP8MixedPrecision,
)
from lowbit.schemes.presets import (
    Float8DynamicActivationFloat8Weight,
    Float8DynamicActivationMXFP4Weight,
    Float8DynamicActivationNVFP4Weight,
    Float8StaticActivationFloat8Weight,
    Float8WeightOnly,
    Int1WeightOnly,
    Int2WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8StaticActivationInt8Weight,
    Int8WeightOnly,
    IntxWeightOnly,
    MXFP4WeightOnly,
    MXFP8DynamicActivationMXFP8Weight,
    MXFP8WeightOnly,
    NF4WeightOnly,
    NVFP4WeightOnly,
)
from lowbit.schemes.training import TrainingScheme
from lowbit.tensor import (
    AffineTensor,
    BitNetTensor,
    BlockMixedPrecisionTensor,
    CodebookTensor,
    FakeQuantizedTensor,
    Float8Tensor,
    Int4WeightTensor,
    Int8WeightTensor,
    LowbitTensor,
    MicroscaledTensor,
    MixedPrecisionTensor,
    TableTensor,
    TernaryTensor,
)
from lowbit.tracing.report import Trace, TracedProduct
from lowbit.tracing.trace import trace

pretrained.listen()
own_merges.listen()
own_offloads.listen()

__all__ = [
    "E2M1",
    "NF4",
    "AffineTensor",
    "BitNet",
    "BitNetTensor",
    "BlockMixedPrecisionTensor",
    "CheckpointError",
    "CodebookTensor",
    "FakeQuantizedTensor",
    "Float8",
    "Float8BlockMixedPrecision",
    "Float8DynamicActivationFloat8Weight",
    "Float8DynamicActivationMXFP4Weight",
    "Float8DynamicActivationNVFP4Weight",
    "Float8MixedPrecision",
    "Float8StaticActivationFloat8Weight",
    "Float8Tensor",
    "Float8WeightOnly",
    "Int",
    "Int1WeightOnly",
    "Int2WeightOnly",
    "Int4Weight",
    "Int4WeightOnly",
    "Int4WeightTensor",
    "Int8DynamicActivationInt4Weight",
    "Int8DynamicActivationInt8Weight",
    "Int8MixedPrecision",
    "Int8StaticActivationInt8Weight",
    "Int8Weight",
    "Int8WeightOnly",
    "Int8WeightTensor",
    "IntxWeightOnly",
    "LookupTable",
    "LowbitTensor",
    "MXFP4WeightOnly",
    "MXFP8DynamicActivationMXFP8Weight",
    "MXFP8MixedPrecision",
    "MXFP8WeightOnly",
    "MicroscaledTensor",
    "MixedPrecisionTensor",
    "NF4WeightOnly",
    "NVFP4WeightOnly",
    "PerBlock",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "PerToken",
    "Plan",
    "Report",
    "Scheme",
    "Spec",
    "TableTensor",
    "TernaryTensor",
    "Trace",
    "TracedProduct",
    "TrainingScheme",
    "autoquant",
    "calibrate",
    "choose_qparams_affine",
    "dequantize_",
    "dequantize_affine",
    "evaluate",
    "fake_quantize_affine",
    "inference",
    "load",
    "load_metadata",
    "optim",
    "qat",
    "quantize_",
    "quantize_affine",
    "register_linear",
    "register_siblings",
    "save",
    "trace",
    "train",
    "unregister_linear",
]

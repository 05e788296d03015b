"""lowbit: train, fine-tune and convert PyTorch models in 8 bits and fewer.

Everything a user needs is here or in the four subpackages `lowbit.optim`, `lowbit.train`, `lowbit.qat` and
`lowbit.inference`. `lowbit.formats`, with `export` and `load_pretrained`, is imported when one of them is first used.
"""

# ruff: noqa: E402, for the path comes before all other imports.
import sys

# `python -m lowbit` looks for modules in the working folder first, which may be that of a stranger's model.
_is_run = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("lowbit", "-mlowbit")
if _is_run and not sys.flags.safe_path:
    del sys.path[0]

from typing import TYPE_CHECKING, Any

from lowbit import inference, optim, pretrained, qat, train
from lowbit.affine import (
    choose_qparams_affine,
    dequantize_affine,
    fake_quantize_affine,
    quantize_affine,
)
from lowbit.calibration import calibrate
from lowbit.checkpoint import CheckpointError, load, load_metadata, save
from lowbit.dequantize import dequantize_
from lowbit.granularity import PerBlock, PerGroup, PerRow, PerTensor, PerToken
from lowbit.inference import Report, quantize_, register_linear, unregister_linear
from lowbit.lookup_table import E2M1, NF4, LookupTable
from lowbit.presets import (
    Float8DynamicActivationFloat8Weight,
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
    NF4WeightOnly,
    NVFP4WeightOnly,
)
from lowbit.scheme import Float8, Int, Scheme, Spec
from lowbit.siblings import register_siblings
from lowbit.tensor import (
    AffineTensor,
    BitNetTensor,
    BlockMixedPrecisionTensor,
    CodebookTensor,
    FakeQuantizedTensor,
    Float8Tensor,
    Int8WeightTensor,
    LowbitTensor,
    MixedPrecisionTensor,
    TableTensor,
    TernaryTensor,
)
from lowbit.traced import Trace, TracedProduct
from lowbit.tracer import trace
from lowbit.train_scheme import (
    BitNet,
    Float8BlockMixedPrecision,
    Float8MixedPrecision,
    Int8MixedPrecision,
    Int8Weight,
    TrainingScheme,
)

if TYPE_CHECKING:
    from lowbit import formats
    from lowbit.formats import export, load_pretrained

__version__ = "0.1.0"

pretrained.listen()

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
    "Float8MixedPrecision",
    "Float8StaticActivationFloat8Weight",
    "Float8Tensor",
    "Float8WeightOnly",
    "Int",
    "Int1WeightOnly",
    "Int2WeightOnly",
    "Int4WeightOnly",
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
    "MixedPrecisionTensor",
    "NF4WeightOnly",
    "NVFP4WeightOnly",
    "PerBlock",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "PerToken",
    "Report",
    "Scheme",
    "Spec",
    "TableTensor",
    "TernaryTensor",
    "Trace",
    "TracedProduct",
    "TrainingScheme",
    "calibrate",
    "choose_qparams_affine",
    "dequantize_",
    "dequantize_affine",
    "export",
    "fake_quantize_affine",
    "formats",
    "inference",
    "load",
    "load_metadata",
    "load_pretrained",
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


def __getattr__(name: str) -> Any:
    if name in ("formats", "export", "load_pretrained"):
        import importlib

        found = importlib.import_module("lowbit.formats")
        return found if name == "formats" else getattr(found, name)
    raise AttributeError(f"module 'lowbit' has no attribute {name!r}")

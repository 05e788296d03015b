"""Convert a trained model into one that runs and stores its weights in low bits."""

from lowbit.convert import Report
from lowbit.inference.calibration import (
    GPTQ,
    CalibrationReport,
    Layer,
    LayerResult,
    LearnedRounding,
    Search,
    Step,
    calibrate,
)
from lowbit.inference.float8_blocks import float8_blocks_state_dict, load_float8_blocks_
from lowbit.inference.freeze import freeze_
from lowbit.inference.fuse import fuse_linears_, unfuse_linears_
from lowbit.inference.quantize import quantize_
from lowbit.linear.frozen import (
    grouped_linear,
    linear,
    register_linear,
    unregister_linear,
)

__all__ = [
    "GPTQ",
    "CalibrationReport",
    "Layer",
    "LayerResult",
    "LearnedRounding",
    "Report",
    "Search",
    "Step",
    "calibrate",
    "float8_blocks_state_dict",
    "freeze_",
    "fuse_linears_",
    "grouped_linear",
    "linear",
    "load_float8_blocks_",
    "quantize_",
    "register_linear",
    "unfuse_linears_",
    "unregister_linear",
]

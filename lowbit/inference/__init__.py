"""Convert a trained model into one that runs and stores its weights in low bits."""

from lowbit.convert import Report
from lowbit.inference.fuse import fuse_linears_, unfuse_linears_
from lowbit.inference.quantize import quantize_
from lowbit.inference.trace import LinearReport, TracedLinear, trace_linears
from lowbit.products import grouped_linear, linear, register_linear, unregister_linear

__all__ = [
    "LinearReport",
    "Report",
    "TracedLinear",
    "fuse_linears_",
    "grouped_linear",
    "linear",
    "quantize_",
    "register_linear",
    "trace_linears",
    "unfuse_linears_",
    "unregister_linear",
]

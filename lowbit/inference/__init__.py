"""Convert a trained model into one that runs and stores its weights in low bits."""

from lowbit.inference import dynamic as dynamic
from lowbit.inference.quantize import quantize_
from lowbit.tensor.apply import Report
from lowbit.tensor.linear import register_linear, unregister_linear

__all__ = ["Report", "quantize_", "register_linear", "unregister_linear"]

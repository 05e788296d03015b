"""Quantization-aware training: fine-tune with the rounding in place, convert to exactly the model that was trained."""

from lowbit.qat.qat import convert_, prepare_
from lowbit.tensor.apply import Report

__all__ = ["Report", "convert_", "prepare_"]

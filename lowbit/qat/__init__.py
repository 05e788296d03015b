"""Quantization-aware training: fine-tune with the rounding in place, convert to exactly the model that was trained."""

from lowbit.convert import Report
from lowbit.qat.qat import convert_, prepare_

__all__ = ["Report", "convert_", "prepare_"]

"""Quantization-aware training: fine-tune with the rounding in place, convert to exactly the model that was trained."""

from lowbit.convert import Report
from lowbit.numerics.divergence import distillation_loss
from lowbit.qat.distillation import Distillation
from lowbit.qat.qat import convert_, prepare_
from lowbit.qat.scales import parameter_groups, search_scales_
from lowbit.qat.schedule import Schedule
from lowbit.qat.switch import disable_, enable_, high_precision
from lowbit.qat.undo import undo_

__all__ = [
    "Distillation",
    "Report",
    "Schedule",
    "convert_",
    "disable_",
    "distillation_loss",
    "enable_",
    "high_precision",
    "parameter_groups",
    "prepare_",
    "search_scales_",
    "undo_",
]

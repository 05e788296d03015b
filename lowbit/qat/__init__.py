"""Quantization-aware training: fine-tune with the rounding in place, convert to exactly the model that was trained."""

from lowbit.convert import Report
from lowbit.qat.blocks import BlockProgress, BlockResult, BlocksReport, train_blocks
from lowbit.qat.codes import freeze_codes_
from lowbit.qat.measure import report
from lowbit.qat.plan import Plan
from lowbit.qat.qat import convert_, prepare_
from lowbit.qat.sensitivity import Sensitivity, SensitivityReport

__all__ = [
    "BlockProgress",
    "BlockResult",
    "BlocksReport",
    "Plan",
    "Report",
    "Sensitivity",
    "SensitivityReport",
    "convert_",
    "freeze_codes_",
    "prepare_",
    "report",
    "train_blocks",
]

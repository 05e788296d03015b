"""Calibration: quantize a trained model by a few batches, without training. One algorithm a file."""

from lowbit.inference.calibration.awq import AWQ
from lowbit.inference.calibration.call import calibrate
from lowbit.inference.calibration.expert_pruning import PruneExperts
from lowbit.inference.calibration.gptq import GPTQ
from lowbit.inference.calibration.learned_rounding import LearnedRounding
from lowbit.inference.calibration.pruning import Prune24
from lowbit.inference.calibration.report import CalibrationReport, LayerResult
from lowbit.inference.calibration.rotation import Rotate
from lowbit.inference.calibration.sampled import sampled_batches
from lowbit.inference.calibration.search import Search
from lowbit.inference.calibration.smoothquant import SmoothQuant
from lowbit.inference.calibration.step import Layer, Step

__all__ = [
    "AWQ",
    "GPTQ",
    "CalibrationReport",
    "Layer",
    "LayerResult",
    "LearnedRounding",
    "Prune24",
    "PruneExperts",
    "Rotate",
    "Search",
    "SmoothQuant",
    "Step",
    "calibrate",
    "sampled_batches",
]

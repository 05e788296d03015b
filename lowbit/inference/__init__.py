"""Convert a trained model into one that runs and stores its weights in low bits."""

from lowbit.convert import Costs, Plan, PlanChoice, Report
from lowbit.inference.calibration import (
    AWQ,
    GPTQ,
    CalibrationReport,
    Layer,
    LayerResult,
    LearnedRounding,
    Prune24,
    PruneExperts,
    Rotate,
    Search,
    SmoothQuant,
    Step,
    calibrate,
    sampled_batches,
)
from lowbit.inference.evaluation import Evaluation, EvaluationReport, evaluate
from lowbit.inference.freeze import freeze_
from lowbit.inference.invariant import invariant_
from lowbit.inference.planning import autoquant
from lowbit.inference.quantize import quantize_
from lowbit.layers.invariant import attention as invariant_attention
from lowbit.linear.frozen import grouped_linear, linear, register_linear, unregister_linear

__all__ = [
    "AWQ",
    "GPTQ",
    "CalibrationReport",
    "Costs",
    "Evaluation",
    "EvaluationReport",
    "Layer",
    "LayerResult",
    "LearnedRounding",
    "Plan",
    "PlanChoice",
    "Prune24",
    "PruneExperts",
    "Report",
    "Rotate",
    "Search",
    "SmoothQuant",
    "Step",
    "autoquant",
    "calibrate",
    "evaluate",
    "freeze_",
    "grouped_linear",
    "invariant_",
    "invariant_attention",
    "linear",
    "quantize_",
    "register_linear",
    "sampled_batches",
    "unregister_linear",
]

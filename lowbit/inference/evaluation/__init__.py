"""How good low-bit language models are beside the original: `lowbit.evaluate`."""

from lowbit.inference.evaluation.call import evaluate
from lowbit.inference.evaluation.report import Evaluation, EvaluationReport

__all__ = ["Evaluation", "EvaluationReport", "evaluate"]

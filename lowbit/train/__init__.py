"""Train with int8 or float8 matrix products: one call before the loop, and one to be back at plain weights."""

from lowbit.tensor.apply import Report
from lowbit.train.explain import Explanation, explain
from lowbit.train.prepare import prepare_, restore_
from lowbit.train_scheme import Float8MixedPrecision, Int8MixedPrecision, TrainingScheme

__all__ = [
    "Explanation",
    "Float8MixedPrecision",
    "Int8MixedPrecision",
    "Report",
    "TrainingScheme",
    "explain",
    "prepare_",
    "restore_",
]

"""Walk a model, choose a scheme for each weight, replace the weights, and report them.

`lowbit.quantize_`, `lowbit.qat` and `lowbit.train` share it. All weights are checked before the first one is replaced,
so a refused model stays unchanged. A tensor that several modules share is converted once and stays shared.
"""

from lowbit.convert.adapters import adapter_modules, is_tuner
from lowbit.convert.by_name import (
    NEEDS_CALIBRATION,
    check_pattern,
    check_runs,
    check_schemes,
    first_match,
    has_static,
    matches,
    names_outright,
    of_unused,
    unused,
)
from lowbit.convert.choice import NAMED, Choice
from lowbit.convert.experts import routers_among, stacked
from lowbit.convert.owners import Owner, check_module, find_owners, joined_name
from lowbit.convert.plan import Choice as PlanChoice
from lowbit.convert.plan import Costs, Plan, budget_of, pattern_of
from lowbit.convert.replace import replace_weights
from lowbit.convert.report import Entry, Report, followers, tell
from lowbit.convert.siblings import of_any_expert, unit_of
from lowbit.convert.walk import (
    USES,
    Filter,
    Schemes,
    Target,
    TrainingSchemes,
    alike,
    families_of,
    find_targets,
    is_conv,
    is_turned,
    joint_part,
    joint_parts,
    own_schemes,
    rounding_owners,
    shape_of_blocks,
)

__all__ = [
    "NAMED",
    "NEEDS_CALIBRATION",
    "USES",
    "Choice",
    "Costs",
    "Entry",
    "Filter",
    "Owner",
    "Plan",
    "PlanChoice",
    "Report",
    "Schemes",
    "Target",
    "TrainingSchemes",
    "adapter_modules",
    "alike",
    "budget_of",
    "check_module",
    "check_pattern",
    "check_runs",
    "check_schemes",
    "families_of",
    "find_owners",
    "find_targets",
    "first_match",
    "followers",
    "has_static",
    "is_conv",
    "is_tuner",
    "is_turned",
    "joined_name",
    "joint_part",
    "joint_parts",
    "matches",
    "names_outright",
    "of_any_expert",
    "of_unused",
    "own_schemes",
    "pattern_of",
    "replace_weights",
    "rounding_owners",
    "routers_among",
    "shape_of_blocks",
    "stacked",
    "tell",
    "unit_of",
    "unused",
]

"""Walk a model, choose a scheme for each weight, replace the weights, and report them.

`lowbit.quantize_`, `lowbit.qat` and `lowbit.train` share it. All weights are checked before the first one is replaced,
so a refused model stays unchanged. A tensor that several modules share is converted once and stays shared.
"""

from lowbit.convert.adapters import adapter_modules as adapter_modules
from lowbit.convert.adapters import is_tuner as is_tuner
from lowbit.convert.by_name import NEEDS_CALIBRATION as NEEDS_CALIBRATION
from lowbit.convert.by_name import check_pattern as check_pattern
from lowbit.convert.by_name import check_runs as check_runs
from lowbit.convert.by_name import check_schemes as check_schemes
from lowbit.convert.by_name import first_match as first_match
from lowbit.convert.by_name import has_static as has_static
from lowbit.convert.by_name import matches as matches
from lowbit.convert.by_name import names_outright as names_outright
from lowbit.convert.by_name import of_unused as of_unused
from lowbit.convert.by_name import unused as unused
from lowbit.convert.choice import NAMED as NAMED
from lowbit.convert.choice import Choice as Choice
from lowbit.convert.experts import routers_among as routers_among
from lowbit.convert.experts import stacked as stacked
from lowbit.convert.joined import alike as alike
from lowbit.convert.joined import families_of as families_of
from lowbit.convert.joined import frozen_families as frozen_families
from lowbit.convert.joined import joint_parts as joint_parts
from lowbit.convert.joined import watch_joined as watch_joined
from lowbit.convert.owners import Owner as Owner
from lowbit.convert.owners import check_held as check_held
from lowbit.convert.owners import check_module as check_module
from lowbit.convert.owners import find_owners as find_owners
from lowbit.convert.owners import joined_name as joined_name
from lowbit.convert.plan import Costs as Costs
from lowbit.convert.plan import Plan as Plan
from lowbit.convert.plan import PlanChoice as PlanChoice
from lowbit.convert.plan import budget_of as budget_of
from lowbit.convert.plan import pattern_of as pattern_of
from lowbit.convert.replace import replace_weights as replace_weights
from lowbit.convert.report import Entry as Entry
from lowbit.convert.report import Report as Report
from lowbit.convert.report import followers as followers
from lowbit.convert.report import tell as tell
from lowbit.convert.siblings import of_any_expert as of_any_expert
from lowbit.convert.siblings import unit_of as unit_of
from lowbit.convert.underflow import underflow as underflow
from lowbit.convert.walk import USES as USES
from lowbit.convert.walk import Filter as Filter
from lowbit.convert.walk import Schemes as Schemes
from lowbit.convert.walk import Target as Target
from lowbit.convert.walk import TrainingSchemes as TrainingSchemes
from lowbit.convert.walk import find_targets as find_targets
from lowbit.convert.walk import is_conv as is_conv
from lowbit.convert.walk import is_turned as is_turned
from lowbit.convert.walk import modules_of as modules_of
from lowbit.convert.walk import own_schemes as own_schemes
from lowbit.convert.walk import rounding_owners as rounding_owners
from lowbit.convert.walk import shape_of_blocks as shape_of_blocks

"""The base of every low-bit tensor, and its answers to torch's protocols. Representations import this page.

- `base`: the declarations of a representation, and what follows; `shape_arithmetic`: its parts, and several joined;
  `checks`: of weights and views; `base_ops`: aten operations; `indexing`, `contracted`: functions that take a tensor
  apart, or multiply by it in their own way; `reading`: the values of a weight that is rounded later;
  `torchscript`: its refusal
- `pickled`, `state_dict`: the contents of files
- `collectives`, `dtensor`, `fsdp`, `regather`: tensors over several ranks
"""

from lowbit.tensor.core.base import CodesByRow as CodesByRow
from lowbit.tensor.core.base import InnerShapes as InnerShapes
from lowbit.tensor.core.base import LowbitTensor as LowbitTensor
from lowbit.tensor.core.base import aten as aten
from lowbit.tensor.core.base import count_change as count_change
from lowbit.tensor.core.base import count_on_lists as count_on_lists
from lowbit.tensor.core.base import stored_shape as stored_shape
from lowbit.tensor.core.base import written as written
from lowbit.tensor.core.base_ops import copy_ as copy_
from lowbit.tensor.core.base_ops import experts_in_high_precision as experts_in_high_precision
from lowbit.tensor.core.base_ops import looked_up as looked_up
from lowbit.tensor.core.base_ops import product_below_autograd as product_below_autograd
from lowbit.tensor.core.base_ops import to_copy as to_copy
from lowbit.tensor.core.checks import check_finite as check_finite
from lowbit.tensor.core.checks import check_not_flat as check_not_flat
from lowbit.tensor.core.checks import check_weight as check_weight
from lowbit.tensor.core.checks import nears_end as nears_end
from lowbit.tensor.core.contracted import MATMULS as MATMULS
from lowbit.tensor.core.contracted import NoProduct as NoProduct
from lowbit.tensor.core.contracted import NoView as NoView
from lowbit.tensor.core.contracted import of_stack as of_stack
from lowbit.tensor.core.contracted import of_swapped as of_swapped
from lowbit.tensor.core.dtensor import largest_over_ranks as largest_over_ranks
from lowbit.tensor.core.dtensor import local as local
from lowbit.tensor.core.dtensor import own_region as own_region
from lowbit.tensor.core.dtensor import replicated as replicated
from lowbit.tensor.core.dtensor import split_as as split_as
from lowbit.tensor.core.fsdp import Gather as Gather
from lowbit.tensor.core.fsdp import Wire as Wire
from lowbit.tensor.core.indexing import check_part as check_part
from lowbit.tensor.core.indexing import is_advanced as is_advanced
from lowbit.tensor.core.indexing import writes as writes
from lowbit.tensor.core.reading import ROUNDING_INPUTS as ROUNDING_INPUTS
from lowbit.tensor.core.reading import below_transform as below_transform
from lowbit.tensor.core.reading import in_forward as in_forward
from lowbit.tensor.core.reading import read as read
from lowbit.tensor.core.reading import reads as reads
from lowbit.tensor.core.reading import rounding_inputs as rounding_inputs
from lowbit.tensor.core.torchscript import is_traced as is_traced
from lowbit.tensor.core.torchscript import refuse_trace as refuse_trace

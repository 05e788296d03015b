"""What every low-bit tensor is made of: its base, and how torch's protocols see it. Representations import this page.

- `base`: what a representation declares and gets; `base_ops`: aten operations; `indexing`, `contracted`: functions that
  take a tensor apart, or multiply by it in their own way; `reading`: what a model reads of a weight that is rounded
  later; `torchscript`: the refusal of it
- `pickled`, `state_dict`: what files hold
- `collectives`, `dtensor`, `fsdp`, `regather`: tensors over several ranks
"""

from lowbit.tensor.core.base import (
    InnerShapes,
    LowbitTensor,
    aten,
    check_not_flat,
    check_weight,
    count_change,
    stored_shape,
    written,
)
from lowbit.tensor.core.base_ops import copy_, product_below_autograd, to_copy
from lowbit.tensor.core.contracted import GROUPED, MATMULS, of_stack, of_swapped
from lowbit.tensor.core.dtensor import held_locally, local, own_region, replicated, split_as
from lowbit.tensor.core.fsdp import Gather, Wire
from lowbit.tensor.core.reading import below_transform, in_forward, rounding_inputs
from lowbit.tensor.core.torchscript import is_traced, refuse_trace

__all__ = [
    "GROUPED",
    "MATMULS",
    "Gather",
    "InnerShapes",
    "LowbitTensor",
    "Wire",
    "aten",
    "below_transform",
    "check_not_flat",
    "check_weight",
    "copy_",
    "count_change",
    "held_locally",
    "in_forward",
    "is_traced",
    "local",
    "of_stack",
    "of_swapped",
    "own_region",
    "product_below_autograd",
    "refuse_trace",
    "replicated",
    "rounding_inputs",
    "split_as",
    "stored_shape",
    "to_copy",
    "written",
]

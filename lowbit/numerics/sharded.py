"""Is this a DTensor, or a module of FSDP2? Asked without importing either.

`import torch.distributed.tensor` takes more than half a second, and most programs never shard. Where nobody has
imported it there is no DTensor. While another thread imports it, the module lacks the class: then there is none either.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether `value` is a `torch.distributed.tensor.DTensor`."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, getattr(tensor, "DTensor", ()))


def is_fsdp_module(value: object) -> TypeIs[FSDPModule]:
    """Whether `value` is a module that `torch.distributed.fsdp.fully_shard` has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(value, getattr(fsdp, "FSDPModule", ()))

"""A DTensor or a module of FSDP2 told from others, without an import of either.

`import torch.distributed.tensor` takes more than half a second, and most programs never shard. No DTensor exists before
this import, nor while another thread still runs it and the module lacks the class.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """True if `value` is a `torch.distributed.tensor.DTensor`."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, getattr(tensor, "DTensor", ()))


def held_locally(value: Any) -> Any:
    """The very tensor that a DTensor holds, so that attributes set on it stay; anything else unchanged."""
    return value._local_tensor if is_dtensor(value) else value


def is_fsdp_module(value: object) -> TypeIs[FSDPModule]:
    """True if `value` is a module that `torch.distributed.fsdp.fully_shard` has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(value, getattr(fsdp, "FSDPModule", ()))

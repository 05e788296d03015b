"""Is this a DTensor, or a module of FSDP2? Asked without importing either.

`import torch.distributed.tensor` takes more than half a second, and most programs never shard. Where nobody has
imported it there is no DTensor. A package gets a submodule as its attribute once the import has finished, so another
thread's unfinished import is not seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_submodules = vars(torch.distributed)  # read directly: getattr takes 0.7 µs where a name is missing


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether `value` is a `torch.distributed.tensor.DTensor`."""
    tensor = _submodules.get("tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def is_fsdp_module(value: object) -> TypeIs[FSDPModule]:
    """Whether `value` is a module that `torch.distributed.fsdp.fully_shard` has sharded."""
    fsdp = _submodules.get("fsdp")
    return fsdp is not None and isinstance(value, fsdp.FSDPModule)

"""torchtitan 0.2 on CPU processes over gloo: stand-ins for what it asks of an accelerator.

torchtitan runs on accelerators only. To try a configuration on a CPU, `stand_in()` must be called before torchtitan is
imported. It changes torch for this process:

- the available device is "cpu", with a name, a memory and statistics of it;
- FSDP2 divides no gradients, which gloo cannot do; torchtitan divides the loss by the tokens itself;
- `torch.histc` counts integers, as it does on a GPU; the router of a mixture of experts needs it.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


def stand_in() -> None:
    """See the module."""
    cpu: Any = torch.cpu
    torch._utils._get_available_device_type = lambda: "cpu"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=memory)
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = lambda device=None: None
    cpu.empty_cache = lambda: None
    cpu.current_device = lambda: 0
    _sum_without_division()
    _count_integers()


def _sum_without_division() -> None:
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_and_sum(self: FSDPModule, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_and_sum  # type: ignore[method-assign]


def _count_integers() -> None:
    histc = torch.histc

    def counted(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.is_floating_point() or input.device.type != "cpu":
            return histc(input, *args, **kwargs)
        return histc(input.float(), *args, **kwargs).to(input.dtype)

    torch.histc = counted

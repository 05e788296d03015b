"""Kernels that say that they ran: `emulator.EmulatedStep.launches` holds the variants, whichever kernel it was."""

from __future__ import annotations

import functools

from lowbit.optim import fused, kernel
from lowbit_kernels.fused_step_cpu import FusedStepCpu
from tests.kernels import emulator


class Counted(kernel.FusedStep):
    launches = emulator.EmulatedStep.launches

    def __call__(self, *args, **kwargs):
        super().__call__(*args, **kwargs)
        self.launches.append(self.variant)


class CountedCpu(FusedStepCpu):
    launches = emulator.EmulatedStep.launches

    def __call__(self, *args, **kwargs):
        super().__call__(*args, **kwargs)
        self.launches.append(self.variant)


def launched():
    return len(emulator.EmulatedStep.launches)


def count(patch):
    """Have the kernel of each device counted."""

    @functools.cache
    def compiled(variant, device):
        return CountedCpu(variant) if device.type == "cpu" else Counted(variant, device)

    patch.setattr(fused, "compiled", compiled)


def emulate(patch):
    """Have CPU parameters updated by the code for GPUs."""
    patch.setattr(kernel, "device_obstacle", lambda device, float8: None)
    patch.setattr(kernel, "compile_obstacle", lambda variant, device: None)
    patch.setattr(fused, "compiled", functools.cache(emulator.EmulatedStep))

"""Kernels that record their launches: `LAUNCHES` lists the variants, on every kind of device."""

from __future__ import annotations

import functools

from lowbit.optim.step import coded, fused, launch
from lowbit_kernels.elementwise.fused_step import StepKernel, StepVariant
from lowbit_kernels.elementwise.fused_step_cpu import StepKernelCpu
from tests.kernels.emulator import EmulatedStep

LAUNCHES: list[StepVariant] = []


class _Counted:
    def __call__(self, *args, **kwargs):
        super().__call__(*args, **kwargs)
        LAUNCHES.append(self.variant)


class Counted(_Counted, StepKernel):
    pass


class CountedCpu(_Counted, StepKernelCpu):
    pass


class CountedEmulated(_Counted, EmulatedStep):
    pass


def launched():
    return len(LAUNCHES)


def count(patch):
    """Record the launches on each device."""

    @functools.cache
    def compiled(variant, device):
        return CountedCpu(variant) if device.type == "cpu" else Counted(variant, device)

    patch.setattr(launch, "compiled", compiled)


def emulate(patch):
    """Update CPU parameters by the code for GPUs, emulated."""
    patch.setattr(fused, "device_obstacle", lambda device, float8: None)
    patch.setattr(fused, "compile_obstacle", lambda variant, device: None)
    patch.setattr(coded, "runs_on_hopper", lambda device: True)
    patch.setattr(launch, "compiled", functools.cache(CountedEmulated))

"""Offloading of accelerate for low-bit weights; `lowbit.interop.accelerate` describes and holds it."""

from lowbit.interop.accelerate import cpu_offload, disk_offload

__all__ = ["cpu_offload", "disk_offload"]

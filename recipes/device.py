"""The device that a recipe runs on: its choice, its name, and times on it."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch


def choose_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    run: Callable[[], object], device: torch.device, repeats: int, at_most_s: float = float("inf")
) -> float:
    """Median of `repeats` calls after one warm-up call.

    Args:
        run: the function to time.
        device: the device to wait for before and after each call.
        repeats: number of timed calls.
        at_most_s: seconds after which no further call starts.
    """
    run()
    seconds: list[float] = []
    began = time.perf_counter()
    while not seconds or (len(seconds) < repeats and time.perf_counter() - began < at_most_s):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)

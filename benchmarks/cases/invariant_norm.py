"""Cases of `lowbit_kernels.invariant.invariant_norm`: those of `rms_norm`."""

from __future__ import annotations

from benchmarks.cases.rms_norm import CASES as CASES

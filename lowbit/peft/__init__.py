"""Adapters of PEFT in low-bit weights; `lowbit.interop.peft` describes and holds it."""

from lowbit.interop.peft import Merged, MergeReport, merge_

__all__ = ["MergeReport", "Merged", "merge_"]

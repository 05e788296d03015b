"""Adapters of PEFT in low-bit weights; `lowbit.interop.peft` merges and `lowbit.layers.fused_lora` trains them."""

from lowbit.interop.peft.fuse import fuse_
from lowbit.interop.peft.merge import merge_
from lowbit.interop.peft.report import Merged, MergeLosses, MergeReport

__all__ = ["MergeLosses", "MergeReport", "Merged", "fuse_", "merge_"]

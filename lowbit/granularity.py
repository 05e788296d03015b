"""Granularities under their public name; `lowbit.numerics.granularity` describes and holds them."""

from lowbit.numerics.granularity import Granularity, PerBlock, PerGroup, PerRow, PerTensor, PerToken

__all__ = ["Granularity", "PerBlock", "PerGroup", "PerRow", "PerTensor", "PerToken"]

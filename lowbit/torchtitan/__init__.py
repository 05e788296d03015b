"""lowbit in torchtitan; `lowbit.interop.torchtitan` describes and holds it."""

from lowbit.interop import torchtitan as _torchtitan
from lowbit.interop.torchtitan import *  # noqa: F403

__all__ = _torchtitan.__all__

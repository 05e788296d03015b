"""lowbit in transformers; `lowbit.interop.hf` describes and holds it."""

from lowbit.interop.hf import LowbitConfig, LowbitQuantizer, QATCallback, generate, optimizer

__all__ = ["LowbitConfig", "LowbitQuantizer", "QATCallback", "generate", "optimizer"]

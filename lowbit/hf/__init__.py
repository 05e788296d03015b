"""lowbit in transformers; `lowbit.interop.hf` describes and holds it."""

from lowbit.interop.hf import KVCache, LowbitConfig, LowbitQuantizer, generate
from lowbit.interop.hf.training import QATCallback, optimizer

__all__ = ["KVCache", "LowbitConfig", "LowbitQuantizer", "QATCallback", "generate", "optimizer"]

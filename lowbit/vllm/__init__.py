"""The plug-in of vLLM; `lowbit.interop.vllm` describes and holds it."""

from lowbit.interop.vllm import register

__all__ = ["register"]

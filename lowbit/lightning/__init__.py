"""QAT under the Trainer of Lightning; `lowbit.interop.lightning` describes and holds it."""

from lowbit.interop.lightning import QATCallback

__all__ = ["QATCallback"]

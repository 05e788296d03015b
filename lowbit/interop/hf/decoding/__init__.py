"""A loop of our own that generates tokens with transformers' models: `lowbit.hf.generate`.

called.py    the function, and transformers' hook
options.py   what a call asks for, and what is refused
cache.py     keys and values in fixed slots; the attention that models call
choice.py    the next tokens from the logits
folding.py   chains of operations as kernels
step.py      one token as one CUDA graph
held.py      the graphs that a model keeps
loop.py      the loop; the host stays behind the device
"""

from lowbit.interop.hf.decoding.called import generate

__all__ = ["generate"]

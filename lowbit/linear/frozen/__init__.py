"""Choose the implementation of each product of a quantized weight, and run it.

Every `F.linear` with a quantized weight, and every `lowbit.inference.linear`, ends in `quantized_linear`. It goes
through a list of rows (condition, implementation) and runs the first whose condition holds: first the registrations
of `register_linear`, the last registered first; then `BUILT_IN`, the literal list of `built_in.py`.

A kernel or backend is one registration:

    @register_linear(lambda x, w, bias: x.is_cuda and w.spec.format == Int(4))
    def my_linear(x, w, bias):
        return ...

Representations import this package, so conditions read `weight.stored_as`, `weight.spec` and `weight.activation`
instead of asking for a class.
"""

from lowbit.linear.frozen.built_in import BUILT_IN, choose_linear
from lowbit.linear.frozen.called import grouped_linear, linear
from lowbit.linear.frozen.frozen_linear import quantized_linear
from lowbit.linear.frozen.registered import register_linear, registered_sources, unregister_linear
from lowbit.linear.frozen.row import Row

__all__ = [
    "BUILT_IN",
    "Row",
    "choose_linear",
    "grouped_linear",
    "linear",
    "quantized_linear",
    "register_linear",
    "registered_sources",
    "unregister_linear",
]

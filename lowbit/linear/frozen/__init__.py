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

from lowbit.linear.frozen.built_in import BUILT_IN as BUILT_IN
from lowbit.linear.frozen.built_in import choose_linear as choose_linear
from lowbit.linear.frozen.called import grouped_linear as grouped_linear
from lowbit.linear.frozen.called import linear as linear
from lowbit.linear.frozen.frozen_linear import quantized_linear as quantized_linear
from lowbit.linear.frozen.registered import register_linear as register_linear
from lowbit.linear.frozen.registered import registered_sources as registered_sources
from lowbit.linear.frozen.registered import unregister_linear as unregister_linear
from lowbit.linear.frozen.row import Row as Row

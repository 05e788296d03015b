"""Schemes under their public name; `lowbit.schemes.scheme` and `lowbit.numerics.spec` describe and hold them."""

from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme

__all__ = ["Float8", "Int", "Scheme", "Spec"]

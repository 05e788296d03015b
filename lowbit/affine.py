"""The affine primitives under their public name; `lowbit.numerics.affine` describes and holds them."""

from lowbit.numerics.affine import (
    choose_qparams_affine,
    dequantize_affine,
    fake_quantize_affine,
    quantize_affine,
)

__all__ = ["choose_qparams_affine", "dequantize_affine", "fake_quantize_affine", "quantize_affine"]

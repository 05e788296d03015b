"""MicroscaledTensor: a high-precision weight with products in MXFP8 (`lowbit.linear.microscaled_linear`).

FSDP2 gathers the weight itself: its two rounded copies take as many bytes as one in bfloat16.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.linear.microscaled_linear import microscaled_linear
from lowbit.schemes.mixed_precision import MXFP8MixedPrecision
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.frozen import AffineTensor
from lowbit.tensor.trained.mixed_precision import MixedPrecisionTensor


class MicroscaledTensor(MixedPrecisionTensor, codec=None):
    """A trainable weight [..., N, K] with products in MXFP8. `weight` is the high-precision tensor inside."""

    schemes = (MXFP8MixedPrecision,)
    stays = ""

    scheme: MXFP8MixedPrecision

    @classmethod
    def linear(cls, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        cls.check_operands(input, weight)
        return microscaled_linear(input, weight, bias)

    def frozen(self) -> AffineTensor:
        """The weight for inference: the codes that the output's product reads."""
        spec = self.scheme.spec
        return AffineTensor.from_float(self.weight, Scheme(spec, spec))

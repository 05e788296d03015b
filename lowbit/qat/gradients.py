"""Which prepared weights compute their gradients by products in low bits: the argument `gradients` of `prepare_`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowbit.convert import Target
from lowbit.linear.coded_linear import described
from lowbit.linear.frozen.codes_product import codes_format
from lowbit.schemes.mixed_precision import MixedPrecision

_ACCEPTED = "accepted: None, Int8MixedPrecision() for int8 x int8, Float8MixedPrecision() for float8 x float8"


def check_gradients(gradients: Any) -> None:
    """Raise TypeError and ValueError for what no scheme can compute its gradients by."""
    if gradients is None:
        return
    if not isinstance(gradients, MixedPrecision):
        raise TypeError(
            f"gradients must be a scheme of mixed precision, got {gradients!r}; {_ACCEPTED}"
        )
    if gradients.in_blocks or gradients.one_scale:
        raise ValueError(f"gradients={gradients} has no scale a row; {_ACCEPTED}")
    if not gradients.output:
        raise ValueError(
            f"gradients={gradients}: output=False has no effect, as the scheme of the weights says how outputs are "
            "computed; leave it out"
        )
    if not (gradients.grad_input or gradients.grad_weight):
        raise ValueError(
            f"gradients={gradients} names neither grad_input nor grad_weight; {_ACCEPTED}"
        )


def low_bit_gradients(targets: Sequence[Target], gradients: MixedPrecision | None) -> set[str]:
    """The names of the weights whose gradients run by the scheme `gradients`: its product may be one of codes in that
    format.

    Raises ValueError where it fits none of some weights, or where a device lacks its units.
    """
    if gradients is None:
        return set()
    found = [target for target in targets if _fits(target, gradients)]
    if targets and not found:
        raise ValueError(
            f"gradients={gradients} fits none of the chosen weights, such as {targets[0].fqn} with "
            f"{targets[0].scheme}; {_ACCEPTED}"
        )
    for target in found:
        gradients.check(target.weight)
    return {target.fqn for target in found}


def _fits(target: Target, gradients: MixedPrecision) -> bool:
    weight = target.weight
    if weight.ndim != 2:
        return False
    return codes_format(described(weight.shape, target.scheme)) == gradients.forward_format


def gradients_note(gradients: MixedPrecision, fits: bool) -> str:
    """What a report says of the gradients of a weight."""
    if not fits:
        return "gradients in high precision, as its product is none of codes in this format"
    products = " and ".join(name for name in gradients.products if name != "output")
    return f"{products} in {gradients.backward_format}"

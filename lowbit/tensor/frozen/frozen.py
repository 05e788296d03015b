"""`requires_grad` of a frozen weight: it stays False, and a call that asks for a gradient is told the way out."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_WAYS_TO_TRAIN = (
    "To train the module that holds it beside a quantized model, as PEFT's modules_to_save does, make it plain before: "
    "lowbit.dequantize_(module), or leave it out of quantize_ by filter_fn or a pattern. On the plain module "
    "lowbit.train.prepare_(module, scheme) trains in low bits, lowbit.qat.prepare_ with fake quantization"
)


def asks_for_gradient(func: Any, args: Any, kwargs: Any) -> bool:
    """True if `func` is `requires_grad_`, which changes nothing here and warns for a parameter, but not for a tensor,
    on which `load_state_dict(assign=True)` calls it. Raises NotImplementedError for `requires_grad = True`."""
    if func is Tensor.requires_grad_:
        asked = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if asked and isinstance(args[0], nn.Parameter):
            warnings.warn(
                f"requires_grad_() leaves {type(args[0]).__name__} frozen: codes have no gradient, and no optimizer "
                f"trains them. {_WAYS_TO_TRAIN}",
                stacklevel=1,  # this line, so that all weights together warn once
            )
        return True
    if func == _SET_REQUIRES_GRAD and args[1]:
        raise args[0]._unsupported(f"requires_grad=True: codes have no gradient. {_WAYS_TO_TRAIN}")
    return False

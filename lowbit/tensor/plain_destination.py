"""Warns where `load_state_dict` copies low-bit tensors into plain parameters.

torch copies into the parameters that a module has, so a float model stays one, in silence: "all keys matched". Only the
caller distinguishes such a load from other copies (an optimizer's, an average's, a user's own).
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import OrderedDict
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lowbit.tensor.base import LowbitTensor

_MODULES = "torch.nn.modules.module"
_last: weakref.ref[Any] | None = None  # the state dict of the load that was told of last


def warn_of_load(dst: Tensor, src: LowbitTensor) -> None:
    """A UserWarning, once a load, if this copy of `src` is part of a `load_state_dict`."""
    copying = caller_of(sys._getframe(1), _MODULES, "_load_from_state_dict")
    loading = caller_of(copying, _MODULES, "load_state_dict")
    if copying is None or loading is None or copying.f_locals.get("key") is None:
        return
    global _last
    state_dict = loading.f_locals.get("state_dict")
    if _last is not None and _last() is state_dict:
        return
    if isinstance(state_dict, OrderedDict):  # made anew for each load
        _last = weakref.ref(state_dict)
    depth, frame = 1, sys._getframe(1)
    while frame is not loading and frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(
        "load_state_dict copies the values of low-bit tensors into plain parameters, so the model stays in high "
        f"precision: {copying.f_locals['key']} is a {type(src).__name__} in the state dict and {dst.dtype} in the "
        "model. For a low-bit model call load_state_dict(state_dict, assign=True); if its values are what you want, "
        "call .dequantize() on the low-bit tensors of the state dict first",
        UserWarning,
        stacklevel=depth + 2,
    )


def caller_of(frame: FrameType | None, module: str, function: str) -> FrameType | None:
    """The nearest frame of that module's function, from this one outwards."""
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return frame
        frame = frame.f_back
    return None

"""States of the optimizers of torchao and bitsandbytes, as lowbit's optimizers hold them.

Both store blocks of a flattened parameter, lowbit blocks of its rows. Where blocks of rows are the same blocks, and the
table is the same, codes and scales stay as they are: 8 bits and float8 of a matrix whose columns are a multiple of 256.
All other states come as float32 values, which the optimizer rounds to its own format: lowbit has another table for 4
bits, bitsandbytes keeps small states in float32.

| here           | torchao          | bitsandbytes                                                    |
|----------------|------------------|-----------------------------------------------------------------|
| moments        | the same names   | signed ones `state1` (AdEMAMix: both, stacked), others `state2` |
| a state        | a tensor subclass | codes; `qmap1`, `absmax1` beside `state1`                      |
| SGD's momentum | -                | the first of `betas`                                            |

Nothing here imports either package. Reading such a file with torch.load needs the package that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lowbit.optim.state.state import like_param
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.frozen.codebook_tensor import FORMATS, CodebookTensor

WRAPPED = "__bnb_optimizer_quant_state__"
"""bitsandbytes puts its states under this key, so that FSDP leaves them alone."""

StateNames = Callable[[dict[str, Any]], Mapping[str, bool]]
"""Names of the moments of a group, and whether they have a sign."""


def translated(
    state_dict: Mapping[str, Any], groups: Sequence[dict[str, Any]], state_names: StateNames
) -> dict[str, Any]:
    """`state_dict` with states of torchao and bitsandbytes as `CodebookTensor` or float32. Anything else stays.

    Args:
        state_dict: of any optimizer.
        groups: those of the optimizer that loads it.
        state_names: likewise.

    Raises:
        ValueError: options or states of bitsandbytes that lowbit has no place for.
    """
    entries = dict(state_dict["state"])
    saved_groups = list(state_dict["param_groups"])
    if any(_is_of_bitsandbytes(entry) for entry in entries.values()):
        if len(saved_groups) == len(groups):
            pairs = zip(groups, saved_groups, strict=True)
            saved_groups = [_options(own, saved) for own, saved in pairs]
            names = chain.from_iterable([state_names(g)] * len(g["params"]) for g in groups)
            ids = chain.from_iterable(group["params"] for group in saved_groups)
            for key, moments in zip(ids, names, strict=False):
                if _is_of_bitsandbytes(entries.get(key)):
                    entries[key] = _moments(key, entries[key], moments)
    else:
        for key, entry in entries.items():
            if isinstance(entry, Mapping):
                entries[key] = {name: _of_torchao(value) for name, value in entry.items()}
    return {**state_dict, "state": entries, "param_groups": saved_groups}


# ---- torchao ------------------------------------------------------------------------------------------------


def _of_torchao(value: Any) -> Any:
    """A quantized state of torchao as a `CodebookTensor` or float32; anything else as it is."""
    part = local(value) if isinstance(value, Tensor) else value
    if not isinstance(part, Tensor) or isinstance(part, LowbitTensor):
        return value
    if not {"codes", "scale"} <= set(getattr(part, "tensor_attrs", ())):
        return value
    own: Any = part
    values = own.dequantize().float().reshape(part.shape)
    is_float8 = own.codes.dtype == torch.float8_e4m3fn
    codes = own.codes.view(torch.uint8) if is_float8 else own.codes
    table = None if is_float8 else own.qmap
    # float8 has a sign bit, so that torchao does not say whether values have a sign
    signed = getattr(own, "signed", bool((values < 0).any()))
    return like_param(value, _with_codes(values, codes, own.scale, table, signed))


# ---- bitsandbytes -------------------------------------------------------------------------------------------


def _is_of_bitsandbytes(entry: Any) -> bool:
    return isinstance(entry, Mapping) and bool({WRAPPED, "state1"} & set(entry))


def _options(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that lowbit has too, under lowbit's names."""
    kept = {name: value for name, value in saved.items() if name in own}
    if "momentum" in own and "momentum" not in saved and "betas" in saved:
        kept["momentum"] = saved["betas"][0]
    if "t_alpha_beta3" in own:
        t_alpha, t_beta3 = saved.get("t_alpha"), saved.get("t_beta3")
        if t_alpha != t_beta3:
            raise ValueError(
                f"the checkpoint of bitsandbytes has t_alpha={t_alpha!r} and t_beta3={t_beta3!r}, lowbit's AdEMAMix "
                "one t_alpha_beta3 for both; set both to one value in the checkpoint's param_groups"
            )
        kept["t_alpha_beta3"] = t_alpha
    return kept


def _moments(key: Any, entry: Mapping[str, Any], names: Mapping[str, bool]) -> dict[str, Any]:
    """The entry of a parameter of bitsandbytes under lowbit's names."""
    own = {name: value for name, value in entry.items() if name != WRAPPED}
    own |= entry.get(WRAPPED, {})
    if "max1" in own:
        raise ValueError(
            f"parameter {key}: the checkpoint of bitsandbytes has one scale a tensor (block_wise=False); accepted: its "
            "blockwise states, or 32-bit ones (optim_bits=32)"
        )
    found = {"step": own["step"]} if "step" in own else {}
    for number, signed in ((1, True), (2, False)):
        state = own.get(f"state{number}")
        moments = [name for name, has_sign in names.items() if has_sign == signed]
        if state is None:
            continue
        if not moments:  # the optimizer says which states it takes
            found[f"state{number}"] = state
            continue
        scale, table = own.get(f"absmax{number}"), own.get(f"qmap{number}")
        if len(moments) == 1:
            state = state[None]
            scale = None if scale is None else scale[None]
        for i, name in enumerate(moments[: len(state)]):
            codes = state[i]
            found[name] = codes if scale is None else _blockwise(codes, scale[i], table, signed)
    return found


def _blockwise(codes: Tensor, scale: Tensor, table: Any, signed: bool) -> Tensor:
    block = next((b for b in (256, 2048) if -(-codes.numel() // b) == scale.numel()), None)
    if block is None:
        raise ValueError(
            f"a state of bitsandbytes of shape {tuple(codes.shape)} has {scale.numel()} scales; accepted: one for each "
            "256 or 2048 elements"
        )
    each = scale.float().repeat_interleave(block)[: codes.numel()]
    values = table.float()[codes.flatten().int()] * each
    return _with_codes(values.view(codes.shape), codes, scale, table, signed)


# ---- both ---------------------------------------------------------------------------------------------------


def _with_codes(
    values: Tensor, codes: Tensor, scale: Tensor, table: Tensor | None, signed: bool
) -> Tensor:
    """`values`, float32, or a `CodebookTensor` of these codes and scales if it decodes to them.

    Args:
        codes: uint8, one an element, in the order of the flattened parameter.
        scale: one for each block of it.
        table: the values of the codes, ascending; None for float8.
    """
    format = "float8" if table is None else "8bit"
    block = FORMATS[format].block_size
    if codes.numel() != values.numel() or not values.numel() or values.numel() % block:
        return values
    own = CodebookTensor.zeros(values.shape, format, signed=signed, device=values.device)
    if own.codes.numel() != codes.numel() or own.scale.numel() != scale.numel():
        return values
    own.codes.copy_(codes.reshape(own.codes.shape))
    own.scale.copy_(scale.reshape(own.scale.shape))
    # Tables were computed in other orders and differ in the last bit.
    return own if torch.allclose(own.dequantize(), values, rtol=1e-6, atol=0.0) else values

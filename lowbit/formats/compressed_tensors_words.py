"""The words of "pack-quantized": codes of b bits in int32, in the two layouts that compressed-tensors has had.

| release      | a row of K codes                                               | words            |
|--------------|----------------------------------------------------------------|------------------|
| since 0.18.0 | "dense": a little-endian bit stream, where codes cross words   | ⌈K·b/32⌉         |
| up to 0.17.1 | "whole": 32 // b codes a word, whose highest bits stay empty   | ⌈K / (32 // b)⌉  |

The layouts differ for 3, 5, 6 and 7 bits, in rows of more than 32 // b codes. A reader of the other layout gets wrong
codes, without an error if both layouts need the same number of words, as for 40 codes of 3 bits. The file does not say
its layout, so lowbit goes by the number of words. If both need the same number, "version" of "quantization_config"
decides: the release of compressed-tensors that wrote the folder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import optional
from lowbit.formats.base import FormatError, Parts
from lowbit.formats.integers import words_of
from lowbit.numerics.packing import pack

DENSE_SINCE = "0.18.0"
"""The first release of compressed-tensors that reads and writes the layout "dense"."""
_WHOLE_UNTIL = "0.17.1"


def crosses_words(bits: int) -> bool:
    """True if a code of so many bits may lie in two words of "dense"."""
    return 32 % bits != 0


def in_dense_words(parts: Parts, bits: int, version: Any) -> None:
    """Put the codes and zero points of a weight into the layout "dense".

    Args:
        parts: those of a weight of `bits` bits, in either layout; changed in place.
        version: of "quantization_config"; None if it has no version.

    Raises FormatError if no layout has this number of words, or both have it and `version` does not decide.
    """
    packed, zeros = parts.get("weight_packed"), parts.get("weight_zero_point")
    if packed is None or packed.dtype is not torch.int32 or not crosses_words(bits):
        return
    rows, columns = _shape(parts["weight_shape"])
    streams = {"weight_packed": (columns, packed)}
    if zeros is not None and zeros.dtype is torch.int32:
        streams["weight_zero_point"] = (rows, zeros.T)
    if _is_dense([*streams.values()], bits, version):
        return
    made = {
        name: words_of(pack(_whole_codes(words, size, bits), bits))
        for name, (size, words) in streams.items()
    }
    if "weight_zero_point" in made:
        made["weight_zero_point"] = made["weight_zero_point"].T.contiguous()
    parts.update(made)


def _shape(part: Tensor) -> tuple[int, int]:
    """(N, K). Raises FormatError for another `weight_shape`."""
    shape = tuple(part.flatten().tolist())
    if len(shape) != 2 or min(shape) < 0:
        raise FormatError(f"its weight_shape is {shape}; accepted: (N, K)")
    return shape


def _whole_codes(words: Tensor, size: int, bits: int) -> Tensor:
    """Unsigned codes uint8 [..., size] of words that hold whole codes."""
    shifts = bits * torch.arange(32 // bits, dtype=torch.int32)
    codes = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)[..., :size].contiguous()


def _is_dense(streams: Sequence[tuple[int, Tensor]], bits: int, version: Any) -> bool:
    """True if the words [..., W] of rows of so many codes are in the layout "dense"."""
    fits = [
        dense
        for dense in (True, False)
        if all(words.shape[-1] == _count(size, bits, dense) for size, words in streams)
    ]
    if not fits:
        raise FormatError("; ".join(_takes(size, bits, words) for size, words in streams))
    if len(fits) == 1 or all(size <= 32 // bits for size, _ in streams):
        return fits[0]
    if isinstance(version, str) and re.match(r"\d+\.\d+\.\d+", version):
        if optional.release(version) >= optional.release(DENSE_SINCE):
            return True
        # Builds between the two releases, such as 0.17.2.a20260401, may have either layout.
        if optional.release(version) <= optional.release(_WHOLE_UNTIL):
            return False
    raise FormatError(
        f"its codes of {bits} bits have as many words in both layouts of compressed-tensors, a bit stream since "
        f"{DENSE_SINCE} and whole codes up to {_WHOLE_UNTIL}, and the version {version!r} of quantization_config does "
        "not say the layout: set it in config.json to that of the compressed-tensors that wrote the folder"
    )


def _count(size: int, bits: int, dense: bool) -> int:
    """Words of a row of so many codes."""
    return -(-size * bits // 32) if dense else -(-size // (32 // bits))


def _takes(size: int, bits: int, words: Tensor) -> str:
    dense, whole = (_count(size, bits, dense) for dense in (True, False))
    return (
        f"{size} codes of {bits} bits take {dense} words of int32, or {whole} up to compressed-tensors {_WHOLE_UNTIL}, "
        f"got {tuple(words.shape)}"
    )

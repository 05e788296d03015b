"""Tensor maps: matrices described for the tensor memory accelerator (TMA) of sm_90."""

from __future__ import annotations

import functools
from typing import Any


def takes_rows(stride: int, row: int) -> bool:
    """True if the TMA can read rows of `row` bytes that begin `stride` bytes apart."""
    return stride % 16 == 0 and stride >= row


@functools.lru_cache(maxsize=16384)
def tensor_map(
    address: int, size: int, rows: int, columns: int, stride: int, box: int, width: int
) -> Any:
    """A tensor map of `rows` x `columns` elements of `size` bytes at `address`, copied in boxes of `box` x `width`.

    Rows of a box are swizzled over their 32, 64 or 128 bytes, except those of other widths and elements of 8 bytes. A
    map owns no memory and depends only on the arguments, so maps are cached.

    Raises:
        RuntimeError: CUDA refuses the map; the message describes the map.
    """
    from cuda.bindings import driver

    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    promotion = driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE  # rows are long
    swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
    if size < 8:
        promotion = driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
        swizzle = {
            32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
            64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
            128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        }.get(width * size, swizzle)
    error, encoded = driver.cuTensorMapEncodeTiled(
        {
            1: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2: types.CU_TENSOR_MAP_DATA_TYPE_UINT16,
            4: types.CU_TENSOR_MAP_DATA_TYPE_UINT32,
            8: types.CU_TENSOR_MAP_DATA_TYPE_UINT64,
        }[size],
        2,
        address,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(stride * size)],
        [driver.cuuint32_t(width), driver.cuuint32_t(box)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        promotion,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error) != 0:
        raise RuntimeError(
            f"CUDA cannot describe {rows} x {columns} of {size} bytes at {address:#x}, rows {stride} apart: {error!r}"
        )
    return encoded

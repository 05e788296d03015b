"""NF4, MXFP4 and NVFP4 against bitsandbytes and compressed-tensors: each decodes what the other stores, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lowbit as lb
from lowbit.numerics.lookup_table import DYNAMIC8, NF4
from lowbit.numerics.scale_format import absmax_of_rows, flat_absmax

torch.set_num_threads(1)


def weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)


@pytest.fixture(scope="module")
def bnb():
    pytest.importorskip("bitsandbytes")
    from bitsandbytes import functional

    return functional


@pytest.fixture(scope="module")
def ct():
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, utils

    return QuantizationArgs, utils


def of_bitsandbytes(packed: Tensor) -> Tensor:
    """The bytes of bitsandbytes, which has even elements in the high nibble, as lowbit's."""
    return (packed & 15) << 4 | packed >> 4


def test_tables_are_those_of_bitsandbytes(bnb):
    nf4 = bnb.get_4bit_type("nf4", device="cpu")
    assert torch.equal(nf4, torch.tensor(NF4.values))
    assert torch.equal(bnb.create_dynamic_map(), torch.tensor(DYNAMIC8.values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 256), (7, 64), (33, 192)])
def test_nf4_is_that_of_bitsandbytes(bnb, shape, dtype):
    w = weight(*shape, dtype)
    packed, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4")
    t = lb.AffineTensor.from_float(w, lb.NF4WeightOnly())
    assert torch.equal(t.scale.flatten(), state.absmax)
    assert torch.equal(t.codes.flatten(), of_bitsandbytes(packed.flatten()))
    assert torch.equal(t.dequantize(), bnb.dequantize_4bit(packed, state))


@pytest.mark.parametrize("shape", [(64, 256), (48, 11008), (40, 2880), (3, 64 * 300)])
def test_double_quantization_is_that_of_bitsandbytes(bnb, shape):
    w = weight(*shape)
    packed, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=True)
    t = lb.AffineTensor.from_float(w, lb.NF4WeightOnly(double_quantization=True))
    groups, flat = shape[1] // 64, state.state2.absmax
    scales = {
        "scale": state.absmax.view(shape[0], groups),
        "scale_absmax": absmax_of_rows(flat, shape[0], groups),
        "scale_offset": state.offset.view(1, 1),
    }
    assert torch.equal(flat_absmax(scales["scale_absmax"], groups), flat)
    codes = of_bitsandbytes(packed.flatten()).view(t.codes.shape)
    theirs = lb.TableTensor(codes, scales, t.spec, w.shape, w.dtype)
    assert torch.equal(theirs.dequantize(), bnb.dequantize_4bit(packed, state))
    torch.testing.assert_close(t.scale_offset, scales["scale_offset"], rtol=1e-5, atol=0)
    error = (t.dequantize() - w).square().mean(), (theirs.dequantize() - w).square().mean()
    assert error[0] <= error[1] * 1.0001  # codes here are the nearest under the stored scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_scales_are_those_of_compressed_tensors(ct, dtype):
    _, utils = ct
    absmax = torch.cat([weight(64, 64).abs().flatten(), torch.tensor([6.9, 7.0, 7.5, 8.0, 1.0])])
    w = torch.zeros(len(absmax), 32, dtype=dtype)
    w[:, 5] = absmax
    t = lb.AffineTensor.from_float(w, lb.MXFP4WeightOnly())
    theirs = utils.generate_mx_scales(w.abs().amax(1), num_bits=4)
    assert torch.equal(t.scale.flatten(), theirs.to(torch.uint8))


@pytest.mark.parametrize("preset", [lb.MXFP4WeightOnly, lb.NVFP4WeightOnly])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp4_decodes_as_compressed_tensors(ct, preset, dtype):
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    w = weight(48, 256, dtype)
    t = lb.AffineTensor.from_float(w, preset())
    values = unpack_fp4_from_uint8(t.codes, *w.shape, dtype=torch.float32)
    group = t.spec.granularity.group_size
    args, _ = ct
    args = args(num_bits=4, type="float", strategy="group", group_size=group)
    scale = t.scale.float()
    if t.global_scale is None:
        scale = 2.0 ** (scale - 127)
    whole = None if t.global_scale is None else t.global_scale.flatten()
    theirs = dequantize(values, scale, args=args, global_scale=whole, dtype=torch.float32)
    assert torch.equal(t.dequantize(), theirs.to(dtype))


def test_nvfp4_quantizes_as_compressed_tensors(ct):
    make_args, utils = ct
    args = make_args(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True,
        scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    w = weight(32, 256)
    whole = utils.generate_gparam(w.min(), w.max())
    most = w.view(32, 16, 16).abs().amax(-1)
    scale, _ = utils.calculate_qparams(-most, most, args, whole)
    t = lb.AffineTensor.from_float(w, lb.NVFP4WeightOnly())
    torch.testing.assert_close(
        t.global_scale.flatten(), whole, rtol=3e-7, atol=0
    )  # there rounded twice
    assert torch.equal(t.scale.float(), scale.float())

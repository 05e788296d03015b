"""Words of 3, 5, 6 and 7 bits, which compressed-tensors packed otherwise up to 0.17.1: neither is read as the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import Int1WeightOnly, Int2WeightOnly, Int4WeightOnly, IntxWeightOnly
from lowbit.formats import FormatError
from lowbit.formats.compressed_tensors_words import in_dense_words
from lowbit.formats.registry import by_name
from tests.formats.codec_case import NAME
from tests.formats.models import build, low_bit

CT = by_name("compressed-tensors")
BITS = pytest.mark.parametrize("bits", range(1, 9))
SIZES = pytest.mark.parametrize(
    ("rows", "columns"), [(16, 128), (40, 20), (11, 30), (20, 40), (7, 64), (33, 9), (4, 96)]
)


def words(codes: Tensor, bits: int, whole: bool) -> Tensor:
    """Unsigned codes [R, K] as int32 [R, W], one code after another."""
    rows, columns = codes.shape
    each = 32 // bits
    count = -(-columns // each) if whole else -(-columns * bits // 32)
    found = [[0] * count for _ in range(rows)]
    for row in range(rows):
        for k, code in enumerate(codes[row].tolist()):
            at = 32 * (k // each) + bits * (k % each) if whole else bits * k
            for bit in range(bits):
                found[row][(at + bit) // 32] |= (code >> bit & 1) << (at + bit) % 32
    return torch.tensor([[w - 2**32 * (w >> 31) for w in row] for row in found]).int()


def stored(
    bits: int, rows: int, columns: int, whole: bool, zeros: bool
) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """Parts and settings of a weight with rows of one scale, and its values."""
    torch.manual_seed(0)
    middle = 2 ** (bits - 1)
    codes = torch.randint(0, 2**bits, (rows, columns))
    points = torch.randint(0, 2**bits, (rows, 1)) if zeros else torch.full((rows, 1), middle)
    scale = torch.rand(rows, 1)
    parts = {
        "weight_packed": words(codes, bits, whole),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if zeros:
        parts["weight_zero_point"] = words(points.T, bits, whole).T.contiguous()
    args = {"num_bits": bits, "type": "int", "symmetric": not zeros, "strategy": "channel"}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": args}}
    return parts, config, (codes - points) * scale


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "asymmetric"])
@SIZES
@BITS
def test_both_layouts(bits: int, rows: int, columns: int, zeros: bool) -> None:
    zeros = zeros or bits == 1  # which lowbit has with zero points only
    for whole, versions in ((True, ("0.17.1", "0.9.4")), (False, ("0.18.0", "1.0.0.a20270101"))):
        parts, config, wanted = stored(bits, rows, columns, whole, zeros)
        for version in versions:
            found = CT.read(parts, {**config, "version": version}, NAME, torch.float32)
            assert torch.equal(found.dequantize(), wanted)


@SIZES
@BITS
def test_the_number_of_words_decides_where_it_differs(bits: int, rows: int, columns: int) -> None:
    """Where it does not, a version that does not either is refused: no values, rather than other ones."""
    version = ([None, "0.17.2.a20260401", "dev", 18] * 2)[bits - 1]
    for whole in (False, True):
        parts, config, wanted = stored(bits, rows, columns, whole, True)
        counts = [
            [t.shape for t in stored(bits, rows, columns, own, True)[0].values()]
            for own in (False, True)
        ]
        differ = bits in (3, 5, 6, 7) and max(rows, columns) > 32 // bits
        if differ and counts[0] == counts[1]:
            with pytest.raises(FormatError, match="to that of the compress"):
                CT.read(parts, {**config, "version": version}, NAME, torch.float32)
            continue
        found = CT.read(parts, {**config, "version": version}, NAME, torch.float32)
        assert torch.equal(found.dequantize(), wanted)


def test_the_words_decide_against_the_version() -> None:
    """A folder saved again has the version of the program that saved it last."""
    for whole, version in ((True, "0.20.0"), (False, "0.17.1")):
        parts, config, wanted = stored(3, 16, 128, whole, False)
        found = CT.read(parts, {**config, "version": version}, NAME, torch.float32)
        assert torch.equal(found.dequantize(), wanted)


def test_other_numbers_of_words() -> None:
    parts, config, _ = stored(3, 16, 128, False, False)
    parts["weight_packed"] = parts["weight_packed"][:, 1:]
    with pytest.raises(FormatError, match="128 codes of 3 bits take 12 words of int32, or 13 up"):
        CT.read(parts, config, NAME, torch.float32)
    with pytest.raises(FormatError, match="weight_shape"):
        in_dense_words({**parts, "weight_shape": torch.tensor([16])}, 3, None)


WRITTEN = {
    "int2 half-integer": (Int2WeightOnly(), "3 bits"),
    "int3": (IntxWeightOnly(3, 64), "3 bits"),
    "int5 asymmetric": (IntxWeightOnly(5, 64, "asymmetric"), "5 bits"),
    "int6": (IntxWeightOnly(6), "6 bits"),
    "int7": (IntxWeightOnly(7), "7 bits"),
    "int1 half-integer": (Int1WeightOnly(), None),
    "int4": (Int4WeightOnly(64), None),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_least_version_that_reads_what_is_written(name: str, tmp_path: Path) -> None:
    scheme, bits = WRITTEN[name]
    report = lowbit.export(low_bit(scheme), tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config.get("version") == (None if bits is None else "0.18.0")
    if bits is None:
        assert report.notes == []
        return
    (note,) = report.notes
    assert note.startswith(f"codes of {bits}: compressed-tensors >= 0.18.0 reads them")
    assert note in str(report)
    lowbit.load_pretrained(tmp_path / "out", build(1))

#!/usr/bin/env bash
# compressed-tensors 0.20.0 unpacks weights of 3 bits that 0.17.1 packed as other codes, without an error.
#
# Up to 0.17.1 a word of 32 bits held 32 // 3 = 10 whole codes. Since 0.18.0 the codes are one bit stream. The tensors
# have the same names and dtype, and the settings are the same. One would guess that a reader tells the layouts apart: by
# "version" in the quantization_config, which every release writes, or by the number of words, 13 for 12 at 128 inputs.
# Neither is looked at: the bit stream is read out of whatever words there are. Widths of 5, 6 and 7 bits are alike;
# those of 2, 4 and 8 bits did not change.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.3.5' 'compressed-tensors==0.20.0'
"$work/venv/bin/pip" install -q --no-deps --target "$work/old" 'compressed-tensors==0.17.1'
cat > "$work/case.py" <<'EOF'
import sys

import torch
from compressed_tensors import __version__
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Compressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

verb, path = sys.argv[1:]
args = QuantizationArgs(num_bits=3, type="int", symmetric=True, strategy="channel")
scheme = QuantizationScheme(targets=["Linear"], weights=args)
if verb == "pack":
    found = {}
    for inputs in (40, 128):
        codes = (torch.arange(inputs) % 8 - 4).repeat(8, 1).float()
        found[inputs] = codes, Compressor.compress(
            {"weight": codes, "weight_scale": torch.ones(8, 1)}, scheme
        )
    torch.save(found, path)
else:
    for inputs, (codes, parts) in torch.load(path, weights_only=False).items():
        own = Compressor.decompress(parts, scheme)["weight"]
        wrong = int((own != codes)[0].sum())
        print(f"{__version__}: {inputs} inputs, {parts['weight_packed'].shape[1]} words: {wrong} codes of a row are wrong")
        assert (wrong > 0) == (verb == "unpack-other"), "the behaviour changed"
EOF
old() { PYTHONPATH="$work/old" "$work/venv/bin/python" "$work/case.py" "$@"; }
new() { "$work/venv/bin/python" "$work/case.py" "$@"; }
old pack "$work/old.pt"
old unpack-own "$work/old.pt"
new unpack-other "$work/old.pt"
new pack "$work/new.pt"
new unpack-own "$work/new.pt"

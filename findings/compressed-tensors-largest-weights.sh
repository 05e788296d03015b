#!/usr/bin/env bash
# compressed-tensors 0.20.0: in a symmetric integer scheme the largest weight of each group is rounded as badly as a
# number can be, by half a step, whatever the weights are. The scale is the largest magnitude over 7.5 in 4 bits (1.5,
# 3.5 and 127.5 in 2, 3 and 8), with codes from -8 to 7: 1.0 comes back as 0.933, and -1.0 as -0.933. In 2 bits 1.0 is
# 0.667 and -1.0 is -1.333. llm-compressor's W4A16 and W8A8 store such scales.
#
# One would guess that the largest weight of a group is the one number that is exact, since the scale is made from it:
# over 7, as in ModelOpt and Brevitas, or with a sign over 8, as in llama.cpp and AutoRound. The other weights win a bit
# by it (their steps are 7% smaller), and the largest, which count most, pay for it.
#
# Exits non-zero if that changes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'compressed-tensors==0.20.0'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams

torch.manual_seed(0)
ends = torch.tensor([[-0.5, 1.0], [-1.0, 0.5]])
normal = torch.randn(4096, 32)
ENDS = {2: (0.667, -1.333), 3: (0.857, -0.857), 4: (0.933, -0.933), 8: (0.996, -0.996)}
for bits, (positive, negative) in ENDS.items():
    args = QuantizationArgs(num_bits=bits, symmetric=True, strategy="channel")

    def rounded(weight, args=args):
        scale, zero = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), args)
        return fake_quantize(weight, scale, zero, args), scale

    found, _ = rounded(ends)
    values, scale = rounded(normal)
    steps = ((values - normal) / scale).abs()
    largest = steps.gather(1, normal.abs().argmax(1, keepdim=True))
    ends_found = torch.stack([found[0, 1], found[1, 0]])
    print(f"{bits} bits: 1.0 and -1.0 -> {ends_found.tolist()}; steps off of normal weights: ", end="")
    print(f"largest of a group {float(largest.min()):.3f} to {float(largest.max()):.3f}, all {float(steps.mean()):.3f}")
    torch.testing.assert_close(ends_found, torch.tensor([positive, negative]), atol=1e-3, rtol=0)
    torch.testing.assert_close(largest, torch.full_like(largest, 0.5), atol=1e-3, rtol=0)
PYTHON

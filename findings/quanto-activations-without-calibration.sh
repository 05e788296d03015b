#!/usr/bin/env bash
# optimum-quanto 0.2.7: quantize(model, weights=qint8, activations=qint8), used without the context Calibration, runs
# and rounds every activation to whole numbers: the scale of activations that were never seen is 1. Of inputs of size 1
# the output of two layers has a relative error of 1.0 here, and of 0.014 with Calibration. Nothing warns, freeze
# included.
#
# One would guess an error, or activations left in high precision until a range is known, as torch's observers and the
# static schemes of other packages do.
#
# Exits non-zero if the uncalibrated model is refused or exact.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'optimum-quanto==0.2.7'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import warnings

import torch
from optimum.quanto import Calibration, freeze, qint8, quantize
from torch import nn

torch.manual_seed(0)
x = torch.randn(32, 256)


def error(calibrated):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
    plain = model(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize(model, weights=qint8, activations=qint8)
        if calibrated:
            with Calibration():
                model(x)
        freeze(model)
        y = model(x)
    scales = [round(model[i].input_scale.item(), 4) for i in (0, 2)]
    about = [str(w.message) for w in caught if "calibrat" in str(w.message).lower()]
    return ((y - plain).norm() / plain.norm()).item(), scales, about


for calibrated in (True, False):
    size, scales, about = error(calibrated)
    name = "calibrated" if calibrated else "not calibrated"
    print(f"{name}: relative error {size:.3f}, scales of inputs {scales}, warnings {about}")
    assert size < 0.03 if calibrated else size > 0.5 and scales[0] == 1 and not about
PYTHON

"""Write `linear_moments.pt` and `linear_moments_dcp/` in this folder: states whose 4-bit second moments are linear.

    python -m tests.data.write_linear_moments

Earlier versions stored these moments as i / 16. The files were written by the last of them and are kept as they are;
every later version loads the values beside them (tests/optim/test_linear_moments.py).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from lowbit import optim

FOLDER = Path(__file__).resolve().parent


def trained() -> tuple[nn.Parameter, optim.AdamW]:
    generator = torch.Generator().manual_seed(3)
    param = nn.Parameter(torch.randn(32, 128, generator=generator).bfloat16())
    optimizer = optim.AdamW4bit([param], lr=0.01)
    for _ in range(3):
        param.grad = torch.randn(32, 128, generator=generator).bfloat16()
        optimizer.step()
    return param, optimizer


if __name__ == "__main__":
    param, optimizer = trained()
    state = optimizer.state[param]
    content = {
        "optimizer": optimizer.state_dict(),
        "expected": state["exp_avg_sq"].dequantize(),
    }
    torch.save(content, FOLDER / "linear_moments.pt")
    dcp.save({"state": dict(state)}, checkpoint_id=FOLDER / "linear_moments_dcp")

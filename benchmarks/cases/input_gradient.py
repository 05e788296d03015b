"""Cases of `lowbit_kernels.weight_only.input_gradient`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.formats import FORMATS, Format


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    format: Format
    m: int
    n: int
    k: int
    group_size: int | None = None
    dtype: torch.dtype = torch.bfloat16
    leading: tuple[int, ...] = ()
    """Dimensions of the gradient before M."""
    large: bool = False

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """grad, codes, scale, zero_point, group_size, size, global_scale, bits, table."""
        grad = torch.randn(*self.leading, self.m, self.n, device=device).to(self.dtype)
        weight = self.format.weight(self.n, self.k, self.group_size, device)
        tensors = (grad, weight["codes"], weight["scale"], weight["zero_point"])
        last = (weight["global_scale"], weight["bits"], weight["table"])
        return (*tensors, weight["group_size"], self.k, *last)


_NAMED = {format.name: format for format in FORMATS}
_TRAINED = ("nf4", "int4", "mxfp4")
"""The formats of a frozen base that adapters train over."""
CASES = [
    *(Case(format.name, format, 5, 24, 96) for format in FORMATS),
    *(Case(f"{f.name}-float32", f, 3, 7, 75, 25, torch.float32) for f in FORMATS),
    Case("no-rows", _NAMED["nf4"], 0, 8, 64),
    Case("no-columns", _NAMED["int4"], 4, 8, 0, 32),
    Case("no-outputs", _NAMED["int4"], 4, 0, 64, 32),
    Case("leading", _NAMED["nvfp4"], 3, 16, 48, leading=(2,)),
    Case("float16", _NAMED["nf4"], 3, 16, 70, dtype=torch.float16),
    *(
        Case(f"{name} {m} x {n} x {k}", _NAMED[name], m, n, k, large=True)
        for name in _TRAINED
        for m, n, k in ((2048, 14336, 4096), (8192, 4096, 14336))
    ),
]

"""What a conversion did to a model, weight by weight, and to how much of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import nn
from torch.distributed.tensor import DTensor

from lowbit.tensor.base import LowbitTensor


@dataclass(frozen=True)
class Entry:
    """One weight: its fully qualified name, shape, what became of it, and why.

    nbytes: what it takes now. Of a tied weight, only the first entry has them.
    """

    fqn: str
    shape: tuple[int, ...]
    converted: bool
    note: str
    nbytes: int = 0


@dataclass
class Report:
    """What a conversion did: `print(report)`, or read `converted` and `left`.

    Attributes:
        entries: every weight of two or more dimensions that was looked at.
        parameters: elements of all parameters of the model.
        low_bits: how many of them are now stored in low bits.
        prepared: how many are kept in high precision, with products in low bits.
        nbytes: what all parameters take now.
        vectors: how many parameters of fewer than two dimensions there are, such as biases and norms.
        vector_nbytes: what these take.
    """

    entries: list[Entry] = field(default_factory=list)
    parameters: int = 0
    low_bits: int = 0
    prepared: int = 0
    nbytes: int = 0
    vectors: int = 0
    vector_nbytes: int = 0

    @property
    def converted(self) -> list[str]:
        """Fully qualified names of the weights that were converted."""
        return [e.fqn for e in self.entries if e.converted]

    @property
    def left(self) -> dict[str, str]:
        """Fully qualified name → reason, of the weights that were left alone."""
        return {e.fqn: e.note for e in self.entries if not e.converted}

    def count(self, model: nn.Module) -> Self:
        """Fill in the numbers from `model` as it is now. Returns the report."""
        self.parameters = self.low_bits = self.prepared = 0
        self.nbytes = self.vectors = self.vector_nbytes = 0
        sizes: dict[str, int] = {}
        for name, param in model.named_parameters():  # tied ones once
            if isinstance(param, nn.UninitializedParameter):
                continue
            size = _nbytes(param)
            sizes[name] = size
            self.parameters += param.numel()
            self.nbytes += size
            local = param.to_local() if isinstance(param, DTensor) else param
            if isinstance(local, LowbitTensor):
                if local.updated_in_place() is None:
                    self.low_bits += param.numel()
                else:
                    self.prepared += param.numel()
            elif param.ndim < 2:
                self.vectors += 1
                self.vector_nbytes += size
        self.entries = [replace(e, nbytes=sizes.get(e.fqn, 0)) for e in self.entries]
        return self

    def _share(self, part: int, whole: int) -> str:
        share = 100 * part / whole if whole else 0.0
        return "<0.1%" if 0 < share < 0.05 else f"{share:.1f}%"

    def __str__(self) -> str:
        count = len(self.converted)
        head = f"{count} weights converted, {len(self.entries) - count} left alone"
        if self.parameters:
            share = self._share(self.low_bits, self.parameters)
            head += f"; {share} of {self.parameters:,} parameters are now in low bits"
        if self.prepared:
            head += f", {self._share(self.prepared, self.parameters)} have low-bit products"
        lines = [head]
        width = max((len(e.fqn) for e in self.entries), default=0)
        for e in self.entries:
            mark = "+" if e.converted else "-"
            share = f"{self._share(e.nbytes, self.nbytes):>6} of bytes" if e.nbytes else ""
            share = share or ("counted above" if self.parameters and e.shape else "")
            shape = "x".join(map(str, e.shape))
            lines.append(f"  {mark} {e.fqn:<{width}}  {shape:<14}  {share:>15}  {e.note}")
        if self.vectors:
            share = self._share(self.vector_nbytes, self.nbytes)
            lines.append(f"    and {self.vectors} vectors (biases, norms): {share} of bytes")
        return "\n".join(lines)


def _nbytes(param: Any) -> int:
    """Bytes of the whole parameter, also where it is sharded."""
    if not isinstance(param, DTensor):
        return param.nbytes_stored() if isinstance(param, LowbitTensor) else param.nbytes
    local = param.to_local()
    if not isinstance(local, LowbitTensor) or local.numel() == 0:
        return param.numel() * param.element_size()
    return local.nbytes_stored() * param.numel() // local.numel()

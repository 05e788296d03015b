"""lowbit's kernels: plain tensors in, plain tensors out. This package does not know lowbit.

Each module below is one op: it holds the function of its name, which is also ``torch.ops.lowbit.<name>``. On CUDA an op
runs a device kernel, in CUDA C++ or Triton; elsewhere it runs PyTorch ops, which give the same bits unless the op's
docstring says otherwise.

    import lowbit_kernels as kernels

    kernels.dequantize.dequantize(codes, scale, group_size=128, size=4096, dtype=torch.bfloat16)

A module, and Triton with it, is imported at its first use.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowbit_kernels.composed import (
        add_low_rank,
        dynamic_linear,
        expert_linear,
        gated_linear,
        grouped_linear,
        linear_gradients,
        linear_output,
    )
    from lowbit_kernels.decoding import (
        argmax_rows,
        decode_attention,
        gated_activation,
        quantize_to_cache,
        quantized_attention,
        rms_norm,
        token_input,
        top_experts,
        weighted_sum,
    )
    from lowbit_kernels.elementwise import block_hadamard, fake_quantize, scale_matrices
    from lowbit_kernels.invariant import (
        invariant_activation,
        invariant_attention,
        invariant_linear,
        invariant_norm,
        invariant_rotary,
    )
    from lowbit_kernels.matmul import (
        batched_mm,
        block_scaled_mm,
        grouped_block_mm,
        grouped_scaled_mm,
        scaled_mm,
        ternary_mm,
    )
    from lowbit_kernels.quantize import (
        int4_to_int8,
        quantize_blocks,
        quantize_experts,
        quantize_flat,
        quantize_grouped,
        quantize_rowcol,
        round_columns,
        round_rows,
        transpose_codes,
    )
    from lowbit_kernels.weight_only import dequantize, input_gradient, weight_linear

__all__ = [
    "add_low_rank",
    "argmax_rows",
    "batched_mm",
    "block_hadamard",
    "block_scaled_mm",
    "decode_attention",
    "dequantize",
    "dynamic_linear",
    "expert_linear",
    "fake_quantize",
    "gated_activation",
    "gated_linear",
    "grouped_block_mm",
    "grouped_linear",
    "grouped_scaled_mm",
    "input_gradient",
    "int4_to_int8",
    "invariant_activation",
    "invariant_attention",
    "invariant_linear",
    "invariant_norm",
    "invariant_rotary",
    "linear_gradients",
    "linear_output",
    "quantize_blocks",
    "quantize_experts",
    "quantize_flat",
    "quantize_grouped",
    "quantize_rowcol",
    "quantize_to_cache",
    "quantized_attention",
    "rms_norm",
    "round_columns",
    "round_rows",
    "scale_matrices",
    "scaled_mm",
    "ternary_mm",
    "token_input",
    "top_experts",
    "transpose_codes",
    "weight_linear",
    "weighted_sum",
]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        (path,) = Path(__file__).parent.glob(f"*/{name}.py")
        module = importlib.import_module(f"{__name__}.{path.parent.name}.{name}")
        globals()[name] = module  # the next access finds it without a call
        return module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its ops are {__all__}")

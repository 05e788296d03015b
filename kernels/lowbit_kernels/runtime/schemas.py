"""The schema of every op, by the module that computes it.

A saved program, such as a package of AOTInductor, names its ops, and torch loads it only when they are defined. So
`lowbit_kernels.runtime.library` defines all of them when `lowbit` is imported. It imports a module, and Triton with it,
only when one of its ops is first called.
"""

from __future__ import annotations

SCHEMAS: dict[str, tuple[str, ...]] = {
    "add_low_rank": (
        "add_low_rank(Tensor w, Tensor[] a, Tensor[] b, float[] scales) -> Tensor",
        "low_rank_gradients(Tensor grad, Tensor a, Tensor b, float scale) -> (Tensor, Tensor)",
    ),
    "batched_mm": (
        "batched_mm(Tensor a, Tensor b, Tensor? addend=None, bool symmetric=False, float alpha=1.0, "
        "float beta=0.0, float gamma=0.0, ScalarType? out_dtype=None) -> Tensor",
    ),
    "block_scaled_mm": (
        "block_scaled_mm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias=None, "
        "ScalarType out_dtype=bfloat16) -> Tensor",
    ),
    "dequantize": (
        "dequantize(Tensor codes, Tensor scale, Tensor? zero_point, int group_size, SymInt size, "
        "ScalarType dtype) -> Tensor",
    ),
    "dynamic_linear": (
        "dynamic_linear(Tensor x, Tensor codes, Tensor scale, Tensor? bias, Tensor? residual, "
        "bool tensorwise=False) -> Tensor",
    ),
    "fake_quantize": (
        "fake_quantize(Tensor x, Tensor? scale, Tensor? zero_point, SymInt group_size, str "
        "grid_name, ScalarType scale_dtype, ScalarType dtype, bool inside=False, Tensor? after=None) -> "
        "(Tensor, Tensor)",
        "fake_quantize_codes(Tensor x, SymInt group_size, str grid_name, ScalarType scale_dtype, "
        "ScalarType code_dtype, bool clips) -> (Tensor, Tensor, Tensor)",
        "fake_quantize_gradients(Tensor grad, Tensor x, Tensor scale, Tensor? zero_point, SymInt "
        "group_size, str grid_name, bool constant_codes) -> (Tensor, Tensor, Tensor)",
    ),
    "grouped_linear": (
        "grouped_linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero_point, Tensor offsets,"
        " int group_size) -> Tensor",
    ),
    "grouped_scaled_mm": (
        "grouped_scaled_mm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor offsets, "
        "ScalarType out_dtype=bfloat16) -> Tensor",
    ),
    "linear_gradients": (
        "linear_gradients(Tensor grad, str format, Tensor? weight, Tensor? weight_scale, Tensor? x, "
        "Tensor? x_scale, bool stochastic=False, SymInt seed=0, bool tensorwise=False, "
        "ScalarType dtype=bfloat16) -> "
        "(Tensor, Tensor)",
    ),
    "linear_output": (
        "linear_output(Tensor x, Tensor x_scale, Tensor weight, str format, bool tensorwise, Tensor? "
        "bias, ScalarType out_dtype) -> Tensor",
    ),
    "normalize_matrices": (
        "normalize_matrices(Tensor x, float eps, ScalarType? out_dtype=None) -> Tensor",
    ),
    "quantize_blocks": (
        "quantize_blocks(Tensor x, bool tiles, bool rows=True, bool columns=True, bool "
        "power_of_two=False) -> (Tensor, Tensor, Tensor, Tensor)",
    ),
    "quantize_experts": (
        "quantize_experts(Tensor weight, str format, bool transposed=False, Tensor? scale=None) "
        "-> (Tensor, Tensor)",
    ),
    "quantize_grouped": (
        "quantize_grouped(Tensor x, Tensor offsets, str format, bool rows=True, bool "
        "columns=True, Tensor? seed=None, Tensor? row_factor=None) -> (Tensor, Tensor, Tensor, "
        "Tensor)",
    ),
    "quantize_rowcol": (
        "quantize_rowcol(Tensor x, str format, bool rows=True, bool columns=True, bool "
        "tensorwise=False, Tensor? seed=None, Tensor? row_factor=None, bool row_scales=False) -> "
        "(Tensor, Tensor, Tensor, Tensor)",
    ),
    "round_rows": (
        "round_rows(Tensor values, Tensor? old, Tensor? largest, Tensor? first, SymInt start) -> "
        "(Tensor, Tensor)",
    ),
    "scaled_mm": (
        "scaled_mm(Tensor a, Tensor b, Tensor a_scale, Tensor? b_scale, Tensor? bias=None, "
        "ScalarType out_dtype=bfloat16) -> Tensor",
    ),
    "ternary_mm": (
        "ternary_mm(Tensor a, Tensor packed, Tensor a_scale, Tensor b_scale, Tensor? bias, "
        "ScalarType out_dtype) -> Tensor",
    ),
    "transpose_codes": ("transpose_codes(Tensor codes, SymInt k, Tensor? after=None) -> Tensor",),
    "weight_linear": (
        "weight_linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero_point, Tensor? bias, "
        "Tensor? residual, int group_size) -> Tensor",
    ),
}

"""Number formats, granularities, scales and rounding: arithmetic on plain tensors, without kernels."""

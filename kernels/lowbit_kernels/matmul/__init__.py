"""Products of two operands in low bits."""

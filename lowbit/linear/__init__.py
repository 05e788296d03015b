"""The products of low-bit weights, trained (this folder) and frozen (`frozen/`)."""

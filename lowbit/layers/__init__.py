"""Modules with parameters of their own beside a low-bit weight: learned scales, static inputs, shared scales."""

"""Weights that an optimizer trains."""

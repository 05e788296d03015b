"""Ops that launch several kernels of the other folders."""

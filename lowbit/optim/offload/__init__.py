"""Optimizer states in host memory."""

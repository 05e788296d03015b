"""Ops that round a matrix to codes and scales."""

"""Weights for inference, and states of optimizers: codes and scales that do not train."""

"""Schemes of inference and QAT, their usual presets, schemes of training."""

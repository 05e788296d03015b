"""Formats that hold a program beside its weights, for runtimes other than PyTorch's eager mode."""

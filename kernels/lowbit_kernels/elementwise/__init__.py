"""Ops that read and write each element once: optimizer steps, fake quantization, random bits."""

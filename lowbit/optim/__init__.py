"""Optimizers whose states take few bits: drop-in replacements for those of torch.optim."""

from lowbit.optim.adam import Adam, Adam4bit, Adam8bit, AdamFp8
from lowbit.optim.adamw import AdamW, AdamW4bit, AdamW8bit, AdamWFp8
from lowbit.optim.base import CommonOptions, dequantize_state_dict

__all__ = [
    "Adam",
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "CommonOptions",
    "dequantize_state_dict",
]

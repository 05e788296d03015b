"""Optimizers whose states take few bits: drop-in replacements for those of torch.optim."""

from lowbit.optim.adam import (
    Adam,
    Adam4bit,
    Adam8bit,
    AdamFp8,
    AdamW,
    AdamW4bit,
    AdamW8bit,
    AdamWFp8,
)
from lowbit.optim.ademamix import AdEMAMix, AdEMAMix4bit, AdEMAMix8bit, AdEMAMixFp8
from lowbit.optim.base import LowbitOptimizer
from lowbit.optim.in_backward import step_in_backward
from lowbit.optim.lion import Lion, Lion4bit, Lion8bit, LionFp8
from lowbit.optim.muon import Muon, Muon4bit, Muon8bit, MuonFp8
from lowbit.optim.offload.offload import CPUOffloadOptimizer
from lowbit.optim.options import CommonOptions
from lowbit.optim.qk_clip import qk_clip_
from lowbit.optim.sgd import SGD, SGD4bit, SGD8bit, SGDFp8
from lowbit.optim.soap import SOAP, SOAP4bit, SOAP8bit, SOAPFp8
from lowbit.optim.state.checkpoint import dequantize_state_dict

__all__ = [
    "SGD",
    "SOAP",
    "AdEMAMix",
    "AdEMAMix4bit",
    "AdEMAMix8bit",
    "AdEMAMixFp8",
    "Adam",
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "CPUOffloadOptimizer",
    "CommonOptions",
    "Lion",
    "Lion4bit",
    "Lion8bit",
    "LionFp8",
    "LowbitOptimizer",
    "Muon",
    "Muon4bit",
    "Muon8bit",
    "MuonFp8",
    "SGD4bit",
    "SGD8bit",
    "SGDFp8",
    "SOAP4bit",
    "SOAP8bit",
    "SOAPFp8",
    "dequantize_state_dict",
    "qk_clip_",
    "step_in_backward",
]

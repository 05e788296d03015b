"""Adapters of PEFT beside low-bit weights, merged into their codes."""

"""What a user asks for: schemes of inference and QAT, their usual presets, schemes of training."""

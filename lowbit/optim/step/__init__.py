"""How a step runs: in one kernel, or piece by piece in PyTorch."""

"""lowbit: train, fine-tune and convert PyTorch models in 8 bits and fewer."""

__version__ = "0.1.0"

"""lowbit: train, fine-tune and convert PyTorch models in 8 bits and fewer."""

"""The format in which each product of a model ran, and statistics of the inputs of layers."""

"""Ops whose results have the same bits on every device, for any batch, padding and split of the work."""

"""What each product of a model ran in, and statistics of what layers read."""

"""States of optimizers: their formats, checkpoints, and states of other libraries."""

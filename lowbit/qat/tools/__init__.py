"""Tools around QAT: training block by block, and distillation."""

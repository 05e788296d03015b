"""Tools around QAT: training block by block, distillation, sensitivities and plans."""

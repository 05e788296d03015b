"""Products of plain inputs with weights in low bits, and the values of such weights."""

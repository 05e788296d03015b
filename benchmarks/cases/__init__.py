"""Arguments of the kernels, op by op: random calls that the tests and the benchmarks both iterate."""

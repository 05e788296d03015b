"""What lowbit's speed is, against what one would use without it and against what the memory allows.

    python -m benchmarks --list
    python -m benchmarks dequantize --out benchmarks/results
    python -m benchmarks optimizer_step --only Llama --skip torchao

A benchmark is one module here that registers a function with ``@benchmark``; see ``registry``. Everything is timed in
one process on one GPU, which is also where the copy bandwidth under every "floor" is measured; only ``train_fsdp`` has
two, a process each. A peer that isn't installed is a line of the table that says so. What was predicted, and what came
of it, is in ``LOG.md``.
"""

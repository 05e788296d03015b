"""Speed and memory of lowbit, compared with the alternatives and with the limit of the memory's bandwidth.

    python -m benchmarks --list
    python -m benchmarks dequantize --out benchmarks/results
    python -m benchmarks optimizer_step --only Llama --skip torchao

A benchmark is a module here that registers a function with ``@benchmark``; see ``registry``. Everything runs in one
process on one GPU, where the run also measures the copy bandwidth behind every "floor". Only ``train_fsdp`` uses two
GPUs, with one process each. For a peer that is not installed, the table says so. ``cases`` holds the arguments of the
kernels. ``LOG.md`` records what was expected and what was found.
"""

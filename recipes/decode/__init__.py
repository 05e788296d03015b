"""How fast a Llama-3.1-8B-shaped model decodes in bf16, int8 and int4: `python -m recipes.decode`.

Random weights, made on the GPU and quantized there layer by layer; a static key/value cache. Each block is compiled,
and a whole step (all blocks, the head, the choice of the next token) is one CUDA graph that feeds itself: no host
between tokens. In the low-bit rows q, k and v are one product, gate and up another, and the products that end in the
residual stream add it themselves. What runs between the linears are ops of `lowbit_kernels.decoding`, as in
`lowbit.hf.generate`, which takes models of transformers. Without a GPU a tiny model runs through the same code,
uncompiled, in seconds.

    __main__.py   the program: settings, the rows of the table, measurement, the page
    decoder.py    the model's step over a static cache
    tinygemm.py   int4 linears in torch's own kernel, to compare with
"""

"""How fast a Llama-3.1-8B-shaped model decodes in bf16, int8 and int4: `python -m recipes.decode`.

Random weights, made on the GPU and quantized there layer by layer; a static key/value cache; each block compiled, and
a whole step (all blocks, the head, the choice of the next token) captured in one CUDA graph, which feeds itself: no
host between tokens. Attention and silu are launches that overlap with those around them, and do what is left of the
norms, whose weights the linears have. In the low-bit rows q, k and v are one product, gate and up another, and the
residual is added inside the products that end in it. Without a GPU a tiny model runs through the same code, uncompiled,
in seconds.

    config.py          what is measured: presets, and the rows of the table
    decoder.py         the model's step over a static cache
    fold_norms.py      the norms' weights into the linears
    next_position.py   attention and silu of one new position, the choice of the next; the kernels are in
                       attention.py and kernels.py
    tinygemm.py        int4 linears in torch's own kernel, to compare with
    capture.py         a function captured in a CUDA graph
    measure.py         builds, quantizes, times
    report.py          the page
"""

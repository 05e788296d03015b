"""Does training in few bits reach the same loss? One model trained again and again, one thing changed each time.

    python -m recipes.convergence --preset gpu [--runs fp32,4bit] [--seeds 0,1,2] [--minutes 9]
    python -m recipes.convergence --report DIR

The model, the text, the batches and the learning rate are the quick start's (`recipes.quickstart`). Every run computes
with bfloat16 weights and activations; what differs is what the optimizer updates and how it keeps its states:

    fp32, 8bit, float8, 4bit                        float32 weights, rounded to bfloat16 for each forward pass;
                                                    AdamW's states in that format
    bf16-nearest, bf16-stochastic, bf16-corrected   bfloat16 weights and nothing else, AdamW's states in float32;
                                                    the new weight rounded to nearest, stochastically, or with the
                                                    bits below bfloat16 kept in one more byte
    int8-products, float8-products                  as fp32, and the products of the blocks' linear layers, forward
                                                    and backward, in 8 bits (`lowbit.train`)
    int8-weights                                    the blocks' weights are int8 and nothing else
    bitnet                                          as fp32, the blocks' weights ternary in every product

Runs of one seed begin with the same weights and see the same batches, so their difference is taken seed by seed.

    runs.py       the runs and the presets
    train.py      one run
    results.py    finished runs, one JSON object a line, and their statistics
    report.py     the table and the curves
"""

"""The quick start: one program that takes text to a trained, fine-tuned and converted low-bit language model.

    python -m recipes.quickstart [--preset tiny|small|gpu] [--data FILE_OR_FOLDER] [--out DIR] [--resume [DIR]]

Read it in this order; each file is one part of the journey:

    config.py     the settings, a preset per function
    data.py       files → held-out split → byte-pair tokenizer → batches
    train.py      AdamW4bit; a shared trunk, then branches in high precision and with QAT
    measure.py    round, convert, save, measure, and measure again from the files in a fresh process
    evaluate.py   perplexity, speed, samples; also a command of its own
    figures.py    loss curves, bar chart
    report.py     report.md and report.html
    run.py        all of it, in order

and, beside them, folder.py (files of a run), tracking.py (metrics), interrupt.py (Ctrl-C).

Why the models part late: rounding a model is compared with training it rounded, and a fair comparison gives
both the same tokens. So every branch repeats the same last steps, and differs in the rounding alone.
"""

"""Published models in packed weights: opened as they are, trained, and written back into the published folder.

Each recipe is one file: `python -m recipes.packed.NAME --model FOLDER --out DIR`. They need
`pip install -e ".[finetune]"`. docs/packed.md says what works with which format.
"""

from lowbit import optional

optional.check("recipes.packed needs", ["transformers", "peft", "tokenizers"], "finetune")

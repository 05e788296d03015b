"""Generate with a model of transformers in int4: its own loop, and lowbit's, which gives the same tokens.

    python examples/generate.py

Needs transformers (`pip install "lowbit[hf]"`). The model is a tiny Llama that learns to count.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lowbit
import lowbit.hf
from lowbit import Int4WeightOnly

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=32,
    bos_token_id=None,
    eos_token_id=None,
)
model = LlamaForCausalLM(config)
optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=3e-3)
for _ in range(60):
    start = torch.randint(config.vocab_size, (16, 1))
    counting = (start + torch.arange(24)) % config.vocab_size
    model(counting, labels=counting).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

print(lowbit.quantize_(model.eval(), Int4WeightOnly(group_size=32)))
prompt = torch.tensor([[3, 4, 5, 6], [20, 21, 22, 23]])
by_transformers = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
tokens = lowbit.hf.generate(model, prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
print(tokens.tolist())
assert torch.equal(tokens, by_transformers)
assert torch.equal(tokens, (prompt[:, :1] + torch.arange(16)) % config.vocab_size)

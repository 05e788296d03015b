#!/usr/bin/env bash
# transformers 5.23.0: model.generate(..., streamer=s, custom_generate=f) with a function f puts the prompt into the
# streamer and does not pass the streamer on. f gets no streamer, so s hears the prompt alone and is never ended, without a
# warning: the arguments of a generation mode are replaced by those that f has beyond transformers' own sampling loop.
#
# One would guess that f, whose signature is that of the sampling loop, gets the streamer as that loop does. A function that
# wants it has to look into the frame of its caller.
#
# Exits non-zero if the function gets the streamer.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.23.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import torch
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).eval()


class Heard:
    def __init__(self):
        self.puts, self.ended = 0, False

    def put(self, value):
        self.puts += 1

    def end(self):
        self.ended = True


def custom(model, input_ids, streamer=None, **arguments):
    custom.got = streamer
    return GenerationMixin._sample(model, input_ids, streamer=streamer, **arguments)


tokens = torch.tensor([[3, 4, 5]])
settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
plain, hooked = Heard(), Heard()
model.generate(tokens, **settings, streamer=plain)
model.generate(tokens, **settings, streamer=hooked, custom_generate=custom)
print(f"plain: {plain.puts} puts, ended {plain.ended}")
print(f"custom_generate: {hooked.puts} puts, ended {hooked.ended}, the function got {custom.got}")
assert plain.puts == 6 and plain.ended
assert hooked.puts == 1 and not hooked.ended and custom.got is None
PYTHON

"""Serve folders by vLLM's whole engine, in a process of its own, and print the tokens.

    python -m tests.integrations.vllm_engine '[["folder", {"dtype": "float32"}]]'
    python -m tests.integrations.vllm_engine '[["folder", {"dtype": "float32"}, "127.0.0.1:29612"]]'

Each line of the output that begins with "served " has the new tokens of each prompt of a folder, and the logarithms of
their probabilities. With an address, the engine then loads the weights that `lowbit.sync.send` sends there, serves them
too, and goes on until its trainer leaves.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

PROMPTS = [[5, 6, 7, 8, 9, 10], [100, 200, 300], [11] * 17]
NEW = 12


def generated(engine: Any) -> list[Any]:
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=0
    )
    prompts: list[Any] = [{"prompt_token_ids": one} for one in PROMPTS]
    found = [output.outputs[0] for output in engine.generate(prompts, greedy)]
    return [
        [list(one.token_ids) for one in found],
        [[next(iter(step.values())).logprob for step in one.logprobs or ()] for one in found],
    ]


def served(folder: str, options: dict[str, Any], address: str | None = None) -> Iterator[list[Any]]:
    from vllm import LLM

    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        disable_log_stats=True,
        enable_prefix_caching=False,  # keys and values of the weights before
        **options,
    )
    yield generated(engine)
    if address is not None:
        from lowbit import sync

        group = sync.connect(address, rank=1, size=2)

        def load(worker: Any) -> None:
            worker.reload_weights(weights_iterator=sync.receive(group))

        engine.collective_rpc(load)
        yield generated(engine)
    engine.llm_engine.engine_core.shutdown()


def main() -> None:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    for folder, options, *address in json.loads(sys.argv[1]):
        # In one process, unless several share each layer.
        alone = options.get("tensor_parallel_size", 1) == 1
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if alone else "1"
        for found in served(folder, options, *address):
            print("served", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

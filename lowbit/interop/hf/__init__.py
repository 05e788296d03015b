"""lowbit in transformers 5: weights quantized while `from_pretrained` reads them, folders, a loop that generates,
and parts for its Trainer.

    from lowbit.hf import LowbitConfig

    config = LowbitConfig("int4", group_size=128)
    model = AutoModelForCausalLM.from_pretrained("model-bf16", quantization_config=config)
    model.save_pretrained("model-int4")                             # the format "lowbit" of lowbit.export
    model = AutoModelForCausalLM.from_pretrained("model-int4")      # the same logits

Importing this package registers lowbit with transformers. `import lowbit` alone is enough for `from_pretrained` to read
such a folder: `lowbit.interop.pretrained` imports this package then, and when a flow changes a model of transformers.
The parts for the Trainer are imported by `lowbit.hf` alone: transformers imports PEFT for them, and that bitsandbytes,
which takes seconds.
"""

from lowbit import optional
from lowbit.interop.pretrained import make_room

optional.check("lowbit.hf needs", ["transformers"], "hf")
make_room()

from lowbit.interop.hf.config import LowbitConfig  # noqa: E402
from lowbit.interop.hf.decoding import generate  # noqa: E402
from lowbit.interop.hf.kv_cache import KVCache  # noqa: E402
from lowbit.interop.hf.quantizer import LowbitQuantizer  # noqa: E402

__all__ = ["KVCache", "LowbitConfig", "LowbitQuantizer", "generate"]

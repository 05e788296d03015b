"""lowbit in transformers 5: weights quantized while `from_pretrained` reads them, folders, and parts for its Trainer.

    from lowbit.hf import LowbitConfig

    config = LowbitConfig("int4", group_size=128)
    model = AutoModelForCausalLM.from_pretrained("model-bf16", quantization_config=config)
    model.save_pretrained("model-int4")                             # the format "lowbit" of lowbit.export
    model = AutoModelForCausalLM.from_pretrained("model-int4")      # the same logits

Importing this package registers lowbit with transformers, which must happen before `from_pretrained` reads such a
folder. Nothing else in lowbit imports it.
"""

from lowbit.hf.installed import check_installed

check_installed()

from lowbit.hf.config import LowbitConfig  # noqa: E402
from lowbit.hf.quantizer import LowbitQuantizer  # noqa: E402
from lowbit.hf.training import QATCallback, optimizer  # noqa: E402

__all__ = ["LowbitConfig", "LowbitQuantizer", "QATCallback", "optimizer"]

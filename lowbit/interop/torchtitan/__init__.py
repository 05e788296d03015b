"""lowbit in torchtitan: optimizers, training schemes, QAT and metrics as lines of its configuration.

With torchtitan 0.2, `--job.custom_config_module lowbit.torchtitan` adds them to any of its language models:

    --optimizer.name AdamW8bit        an optimizer of lowbit.optim
    --lowbit.train int8               products in int8; or float8, int8_weights, int4_weights, bitnet
    --lowbit.qat "int4(group_size=32)"
    --lowbit.metrics_freq 10          lowbit's metrics at every 10th log

Importing this package imports torchtitan; nothing else in lowbit does.
"""

from lowbit import optional
from lowbit.interop.torchtitan.metrics import Measurement
from lowbit.interop.torchtitan.settings import Lowbit

optional.check("lowbit.torchtitan needs", ["torchtitan"], "torchtitan")
_IS_0_2 = optional.release(optional.version("torchtitan") or "")[:2] == (0, 2)
if _IS_0_2:
    from lowbit.interop.torchtitan.release_0_2 import JobConfig, LowbitConverter, with_lowbit
else:
    from lowbit.interop.torchtitan.release_0_3 import (  # type: ignore[assignment]
        LowbitConverter,
        with_lowbit,
    )

__all__ = ["Lowbit", "LowbitConverter", "Measurement", "with_lowbit"]
if _IS_0_2:
    __all__ += ["JobConfig"]

"""A plug-in of vLLM, which serves folders in lowbit's own format.

    vllm serve llama-int4            # written by save_pretrained or lowbit.export(…, format="lowbit")

vLLM finds `register` by the entry point "lowbit" of the group `vllm.general_plugins`, and calls it in each of its
processes. vLLM uses it for folders with `"quant_method": "lowbit"` in their config.json.

- `parts`: which parameters a layer needs for a weight, how they are cut and merged, and the weights that they make,
  without importing vLLM.
- `linear`: these parameters as vLLM's own classes, and the product.
- `config`: which layers have which weights.

The interfaces are those of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import logging

FIRST = "0.32"
"""The first release of vLLM whose interfaces the plug-in is tested with."""


def register() -> None:
    """Make vLLM know the method "lowbit". A second call changes nothing.

    vLLM calls the plug-ins of all installed packages for every model. So an older vLLM, whose interfaces differ, gets a
    warning, not an error.
    """
    try:
        from lowbit.interop.vllm import config
    except ImportError as error:
        logging.getLogger("vllm.lowbit").warning(
            "lowbit's plug-in needs the interfaces of vLLM %s, and the installed one differs (%s): folders with "
            "quant_method 'lowbit' are not served",
            FIRST,
            error,
        )
        return
    assert config.METHOD == "lowbit"

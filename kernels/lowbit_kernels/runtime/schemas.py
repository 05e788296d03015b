"""Writes ``schemas.txt``, the list of all ops that `library` defines, from the declarations of the modules.

python -m lowbit_kernels.runtime.schemas
"""

from __future__ import annotations

import lowbit_kernels
from lowbit_kernels.runtime import library


def derived() -> str:
    """The lines of ``schemas.txt``: the name of the module and the schema of each op that it declares."""
    modules = {name: vars(getattr(lowbit_kernels, name)) for name in lowbit_kernels.__all__}
    return "".join(
        f"{name} {value.schema}\n"
        for name, values in modules.items()
        for value in values.values()
        if hasattr(value, "overload") and value.__module__ == values["__name__"]
    )


if __name__ == "__main__":
    library.SCHEMAS.write_text(derived(), encoding="utf-8")

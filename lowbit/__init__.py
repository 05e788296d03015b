"""lowbit: train, fine-tune and convert PyTorch models in 8 bits and fewer.

Everything a user needs is here or in the four subpackages `lowbit.optim`, `lowbit.train`, `lowbit.qat` and
`lowbit.inference`. `lowbit.formats`, with `export` and `load_pretrained`, and `lowbit.sync` are imported when one of
them is first used.
"""

# ruff: noqa: E402, for the path comes before all other imports.
import sys

# `python -m lowbit` looks for modules in the working folder first, which may be that of a stranger's model. sys.argv
# begins with "-m" until Python has found the module, whose name stands before the arguments.
_IS_RUN = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("lowbit", "-mlowbit")
if _IS_RUN and not sys.flags.safe_path:
    del sys.path[0]

import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit import formats as formats
    from lowbit import surface
    from lowbit import sync as sync
    from lowbit.formats import export as export
    from lowbit.formats import load_pretrained as load_pretrained
    from lowbit.surface import *  # noqa: F403

    # The site reads this; mypy, which meets the module again while it reads `surface`, does not know the type yet.
    __all__ = ["export", "formats", "load_pretrained", "sync", *surface.__all__]  # type: ignore[has-type]

__version__ = "0.1.0"

_OF_FORMATS = ("export", "load_pretrained")
_LATER = (*_OF_FORMATS, "formats", "sync")


def __getattr__(name: str) -> Any:
    if name in _OF_FORMATS:
        return getattr(importlib.import_module("lowbit.formats"), name)
    if name in _LATER:
        return importlib.import_module(f"lowbit.{name}")
    if "lowbit.surface" not in sys.modules and (name == "__all__" or name[:2] != "__"):
        if importlib.util.find_spec(f"lowbit.{name}") is not None:
            return importlib.import_module(f"lowbit.{name}")
        give_out_names()
        if name in globals():
            return globals()[name]
    is_module = name[:1] != "_" and importlib.util.find_spec(f"lowbit.{name}") is not None
    hint = f": run `import lowbit.{name}` first" if is_module else ""
    raise AttributeError(f"module 'lowbit' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def give_out_names() -> None:
    """Import torch and all of lowbit, and give out the names of `lowbit.surface`."""
    names = importlib.import_module("lowbit.surface")
    globals().update({name: getattr(names, name) for name in names.__all__})
    globals()["__all__"] = sorted([*_LATER, *names.__all__])


def _is_command() -> bool:
    """True if this process is `python -m lowbit`, or the script `lowbit` that pip puts beside the interpreter.

    Its help and its errors about arguments come without the seconds that `import torch` takes.
    """
    if _IS_RUN:
        return True
    first = sys.argv[0] if sys.argv else ""
    script, suffix = os.path.splitext(os.path.basename(first))
    if script != "lowbit" or suffix not in ("", ".exe"):
        return False
    folders = os.path.dirname(os.path.realpath(first)), os.path.dirname(sys.executable)
    return all(map(os.path.isdir, folders)) and os.path.samefile(*folders)


if not _is_command():
    give_out_names()

"""The argument lists of optimizers in their docstrings, whole in every class, so that `help` and a console show them.

The common options are written once, in `CommonOptions`, and those of an algorithm once, in its class. The variants by
state format, such as `AdamW4bit`, take the list of that class.
"""

from __future__ import annotations

import inspect
import re

from lowbit.optim.options import CommonOptions

ARGS = re.compile(r"^Args:\n(?:(?: .*)?\n)*", re.MULTILINE)
"""The section `Args:` of a docstring without indentation, with the line breaks behind it."""


def described(cls: type) -> str | None:
    """The docstring of an optimizer with all its arguments; unchanged where the class lists none of its own.

    Args:
        cls: the class. Without `Args:` and `__init__` of its own, it takes the arguments of the class that it derives
            from. An entry `common` is followed by the options that it stands for.
    """
    own = vars(cls).get("__doc__")
    if not own:  # none was written, or Python runs with -OO
        return own
    text = inspect.cleandoc(own) + "\n"
    if ARGS.search(text) is None and "__init__" not in vars(cls):
        base = next(iter(cls.__bases__))
        inherited = ARGS.search((base.__doc__ or "") + "\n")
        text += "\n" + inherited[0] if inherited else ""
    elif (listed := ARGS.search(text)) and re.search(r"^    common:", listed[0], re.MULTILINE):
        end = listed.end()
        text = f"{listed[0].rstrip()}\n{_common()}".join(
            (text[: listed.start()], "\n" + text[end:])
        )
    return text.rstrip()


def _common() -> str:
    """The entries of `CommonOptions`, to be put behind those of an algorithm."""
    listed = ARGS.search(inspect.cleandoc(CommonOptions.__doc__ or "") + "\n")
    return "" if listed is None else listed[0].removeprefix("Args:\n").rstrip() + "\n"

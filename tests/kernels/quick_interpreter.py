"""Triton's interpreter with less work between a kernel's operations; the operations are the same.

The interpreter replaces the functions of `triton.language` at each launch, and again at each call of a `@jit` function
inside a kernel. The second replacement gives the same functions, and takes longer than most calls.
"""

from __future__ import annotations

import functools
from typing import Any

from triton import language
from triton.runtime import interpreter


def install() -> None:
    """Replace the functions once a launch, and look each dtype up once a process."""
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    numpy_dtype, dtypes = interpreter._get_np_dtype, {}
    replaced: set[frozenset[str]] = set()

    @functools.cache
    def modules_of(function: Any) -> frozenset[str]:
        """The modules whose functions the interpreter replaces for this one: those that its own module names."""
        own = [*function.__globals__.values()]
        modules = (language, language.core)
        return frozenset(m.__name__ for m in modules if any(value is m for value in own))

    def replace_once(function: Any) -> Any:
        if (modules := modules_of(function)) in replaced:
            return None  # only a launch uses what is returned, and it comes first
        replaced.add(modules)
        return replace(function)

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> Any:
        replaced.clear()  # the launch before has put the functions of Triton back
        return launch(self, *arguments, **options)

    def known_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = numpy_dtype(scalar)
        return dtypes[scalar.name]

    interpreter._patch_lang, interpreter._get_np_dtype = replace_once, known_dtype
    interpreter.GridExecutor.__call__ = launch_anew

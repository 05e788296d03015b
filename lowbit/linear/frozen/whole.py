"""Functions that torch.compile takes into a graph whole. The import brings the compiler along, so traced code imports
the modules that import this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._inductor.config

_F = TypeVar("_F", bound=Callable[..., Any])


def taken_whole(function: _F) -> _F:
    """`function`, which torch.compile does not look into, and whose graphs torch keeps on disk all the same: it keeps
    none that calls a function which it does not know. All that the function depends on must be in its arguments."""
    name = f"{function.__module__}.{function.__name__}"
    torch._inductor.config.unsafe_marked_cacheable_functions[name] = "1"
    return torch.compiler.allow_in_graph(function)

"""Which implementation of the step updated each parameter: PyTorch operations ("eager"), "fused cpu" or "fused cuda".

The implementations agree up to rounding. A run that resumes with another one (no compiler, a weight that is no longer
contiguous) may differ from an uninterrupted run in the last bit, a code by one. A state dict records the implementation
of each parameter in its attribute `_metadata`, as that of `nn.Module` does: it pickles, and other loaders ignore it.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowbit.optim.saved import parameter_names

KEY = "stepped_by"


class SteppedBy:
    """The implementation that last updated each parameter of an optimizer, by the parameter's index."""

    def __init__(self, last: Mapping[int, str] | None = None) -> None:
        self._last = dict(last or {})
        self._has_warned = False

    def note(self, groups: Sequence[Mapping[str, Any]], places: Iterable[int], by: str) -> None:
        """These parameters of `groups` are updated `by` this one now. Warns once if others updated some before."""
        places = list(places)
        changed = [place for place in places if self._last.get(place, by) != by]
        if changed and not self._has_warned:
            self._has_warned = True
            names = parameter_names(groups)
            first = ", ".join(names[place] for place in changed[:3])
            before = ", ".join(sorted({self._last[place] for place in changed}))
            warnings.warn(
                f"the optimizer's step of {len(changed)} parameters ({first}{', ...' * (len(changed) > 3)}) is {by!r} "
                f"now and was {before!r} before, or in the run that saved the checkpoint: they round differently, so "
                "results may differ from those of an uninterrupted run by a code, or in the last bit. fused=True says "
                "why a parameter has no compiled step",
                stacklevel=2,
            )
        self._last.update(dict.fromkeys(places, by))

    def attach(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with `_metadata`: {"stepped_by": {place: implementation}}."""
        made: Any = OrderedDict(state_dict)
        made._metadata = {KEY: dict(self._last)}
        return made


def read(state_dict: Any) -> SteppedBy:
    """What a state dict carries; nothing, where it carries none or what this version doesn't know."""
    metadata = getattr(state_dict, "_metadata", None)
    last = metadata.get(KEY) if isinstance(metadata, Mapping) else None
    if not isinstance(last, Mapping):
        return SteppedBy()
    return SteppedBy({place: by for place, by in last.items() if isinstance(by, str)})

"""The parts of `lowbit.hf` refuse wrong values of every argument by name."""

from __future__ import annotations

import pytest

from tests.test_wrong_arguments import ACCEPTED_ERRORS, INT4, WRONG, arguments

pytest.importorskip("transformers")

import lowbit.hf as hf


def test_wrong_arguments_are_named() -> None:
    for name in [p.name for p in arguments(hf.LowbitConfig)]:
        with pytest.raises(ACCEPTED_ERRORS, match=f"{name}|<wrong>|Wrong"):
            hf.LowbitConfig(**({"scheme": "int4"} | {name: WRONG}))
    for wrong in ("x", 1, None):
        with pytest.raises(TypeError, match="experts must be True or False"):
            hf.LowbitConfig("int4", experts=wrong)
    for name in ("scheme", "filter_fn", "convert", "start", "freeze_observers"):
        with pytest.raises(ACCEPTED_ERRORS, match=f"{name}|<wrong>"):
            hf.QATCallback(**({"scheme": INT4} | {name: WRONG}))

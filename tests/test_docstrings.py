"""`help()` describes every argument of every public function and class, and no argument that does not exist.

An argument stands in the list `Args:` (`Attributes:` of a dataclass), in backticks in the text, or in the list of
another object of lowbit that the text names in backticks. Ops of lowbit_kernels explain their arguments in the module.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lowbit
import lowbit_kernels
from lowbit.optim import CommonOptions, LowbitOptimizer

PACKAGES = [
    *("lowbit", "lowbit.optim", "lowbit.train", "lowbit.qat", "lowbit.inference", "lowbit.formats"),
    *("lowbit.sync", "lowbit.testing", "lowbit.hf", "lowbit.torchtitan"),
    *(
        "lowbit.peft",
        "lowbit.accelerate",
        "lowbit.lightning",
        "lowbit.vllm",
        "lowbit.axolotl",
    ),
]
NEEDS = {
    "lowbit.hf": "transformers",
    "lowbit.torchtitan": "torchtitan",
    "lowbit.lightning": "lightning",
    "lowbit.axolotl": "axolotl",
}
ENTRY = re.compile(r"^ {4}((?:\*{0,2}\w+, )*\*{0,2}\w+):(?= |$)", re.MULTILINE)
SECTION = re.compile(r"^(?:Args|Attributes):\n((?:(?: .*)?\n?)*)", re.MULTILINE)


def public(package: str) -> Iterator[tuple[str, Any]]:
    module = importlib.import_module(package)
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == package]
    for name in getattr(module, "__all__", [n for n in own if not n.startswith("_")]):
        if callable(found := getattr(module, name)):
            yield f"{package}.{name}", found


def parameters(found: Callable[..., Any]) -> list[str]:
    try:
        names = inspect.signature(found).parameters
        return [name for name in names if name != "self" and not name.startswith("_")]
    except ValueError:  # exceptions and other classes that take their constructor from C
        return []


def help_of(found: Any) -> str:
    """The docstrings that `help` shows: that of the function, or those of the class and of its constructor."""
    docs = [found.__doc__]
    if inspect.isclass(found):
        maker = next((c for c in found.__mro__ if {"__init__", "__new__"} & vars(c).keys()), object)
        docs += [getattr(maker, name).__doc__ for name in ("__init__", "__new__")]
    return "\n\n".join(inspect.cleandoc(doc) for doc in docs if doc)


def entries(text: str) -> set[str]:
    """The names that the argument lists of a docstring explain."""
    lists = "\n".join(SECTION.findall(text))
    return {name.strip("* ") for line in ENTRY.findall(lists) for name in line.split(",")}


def named(text: str) -> Iterator[Any]:
    """The objects of lowbit that `text` names in backticks."""
    for path in re.findall(r"`lowbit\.([\w.]+)`", text):
        found: Any = lowbit
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not None:
            yield found


def undescribed(found: Any, text: str) -> list[str]:
    known = entries(text).union(*(entries(help_of(other)) for other in named(text)))
    known |= set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", text))))
    return [name for name in parameters(found) if name not in known]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_argument_is_described(package: str) -> None:
    if package in NEEDS:
        pytest.importorskip(NEEDS[package])
    texts = {name: (found, help_of(found)) for name, found in public(package)}
    assert not [name for name, (found, _) in texts.items() if not found.__doc__]
    missing = {n: lacks for n, (found, t) in texts.items() if (lacks := undescribed(found, t))}
    assert not missing


@pytest.mark.parametrize("package", PACKAGES)
def test_no_argument_is_described_that_does_not_exist(package: str) -> None:
    if package in NEEDS:
        pytest.importorskip(NEEDS[package])
    unknown = {}
    for name, found in public(package):
        if inspect.isclass(found) and issubclass(found, dict):  # CommonOptions, and patterns
            continue
        listed = entries(re.sub(r"^Attributes:.*", "", help_of(found), flags=re.M | re.S))
        known = {*parameters(found), *(CommonOptions.__annotations__ if _optimizer(found) else ())}
        unknown |= {name: listed - known} if parameters(found) and listed - known else {}
    assert not unknown


def _optimizer(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, LowbitOptimizer)


OPTIMIZERS = [
    found
    for _, found in public("lowbit.optim")
    if _optimizer(found) and found is not LowbitOptimizer
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda found: found.__name__)
def test_an_optimizer_lists_every_argument_itself(optimizer: type[LowbitOptimizer]) -> None:
    """`help(lowbit.optim.AdamW4bit)` shows the common options too, though its source has one line."""
    listed = entries(optimizer.__doc__ or "")
    assert listed == {*parameters(optimizer), *CommonOptions.__annotations__}


def test_an_optimizer_of_a_user_keeps_its_docstring() -> None:
    class Own(lowbit.optim.AdamW):
        """One line."""

        def __init__(self, params: Any, speed: float) -> None:
            super().__init__(params, lr=speed)

    class Undocumented(lowbit.optim.AdamW):
        pass

    class Fixed(lowbit.optim.Lion):
        """Lion of its own state."""

        default_state = "bf16"

    assert (Own.__doc__ or "").strip() == "One line."
    assert Undocumented.__doc__ is None
    assert entries(Fixed.__doc__ or "") == entries(lowbit.optim.Lion.__doc__ or "")


@pytest.mark.parametrize("name", lowbit_kernels.__all__)
def test_an_op_of_the_kernels_describes_its_arguments(name: str) -> None:
    module = getattr(lowbit_kernels, name)
    op = getattr(module, name)
    text = f"{op.__doc__}\n{module.__doc__}"
    absent = [p for p in parameters(op) if not re.search(rf"(?<![\w.]){p}(?!\w)", text)]
    assert op.__doc__ and not absent

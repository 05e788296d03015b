"""What tests of prepared and converted models share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

import lowbit as lb
from lowbit.linear.frozen.codes_product import codes_product
from lowbit.linear.frozen.dequantized import plain_linear


@pytest.fixture
def plain_path() -> Iterator[None]:
    """The reference implementation in place of kernels, but not of products of codes, which training computes too."""

    def multiplies_values(x: Tensor, w: Any, b: Tensor | None) -> bool:
        return codes_product(x, w) is None

    lb.register_linear(multiplies_values, plain := lambda x, w, b: plain_linear(x, w, b))
    yield
    lb.unregister_linear(plain)

"""An op is declared once: its schema is its signature, and its checks and its fake follow from the declaration."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit_kernels
from lowbit_kernels.runtime import launches, library, schemas
from lowbit_kernels.runtime.op import op


def test_the_list_of_schemas_is_that_of_the_declarations() -> None:
    assert library.SCHEMAS.read_text() == schemas.derived(), (
        "write it: python -m lowbit_kernels.runtime.schemas"
    )


def test_a_schema_is_that_of_the_signature(product: Any) -> None:
    assert product.schema == (
        "declared_product(Tensor a, Tensor b, Tensor? bias=None, ScalarType out_dtype=float16) -> Tensor"
    )
    with pytest.raises(TypeError, match=r"odd: x must be one of Tensor, .*, got object"):

        @op("x")
        def odd(x: object) -> Tensor: ...


@pytest.fixture(scope="module")
def product() -> Any:
    @op(
        "empty(out_dtype, M, N)",
        name="declared_product",
        a="float|int8 [M, K]; flatten it",
        b="float|int8 [N, K]",
        bias="float32 [N] or [1]",
        out_dtype="half",
        rules={"K % 2 == 0": "K must be even, got {K}"},
        types={"a.dtype == b.dtype": "a and b differ, {a.dtype} and {b.dtype}"},
    )
    def function(
        a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float16
    ) -> Tensor:
        """The product."""
        out = a @ b.T
        return (out if bias is None else out + bias).to(out_dtype)

    return function


A, B = torch.ones(2, 4), torch.ones(3, 4)
WRONG: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((A.double(), B, None, torch.float16), TypeError, "takes a of .*, got torch.float64; flatten"),
    ((A[0], B, None, torch.float16), ValueError, r"takes a \[M, K\], got \(4,\); flatten it"),
    ((A, B[:, :2], None, torch.float16), ValueError, r"b \[N, K\], here \(3, 4\), got \(3, 2\)"),
    ((A, B, A[0], torch.float16), ValueError, r"bias \[N\] or \[1\], here \(3,\) or \(1,\), got"),
    ((A, B.to("meta"), None, torch.float16), ValueError, "a on cpu, b on meta; move"),
    ((A, B, None, torch.float32), TypeError, "out_dtype of torch.float16, .*, got torch.float32"),
    ((A[:, :3], B[:, :3], None, torch.float16), ValueError, "K must be even, got 3"),
    ((A, B.half(), None, torch.float16), TypeError, "differ, torch.float32 and torch.float16"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=lambda x: str(x)[:20])
def test_checks(
    product: Any, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    for bias in (None, torch.ones(1), torch.ones(3)):
        product.check(A, B, bias, torch.bfloat16)
    with pytest.raises(error, match=message):
        product.check(*arguments)
    with pytest.raises(TypeError, match="missing 1 required"):
        product(A)
    assert product.reference(A, B, None, torch.float16).tolist() == [[4.0] * 3] * 2
    assert product.__doc__ == "The product." and "bias" in inspect.signature(product).parameters


def test_dots_stand_for_leading_dimensions() -> None:
    @op(
        "empty(torch.float32, *x.shape)",
        name="declared_sum",
        x="float [..., K]",
        y="float [..., K]",
    )
    def function(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    x = torch.ones(2, 3, 4)
    function.check(x, x)
    function.check(x[0, 0], x[0, 0])
    with pytest.raises(ValueError, match=r"y \[\.\.\., K\], here \(2, 3, 4\), got \(3, 4\)"):
        function.check(x, x[0])
    with pytest.raises(ValueError, match=r"x \[\.\.\., K\], got \(\)"):
        function.check(x[0, 0, 0], x)


def test_an_op_without_a_kernel_computes_its_formula(product: Any) -> None:
    run, *_ = library._registered["declared_product"]
    with launches.counted() as calls:
        assert run(A, B, None, torch.float16).tolist() == [[4.0] * 3] * 2
    assert calls == {("declared_product", "torch"): 1}


def test_an_op_raises_where_an_operand_requires_a_gradient(product: Any) -> None:
    bias = torch.ones(3, requires_grad=True)
    says = r"declared_product has no gradient, and bias requires one; .*\.detach\(\)"
    for call in (
        product,
        torch.compile(product, backend="eager"),
    ):
        with pytest.raises(RuntimeError, match=says):
            call(A, B, bias=bias)
        with torch.no_grad():
            assert not call(A, B, bias=bias).requires_grad
        assert call(A, B, bias=bias.detach()).tolist() == [[5.0] * 3] * 2
    assert product.reference(A, B, bias, torch.float32).requires_grad


def test_torch_warns_where_a_backward_pass_reaches_an_op(product: Any) -> None:
    """A saved program calls it in grad mode."""
    bias = torch.ones(3, requires_grad=True)
    out = torch.ops.lowbit.declared_product(A, B, bias, torch.float16)
    assert out.tolist() == [[5.0] * 3] * 2
    with pytest.warns(UserWarning, match="declared_product: an autograd kernel was not registered"):
        out.sum().backward()
    assert bias.grad is None


LINES = [line.split(" ", 1) for line in library.SCHEMAS.read_text().splitlines()]
OPS = [(module, schema.partition("(")[0]) for module, schema in LINES]


@pytest.mark.parametrize(("module", "name"), OPS, ids=[name for _, name in OPS])
def test_no_op_detaches_in_silence(module: str, name: str) -> None:
    """The refusal comes before the checks, so operands without a meaning are enough."""
    function = getattr(getattr(lowbit_kernels, module), name)
    values = {"Tensor": A.clone().requires_grad_(), "List[Tensor]": [A], "List[float]": [1.0]}
    values |= {"str": "", "int": 1, "float": 1.0, "bool": False}
    schema = getattr(torch.ops.lowbit, name).default._schema
    given = {argument.name: values.get(str(argument.type)) for argument in schema.arguments}
    with pytest.raises(RuntimeError, match=f"{name} has no gradient, and "):
        function(**given)

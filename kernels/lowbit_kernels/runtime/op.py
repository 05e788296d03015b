"""Declares an op of ``torch.ops.lowbit`` once: one decorated function gives its signature, reference, checks and fake.

    @op(
        "empty(out_dtype, M, N)",
        a="int8 [M, K]",
        b="int8 [N, K]; pass it transposed",
        bias="float [N]",
        rules={"K % 16 == 0": "K must be a multiple of 16, got {K}; pad both operands with zeros"},
    )
    def product(a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype) -> Tensor:
        "The docstring for users, above the formula in PyTorch operations."

    @product.kernel
    def _launch(a, b, bias, out_dtype) -> Tensor: ...

`product` then calls the op, and ``product.reference`` computes the formula. The declaration of a tensor has its dtypes
(names of torch, or a key of `DTYPES`, with ``|`` between them) and its shape. The first use of a name in a shape binds
it, and later uses must equal it. Other dimensions are Python expressions; ``or`` stands between shapes that are all
accepted. ``...`` before other dimensions stands for any leading ones, the same in all shapes; ``[...]`` accepts every
shape. What follows ``;`` tells a user the way out. The result and the rules are expressions of the bound names, the
op's arguments and the globals of its module. All tensors must be on one device, and None passes where the signature has
it. An argument that is a dtype has no shape in its declaration. The kernel's arguments have the declared types. Neither
the kernel nor the functions that get them from it repeat these.

No op has a gradient: lowbit's layers have ``autograd.Function``s around them. The function of an op that gets a tensor
that requires a gradient, in grad mode, raises RuntimeError, on every device. Saved programs call ``torch.ops.lowbit``
itself, also in grad mode. That computes without autograd, and torch warns where a backward pass reaches it.

The declaration is compiled to one Python function, so a check costs the host what one written by hand costs. torch must
know the schema before the module of the op is imported, so ``schemas.txt`` lists all schemas
(`lowbit_kernels.runtime.schemas` writes it).
"""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, cast

import torch

from lowbit_kernels.runtime import launcher, library
from lowbit_kernels.runtime.launches import ran

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

DTYPES = {
    "float": library.FLOATS,
    "half": (torch.float16, torch.bfloat16),
    "codes": (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
}
"""Names of several dtypes."""

SCHEMA_TYPES = {
    **{name: name for name in ("Tensor", "str", "bool", "float")},
    **{"int": "SymInt", "torch.dtype": "ScalarType", "torch.dtype | None": "ScalarType?"},
    **{"Tensor | None": "Tensor?", "Sequence[Tensor]": "Tensor[]", "Sequence[float]": "float[]"},
}
"""The types of arguments in a schema, by the annotations of a declaration."""
REQUIRES = {
    "Tensor": "{0}.requires_grad",
    "Tensor | None": "({0} is not None and {0}.requires_grad)",
    "Sequence[Tensor]": "any(t.requires_grad for t in {0})",
}
"""True if an argument of this annotation requires a gradient."""
LEADING = "*leading_"
"""The dimensions that ``...`` stands for before others, in the compiled declaration."""


class Op(Protocol[P, R_co]):
    """A declared op. Calling it calls ``torch.ops.lowbit.<name>``, whose errors are those of its declaration: TypeError
    for other dtypes; ValueError for other shapes, sizes and names, and for tensors on several devices.

    Attributes:
        overload: the op itself, which takes its arguments by position.
        schema: its schema.
        reference: the decorated function with its arguments by position: the formula, on any device.
        check: raises the errors of the declaration; it takes all arguments by position.
        flops: the expression of its operations.
        kernel: decorator of the function that computes the op. It takes all arguments by position, checked. Where it
            returns None, and in an op without a kernel, the reference runs.
    """

    overload: Any
    schema: str
    reference: Callable[..., Any]
    check: Callable[..., Any]
    flops: str
    kernel: Callable[[Callable[..., Any]], Callable[..., Any]]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def op(
    results: str,
    *,
    name: str | None = None,
    planned: bool = False,
    rules: Mapping[str, str] | None = None,
    types: Mapping[str, str] | None = None,
    by_layout: bool = False,
    writes: Sequence[str] = (),
    flops: str = "0",
    **operands: str,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declare an op; the module's docstring says how.

    Args:
        results: an expression of the uninitialised results, in which ``empty(dtype, *shape)`` makes a tensor on the
            op's device.
        name: of the op; None: that of the decorated function.
        planned: the op has launch plans (see `launcher`).
        rules: conditions, each with the message of the ValueError where it does not hold, with expressions in braces.
            A function that raises the errors itself takes its own message, "".
        types: the same for a TypeError, after the rules.
        by_layout: the kernel checks operands itself, once for each layout.
        writes: the tensors that the op changes in place.
        flops: an expression of the multiplications and additions of a product in high precision of the same shapes, for
            torch's FlopCounterMode. Like torch's own formulas, it leaves element-wise operations out.
        operands: the dtypes and the shape of each tensor.
    """

    def declared(reference: Callable[P, R]) -> Op[P, R]:
        own = name or reference.__name__
        declaration = _Declaration(own, reference, operands, rules or {}, types or {}, writes)
        check, fake = declaration.compiled(None), declaration.compiled(results)
        count = declaration.compiled(flops)
        by_position = _by_position(reference, declaration)
        run, use = _running(own, check, by_position, declaration, by_layout)
        schema = declaration.schema()
        registered = (launcher.planned_op if planned else library.register)(
            schema, run, fake, count
        )
        found: Any = _calling(registered, declaration, planned)
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(found, attribute, getattr(reference, attribute))
        found.__signature__ = inspect.signature(reference)
        found.overload, found.schema, found.check = registered, schema, check
        found.kernel, found.reference, found.flops = use, by_position, flops
        return cast("Op[P, R]", found)

    return declared


def _calling(registered: Any, declaration: _Declaration, planned: bool) -> Callable[..., Any]:
    """The function for users, with the signature of the reference."""
    only = inspect.Parameter.KEYWORD_ONLY
    signature: list[str] = []
    for n, parameter in declaration.parameters.items():
        if parameter.kind is only and "*" not in signature:
            signature.append("*")
        signature.append(n if parameter.default is parameter.empty else f"{n}=defaults[{n!r}]")
    names = ", ".join(declaration.parameters)
    call = f"called(op, {names})" if planned else f"op({names})"
    code = f"lambda {', '.join(signature)}: {declaration.requires_gradient} and refuse({names}) or {call}"
    space = {"op": registered, "called": launcher.called, "defaults": declaration.defaults}
    space |= {"grad_mode": torch.is_grad_enabled, "refuse": declaration.refuse_gradient}
    return cast("Callable[..., Any]", eval(code, space))


def _by_position(reference: Callable[..., Any], declaration: _Declaration) -> Callable[..., Any]:
    """`reference` with all arguments by position."""
    only = inspect.Parameter.KEYWORD_ONLY
    kinds = {n: p.kind for n, p in declaration.parameters.items()}
    if only not in kinds.values():
        return reference
    given = ", ".join(f"{n}={n}" if kind is only else n for n, kind in kinds.items())
    code = f"lambda {declaration.arguments}: reference({given})"
    space = {"reference": reference, "defaults": declaration.defaults}
    return cast("Callable[..., Any]", eval(code, space))


def _running(
    name: str,
    check: Callable[..., Any],
    reference: Callable[..., Any],
    declaration: _Declaration,
    by_layout: bool,
) -> tuple[Callable[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """The function that computes the op, and the decorator that gives it the kernel."""
    defaults = tuple(declaration.defaults.values())
    total = len(defaults)
    kernel: Callable[..., Any] | None = None

    def run(*args: Any) -> Any:
        if len(args) < total:  # torch leaves out arguments that equal their defaults
            args = *args, *defaults[len(args) :]
        if not torch.is_grad_enabled():
            return computed(*args)
        with torch.no_grad():
            return computed(*args)

    def computed(*args: Any) -> Any:
        if not by_layout:
            check(*args)
        found = None if kernel is None else kernel(*args)
        if found is None:
            ran(name, "torch")
            return reference(*args)
        return found

    def use(function: Callable[..., Any]) -> Callable[..., Any]:
        nonlocal kernel
        kernel = function
        return function

    return run, use


class _Operand:
    """A declared tensor, as "float32 [M] or [1]; the way out", or dtype, as "float"."""

    def __init__(self, text: str) -> None:
        text, _, self.hint = (part.strip() for part in text.partition(";"))
        names, _, shapes = text.partition(" ")
        self.is_tensor = bool(shapes)
        each = shapes.split(" or ") if shapes else []
        lists = [cast("ast.List", ast.parse(shape.strip(), mode="eval").body) for shape in each]
        self.shapes = [[ast.unparse(dim) for dim in one.elts] for one in lists]
        for shape in self.shapes:
            if len(shape) > 1 and shape[0] == "...":
                shape[0] = LEADING
        self.text = shapes
        dtypes: list[torch.dtype] = []
        for name in names.split("|"):
            dtypes += DTYPES.get(name) or (getattr(torch, name),)
        self.dtypes = tuple(dtypes)


class _Declaration:
    """What `op` compiles: the function that checks the arguments of an op, and its fake, which also makes results."""

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        operands: Mapping[str, str],
        rules: Mapping[str, str],
        types: Mapping[str, str],
        writes: Sequence[str],
    ) -> None:
        self.writes = tuple(writes)
        parameters = inspect.signature(reference).parameters
        self.name, self.globals = name, reference.__globals__
        self.parameters = parameters
        self.returned = eval(str(reference.__annotations__["return"]), reference.__globals__)
        self.defaults = {n: p.default for n, p in parameters.items()}
        self.arguments = ", ".join(f"{n}=defaults[{n!r}]" for n in self.defaults)
        self.operands = {n: _Operand(text) for n, text in operands.items()}
        self._gradient_tests = {
            n: REQUIRES[p.annotation].format(n)
            for n, p in parameters.items()
            if p.annotation in REQUIRES
        }
        self._bound: set[str] = set()
        self._lines: list[str] = []
        pending = [("ValueError", *rule) for rule in rules.items()]
        pending += [("TypeError", *rule) for rule in types.items()]
        for n, operand in self.operands.items():
            lines = self._operand_lines(n, operand)
            if "None" in str(parameters[n].annotation):
                lines = [f"if {n} is not None:", *("    " + line for line in lines)]
            self._lines += lines
            pending = self._add_rules(pending)
        self._bound |= self.globals.keys() | self.defaults.keys()
        self._add_rules(pending, all_of_them=True)

    def _add_rules(
        self, rules: list[tuple[str, str, str]], all_of_them: bool = False
    ) -> list[tuple[str, str, str]]:
        """Let the rules follow whose names are sizes that are known by now. Returns the others."""
        left: list[tuple[str, str, str]] = []
        for error, condition, message in rules:
            nodes = ast.walk(ast.parse(condition))
            names = {node.id for node in nodes if isinstance(node, ast.Name)} - self.globals.keys()
            if not all_of_them and not names <= self._bound:
                left.append((error, condition, message))
                continue
            raised = f"broken({error}, {message!r}, locals())"
            self._lines.append(f"if not ({condition}): {raised}" if message else condition)
        return left

    def _operand_lines(self, name: str, operand: _Operand) -> list[str]:
        wrong = f"wrong({name!r}, locals())"
        if not operand.is_tensor:
            return [f"if {name} not in dtypes[{name!r}]: {wrong}"]
        first = next(iter(self.operands))
        lines = [f"if {name}.dtype not in dtypes[{name!r}]: {wrong}"]
        if name != first:
            lines.append(f"if {name}.device != {first}.device: {wrong}")
        shape = operand.shapes[0]
        if shape == ["..."]:
            return lines
        new = self._new(shape) if len(operand.shapes) == 1 else {}
        if not new:
            shapes = [f"({', '.join(one)}{',' * bool(one)})" for one in operand.shapes]
            return [*lines, f"if {name}.shape not in ({', '.join(shapes)},): {wrong}"]
        leads = shape[0] == LEADING
        count, unlike = len(shape) - leads, "<" if leads else "!="
        lines += [f"sizes_ = {name}.shape", f"if len(sizes_) {unlike} {count}: {wrong}"]
        if leads and "leading_" in self._bound:
            lines.append(f"if sizes_[:-{count}] != leading_: {wrong}")
        elif leads:
            lines.append(f"leading_ = sizes_[:-{count}]")
            self._bound.add("leading_")
        lines += [f"{dim} = sizes_[{at}]" for at, dim in new.items()]
        self._bound |= set(new.values())
        dims = enumerate(shape[leads:], -count)
        others = [f"sizes_[{at}] == {dim}" for at, dim in dims if at not in new]
        return [*lines, f"if not ({' and '.join(others)}): {wrong}"] if others else lines

    def _new(self, shape: list[str]) -> dict[int, str]:
        """The names that a shape binds, by position, counted from its end."""
        found: dict[int, str] = {}
        for at, dim in enumerate(shape, -len(shape)):
            known = dim in self._bound or dim in self.defaults or dim in self.globals
            if dim.isidentifier() and not known and dim not in found.values():
                found[at] = dim
        return found

    @property
    def requires_gradient(self) -> str:
        """An expression of the arguments and `grad_mode`, which torch.compile evaluates when it traces a call."""
        return f"grad_mode() and ({' or '.join(self._gradient_tests.values())})"

    def refuse_gradient(self, *args: Any) -> NoReturn:
        """Raise the error of an argument that requires a gradient."""
        given = dict(zip(self.parameters, args, strict=True))
        n = next(n for n, test in self._gradient_tests.items() if eval(test, given))
        raise RuntimeError(
            f"{self.name} has no gradient, and {n} requires one; call it under torch.no_grad(), pass {n}.detach(), or "
            f"differentiate its formula in PyTorch operations, {self.name}.reference"
        )

    def schema(self) -> str:
        """The schema of the op. torch takes no default before an argument without one."""
        arguments: list[str] = []
        takes_default = True
        for n, parameter in reversed(list(self.parameters.items())):
            if parameter.annotation not in SCHEMA_TYPES:
                taken = ", ".join(SCHEMA_TYPES)
                raise TypeError(
                    f"{self.name}: {n} must be one of {taken}, got {parameter.annotation}"
                )
            takes_default = takes_default and parameter.default is not parameter.empty
            value = parameter.default
            shown = (
                f'"{value}"'
                if isinstance(value, str)
                else f"{value}".replace("torch.", "").replace("()", "[]")
            )
            default = f"={shown}" if takes_default else ""
            kind = SCHEMA_TYPES[parameter.annotation]
            if n in self.writes:
                kind = kind.replace("Tensor", f"Tensor({'abcdef'[self.writes.index(n)]}!)")
            arguments.insert(0, f"{kind} {n}{default}")
        count = len(typing.get_args(self.returned))
        results = f"({', '.join(['Tensor'] * count)})" if count else "Tensor"
        return f"{self.name}({', '.join(arguments)}) -> {results}"

    def compiled(self, results: str | None) -> Callable[..., Any]:
        """The function that checks, and then returns the value of this expression."""
        lines = list(self._lines)
        if results is not None:
            first = next(iter(self.defaults))
            lines.append(f"empty = lambda dtype, *shape: {first}.new_empty(shape, dtype=dtype)")
        lines.append(f"return {results}")
        head = f"def make(wrong, broken, dtypes, defaults):\n def declared_check({self.arguments}):\n  "
        code = head + "\n  ".join(lines) + "\n return declared_check\n"
        made: dict[str, Any] = {}
        # The globals are those of the module, which may define what a rule reads below the declaration.
        exec(compile(code, f"<declaration of {self.name}>", "exec"), self.globals, made)
        dtypes = {n: operand.dtypes for n, operand in self.operands.items()}
        check: Callable[..., Any] = made["make"](self._wrong, self._broken, dtypes, self.defaults)
        return check

    def _wrong(self, name: str, found: dict[str, Any]) -> NoReturn:
        """Raise the error of a tensor that is not as declared; `found`: the arguments, and the names bound so far."""
        tensor, operand = found[name], self.operands[name]
        hint = f"; {operand.hint}" if operand.hint else ""
        dtype = tensor.dtype if operand.is_tensor else tensor
        if dtype not in operand.dtypes:
            taken = ", ".join(map(str, operand.dtypes))
            raise TypeError(f"{self.name} takes {name} of {taken}, got {dtype}{hint}")
        library.check_one_device(**{n: found[n] for n, o in self.operands.items() if o.is_tensor})
        names = {**self.globals, **found}
        sizes: list[str] = []
        for shape in operand.shapes:
            try:
                sizes.append(str(eval(f"({', '.join(shape)},)" if shape else "()", names)))
            except NameError:
                sizes = []
                break
        here = f", here {' or '.join(sizes)}" if sizes else ""
        shown = tuple(tensor.shape)
        raise ValueError(f"{self.name} takes {name} {operand.text}{here}, got {shown}{hint}")

    def _broken(self, error: type[Exception], message: str, found: dict[str, Any]) -> NoReturn:
        """Raise the error of a rule, with the names in its message replaced."""
        names = {**self.globals, **found}
        shown = re.sub(r"\{(.+?)\}", lambda match: str(eval(match[1], names)), message)
        raise error(f"{self.name}: {shown}")

"""The public API equals `tests/data/public_api.txt`, which is rewritten by `python -m tests.test_public_api`.

The sources are read, not imported, so that the text needs no optional package and is the same for each version of
Python and torch.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SNAPSHOT = ROOT / "tests/data/public_api.txt"
MODULES = (
    "lowbit.surface",
    *(f"lowbit.{name}" for name in ("accelerate", "affine", "axolotl", "formats", "granularity")),
    *(f"lowbit.{name}" for name in ("hf", "inference", "lightning", "optim", "peft", "qat")),
    *(
        f"lowbit.{name}"
        for name in ("scheme", "sync", "tensor", "testing", "torchtitan", "train", "vllm")
    ),
)
"""The modules that users import from. Everything in `lowbit.surface` is a name of `lowbit` itself."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def source_file(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@cache
def statements(module: str) -> tuple[ast.stmt, ...]:
    """The top-level statements of a module, with those under `if` and `try`."""
    file = source_file(module)
    return () if file is None else tuple(flat(ast.parse(file.read_text()).body))


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            yield from flat(statement.body)
            yield from flat(statement.orelse)


def names_of(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign):
        return [ast.unparse(statement.target)]
    if isinstance(statement, ast.Assign):
        return [ast.unparse(target) for target in statement.targets]
    return []


def public_names(module: str) -> list[str]:
    """`__all__` where it is a list of strings, else all that the module defines or imports without an underscore."""
    found: list[str] = []
    for statement in statements(module):
        if "__all__" in names_of(statement):
            assert isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value
            if isinstance(statement.value, ast.Attribute):  # that of the module which it describes
                return public_names(module.replace("lowbit.", "lowbit.interop."))
            return sorted(ast.literal_eval(statement.value))
        found += names_of(statement)
    return sorted({name for name in found if name.isidentifier() and name[0] != "_"})


def definition(module: str, name: str) -> tuple[str, Definition] | None:
    """The module and the statement that define `name`, through imports inside lowbit. None: a module, or elsewhere."""
    if source_file(f"{module}.{name}") is not None:
        return None
    for statement in statements(module):
        if name in names_of(statement):
            assert isinstance(statement, Definition)
            return module, statement
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("lowbit"):
            for alias in statement.names:
                if alias.name == "*" and name in public_names(statement.module or ""):
                    return definition(statement.module or "", name)
                if (alias.asname or alias.name) == name:
                    return definition(statement.module or "", alias.name)
    return None


def described(path: str, module: str, name: str, shown: dict[ast.stmt, str]) -> list[str]:
    """The lines of one public name. One of `shown` (by its definition) has them already, under the name there."""
    found = definition(module, name)
    if found is None:
        return [path]
    home, node = found
    if (first := shown[node]) != path:
        return [f"{path} = {first}"]
    if isinstance(node, ast.ClassDef):
        lines = members(home, node, shown)
        public = ", ".join(dict.fromkeys(shown[b] for _, b in public_bases(home, node, shown)))
        return [
            f"{path}: class({public})" if public else f"{path}: class",
            *(f"{path}.{lines[name]}" for name in sorted(lines)),
        ]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [path + signature(node)]
    return [path]


def bases(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """The bases that lowbit defines, with the module of each."""
    for base in node.bases:
        found = definition(module, ast.unparse(base).split("[")[0])
        if found is not None and isinstance(found[1], ast.ClassDef):
            yield found[0], found[1]


def public_bases(
    module: str, node: ast.ClassDef, shown: dict[ast.stmt, str]
) -> Iterator[tuple[str, ast.ClassDef]]:
    """The nearest bases in `shown`, beyond those that are internal."""
    for base in bases(module, node):
        yield from [base] if base[1] in shown else public_bases(*base, shown)


def documented(module: str, node: ast.ClassDef) -> set[str]:
    """The names of the methods and properties that the class or a base of it gives a docstring."""
    names = {
        item.name
        for item in node.body
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(item)
    }
    return names.union(*(documented(*base) for base in bases(module, node)))


def members(module: str, node: ast.ClassDef, shown: dict[ast.stmt, str]) -> dict[str, str]:
    """The lines of a class by name: its fields, constructor, and documented public methods and properties.

    A public base has lines of its own, which are not repeated. An internal base adds what constructs the class:
    `__init__`, and the fields of a dataclass. Its methods serve lowbit itself, such as the hooks that FSDP2 calls.
    """
    lines: dict[str, str] = {}
    for home, base in reversed([*bases(module, node)]):
        if base not in shown:
            inherited = members(home, base, shown)
            lines |= {
                name: line
                for name, line in inherited.items()
                if name == "__init__" or (is_dataclass(base) and line.startswith(f"{name}: "))
            }
    has_docstring = documented(module, node)
    for item in node.body:
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_test = item.name.startswith("test_")  # contracts gain and lose these
            is_public = item.name[0] != "_" and not is_test and item.name in has_docstring
            if is_public or item.name in ("__init__", "__call__"):
                lines[item.name] = item.name + signature(item)
        elif isinstance(item, ast.AnnAssign) and (field := ast.unparse(item.target))[0] != "_":
            annotation, default = ast.unparse(item.annotation), "" if item.value is None else " = …"
            if not annotation.startswith("ClassVar"):
                lines[field] = f"{field}: {annotation}{default}"
    for base in public_bases(module, node, shown):
        of_base = members(*base, shown)
        lines = {name: line for name, line in lines.items() if of_base.get(name) != line}
    return lines


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"({ast.unparse(node.args)}){returns}"


def public_api() -> str:
    names = [(module, name) for module in MODULES for name in public_names(module)]
    shown: dict[ast.stmt, str] = {}
    for module, name in names:
        if (found := definition(module, name)) is not None:
            shown.setdefault(found[1], f"{shown_name(module)}.{name}")
    lines: list[str] = []
    for module in MODULES:
        assert source_file(module) is not None, f"the public module {module} is gone"
        lines += [f"[{shown_name(module)}]"]
        for name in public_names(module):
            lines += described(f"{shown_name(module)}.{name}", module, name, shown)
    return "\n".join(lines) + "\n"


def shown_name(module: str) -> str:
    return module.removesuffix(".surface")


def test_the_public_api_is_the_one_of_the_snapshot() -> None:
    before, now = SNAPSHOT.read_text().splitlines(), public_api().splitlines()
    changes = [
        line
        for line in difflib.unified_diff(before, now, lineterm="", n=0)
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert not changes, (
        "the public API changed (- removed, + added, both: changed):\n"
        + "\n".join(changes)
        + '\nA removal or a change is deprecated first: see "Deprecations" in docs/contributing.md. Where the '
        "change is meant, rewrite the snapshot with: python -m tests.test_public_api"
    )


if __name__ == "__main__":
    SNAPSHOT.write_text(public_api())

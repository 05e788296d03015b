"""The rules of the tree, read off the files without importing them: who may import whom, sizes, names, paths.

One test a rule; its message lists every file that breaks the rule.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib.metadata
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "lowbit": ROOT / "lowbit",
    "lowbit_kernels": ROOT / "kernels/lowbit_kernels",
    "recipes": ROOT / "recipes",
}
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600
VAGUE_NAMES = {"utils", "util", "common", "misc", "helpers", "prototype"}
OPTIONAL = [
    "triton",
    "cuda.bindings",
    "safetensors",
    "tokenizers",
    "wandb",
    "transformers",
    "compressed_tensors",
    "gguf",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "executorch",
    "peft",
    "accelerate",
    "lightning",
    "matplotlib",
    "tqdm",
    "torchtitan",
    "axolotl",
    "diffusers",
    "pydantic",
    "tensorboard",
    "vllm",
    "pytest",
    "typer",
    "rich",
]
INTEGRATIONS = {
    "lowbit.interop.torchtitan": {"torchtitan"},
    "lowbit.interop.hf": {"transformers", "safetensors"},
    "lowbit.interop.lightning": {"lightning"},
    "lowbit.interop.vllm": {"vllm"},
    "lowbit.interop.axolotl": {"axolotl", "pydantic", "transformers"},
    "lowbit.interop.diffusers": {"diffusers"},
    "lowbit.cli": {"typer", "rich"},
}
"""The packages of lowbit for a tool that users import by themselves, and what these may import at the top of a file."""


def tracked() -> list[Path]:
    """The files of the project: git's, or, outside of a checkout (an sdist), all that lie in the source folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0 and (ROOT / ".git").exists():
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        folders = ("lowbit", "kernels", "recipes", "tests", "benchmarks")
        paths = [p for f in folders for p in (ROOT / f).rglob("*") if "__pycache__" not in p.parts]
        paths += ROOT.iterdir()
    return sorted(p for p in paths if p.is_file())


FILES = tracked()
SOURCES = [p for p in FILES if p.suffix == ".py"]


def statements(node: ast.AST) -> list[ast.AST]:
    """The statements inside of a statement or file, one level down, with the branches that hold them."""
    branches = ("body", "handlers", "orelse", "finalbody", "cases")
    return [child for name in branches for child in getattr(node, name, ())]


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements, also those inside of others, without expressions: these are most of a tree."""
    left = [tree]
    while left:
        node = left.pop()
        left += statements(node)
        yield node


@pytest.fixture(scope="module", autouse=True)
def _without_searches_for_garbage() -> Iterator[None]:
    """Each search goes through the trees of all files, here and in later tests as long as the trees are kept."""
    gc.disable()
    yield
    parsed.cache_clear()
    gc.enable()


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The statements of a file. Only tests of `if`, constants and names of imports remain of their expressions, so that
    all files fit into little memory."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in walk(tree):
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and not isinstance(node, ast.If):
                setattr(node, name, value if isinstance(value, ast.Constant) else None)
    return tree


def module_name(path: Path) -> str:
    """`lowbit.schemes.scheme` for lowbit/schemes/scheme.py; the package for its `__init__`; "" outside PACKAGES."""
    for package, folder in PACKAGES.items():
        if path.is_relative_to(folder):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return ""


def nothing(node: ast.AST) -> bool:
    return False


def imports(
    tree: ast.AST, module: str, is_package: bool, without: Callable[[ast.AST], bool] = nothing
) -> Iterator[str]:
    """Absolute names of all modules that `tree` imports anywhere in it, also inside functions.

    `from lowbit import x` yields `lowbit.x`, since x may be a submodule; if it is not, the caller removes x. The bodies
    of statements that `without` names are left out.
    """
    left = [tree]
    while left:
        node = left.pop()
        body = node.body if without(node) else []  # type: ignore[attr-defined]
        left += [child for child in statements(node) if child not in body]
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            yield from (f"{base}.{alias.name}" for alias in node.names)


# The parts of the tree, from the bottom floor up. A part imports itself and all floors below it, besides the standard
# library, torch and other packages; parts of one floor do not import each other.
FLOORS: list[set[str]] = [
    {"kernels", "numerics", "optional"},
    {"progress", "schemes"},
    {"files", "tracing"},
    {"linear"},
    {"tensor"},
    {"layers", "checkpoint"},
    {"convert"},
    {"calibration", "formats"},
    {"optim", "train", "qat", "inference"},
    {"dequantize", "sync"},
    {"interop"},
    {"surface"},
    {"testing", "cli"},
    {"recipes"},
    {"elsewhere", "tests", "benchmarks"},
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def part(name: str) -> str:
    """The part of the tree that a dotted name belongs to, as FLOORS names it.

    "surface" is lowbit itself, a name that its `__init__` gives out, and the modules that give a public name to what
    lies elsewhere (`lowbit.hf` for `lowbit.interop.hf`).
    """
    first, *rest = name.split(".")
    if first == "lowbit_kernels":
        return "kernels"
    if first != "lowbit":
        return first if first in {"recipes", "tests", "benchmarks"} else "elsewhere"
    if rest and rest[0] == "__main__":
        return "cli"
    return rest[0] if rest and rest[0] in FLOOR else "surface"


def may_import(importer: str, imported: str) -> bool:
    if imported == "elsewhere":
        return True
    return importer == imported or FLOOR[importer] > FLOOR[imported]


OURS = [p for p in SOURCES if module_name(p)]


def forbidden_imports(tree: ast.Module, module: str, is_package: bool = False) -> list[str]:
    names = imports(tree, module, is_package)
    return [name for name in names if not may_import(part(module), part(name))]


def test_imports_go_down_only() -> None:
    broken = []
    for path in OURS:
        module = module_name(path)
        bad = forbidden_imports(parsed(path), module, path.name == "__init__.py")
        if bad:
            broken.append(f"{path.relative_to(ROOT)} ({part(module)}) imports {', '.join(bad)}")
    assert not broken, "imports that go up:\n" + "\n".join(broken)


def test_the_import_rule_sees_what_it_forbids() -> None:
    upward = [
        ("lowbit_kernels.int4", "import lowbit"),
        ("lowbit_kernels.int4", "def f():\n    from lowbit.numerics.affine import quantize_affine"),
        ("lowbit.numerics.affine", "from lowbit.tensor import AffineTensor"),
        ("lowbit.numerics.affine", "from lowbit_kernels import int4"),
        ("lowbit.numerics.affine", "from lowbit import quantize_"),
        ("lowbit.numerics.affine", "from ..tensor import base"),
        ("lowbit.tensor.core.base", "import lowbit.optim.adam"),
        ("lowbit.qat.prepare", "from lowbit.inference import quantize_"),
        ("lowbit.qat.prepare", "from ..inference import quantize_"),
        ("lowbit.optim.adam", "from lowbit import qat"),
        ("lowbit.inference.convert", "from recipes import llama"),
        ("lowbit.checkpoint", "from lowbit.qat import prepare_"),
        ("lowbit.checkpoint", "from lowbit.formats import export"),
        ("lowbit.formats.folder", "from lowbit.inference import quantize_"),
    ]
    missed = [case for case in upward if not forbidden_imports(ast.parse(case[1]), case[0])]
    assert not missed


def test_the_import_rule_lets_the_rest_pass() -> None:
    downward = [
        (
            "lowbit.tensor.core.base",
            "import torch\nfrom lowbit.numerics import packing\nfrom .pickled import rebuild",
        ),
        (
            "lowbit.qat.prepare",
            "from lowbit.tensor import FakeQuantizedTensor\nfrom lowbit.schemes.scheme import Scheme",
        ),
        ("lowbit.linear", "def f():\n    import lowbit_kernels"),
        (
            "recipes.quickstart.train",
            "import lowbit\nfrom lowbit.optim import AdamW4bit\nfrom ..llama import Llama",
        ),
    ]
    refused = [case for case in downward if forbidden_imports(ast.parse(case[1]), case[0])]
    assert not refused


def is_for_types(node: ast.AST) -> bool:
    """True for a block `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def circles(sources: dict[str, ast.Module]) -> list[set[str]]:
    """The sets of modules that import each other in a circle. `sources`: code by the name of the module.

    An import of `a.b` first runs the package `a`, unless the module that imports is itself inside of `a`.
    """
    reached: dict[str, set[str]] = {}
    for module, tree in sources.items():
        reached[module] = set()
        for name in imports(tree, "", False, is_for_types):
            while name and name not in sources:
                name = name.rpartition(".")[0]
            reached[module] |= {name} - {"", module}
            packages = (name[:at] for at, letter in enumerate(name) if letter == ".")
            reached[module] |= {p for p in packages if not f"{module}.".startswith(f"{p}.")}
    changed = True
    while changed:
        changed = False
        for found in reached.values():
            further = {name for step in found for name in reached[step]} - found
            found |= further
            changed |= bool(further)
    inside = {module for module, found in reached.items() if module in found}
    return [{m} | {o for o in inside if o in reached[m] and m in reached[o]} for m in inside]


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside of functions count."""
    assert not circles({module_name(path): parsed(path) for path in OURS})


def test_the_circle_rule_sees_circles() -> None:
    one = {
        "a": "import b",
        "b": "def f():\n    from c import x",
        "c": "from a import y",
        "d": "import a",
    }

    def of(sources: dict[str, str]) -> list[set[str]]:
        return circles({name: ast.parse(code) for name, code in sources.items()})

    assert of(one) and all(found == {"a", "b", "c"} for found in of(one))
    through = {"a": "import b.c", "b": "import b.d", "b.c": "", "b.d": "import a"}
    assert of(through) and all(found == {"a", "b", "b.d"} for found in of(through))
    assert not of({"b": "import b.c", "b.c": "import b.d", "b.d": ""})
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a"
    assert not of({"a": "import b", "b": typing})


def test_optional_packages_are_imported_where_they_are_used() -> None:
    """lowbit imports optional packages only inside functions: an import at the top of a file affects every user."""
    optional, at_the_top = {name.split(".")[0] for name in OPTIONAL}, []
    for path in (p for p in OURS if p.is_relative_to(PACKAGES["lowbit"])):
        module, is_package = module_name(path), path.stem == "__init__"
        names = imports(
            parsed(path), module, is_package, lambda node: isinstance(node, ast.FunctionDef)
        )
        outside = {name.split(".")[0] for name in names}
        own = next(
            (INTEGRATIONS[i] for i in INTEGRATIONS if f"{module}.".startswith(f"{i}.")), set()
        )
        bad = (outside - own) & optional
        if bad:
            at_the_top.append(f"{path.relative_to(ROOT)} imports {', '.join(sorted(bad))}")
    assert not at_the_top, "import them inside of functions:\n" + "\n".join(at_the_top)


def own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length


def test_functions_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {own_lines(node)}"
        for path in SOURCES
        for node in walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and own_lines(node) > MAX_FUNCTION_LINES
    ]
    assert not long, f"over {MAX_FUNCTION_LINES} lines, docstring not counted:\n" + "\n".join(long)


def test_files_are_short() -> None:
    sizes = {
        p: len(p.read_text().splitlines()) for p in FILES if p.suffix in {".py", ".cu", ".cuh"}
    }
    long = [f"{p.relative_to(ROOT)}: {n}" for p, n in sizes.items() if n > MAX_FILE_LINES]
    assert not long, f"over {MAX_FILE_LINES} lines:\n" + "\n".join(long)


def test_no_vague_names() -> None:
    vague = [
        str(p.relative_to(ROOT))
        for p in SOURCES
        if {p.stem, *p.relative_to(ROOT).parts[:-1]} & VAGUE_NAMES
    ]
    assert not vague, "name a module by what it is about"


def test_kernels_holds_one_package_and_a_readme() -> None:
    entries = {
        p.name for p in (ROOT / "kernels").iterdir() if not p.name.startswith((".", "__pycache__"))
    }
    assert entries == {"lowbit_kernels", "README.md"}
    assert (ROOT / "kernels/lowbit_kernels/__init__.py").exists()


def test_no_open_ends_in_the_code() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b")
    open_ends = [
        f"{p.relative_to(ROOT)}:{n}"
        for p in FILES
        if p.suffix in {".py", ".cu", ".cuh", ".md", ".toml"} and p != Path(__file__).resolve()
        for n, line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert not open_ends


def test_no_path_of_one_machine() -> None:
    """No absolute path of the machine a file was written on: home, work and scratch folders."""
    folders = "home|root|work|tmp|opt|mnt|Users|farm|var/folders"  # a slash before and after makes it a path
    pattern = re.compile(rf"(?<![\w.\-/:~$}}\])])/(?:{folders})/[\w.]")
    found = []
    for path in FILES:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        found += [
            f"{path.relative_to(ROOT)}:{n}: {line.strip()[:80]}"
            for n, line in enumerate(lines, 1)
            if pattern.search(line)
        ]
    assert not found


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins), (
        "name==version, no local suffix"
    )
    return {_normal(name): version for name, version in (pin.split("==") for pin in pins)}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(extra: str) -> set[str]:
    """The distributions that `lowbit[extra]` requires, also by other extras of lowbit; without lowbit itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names: set[str] = set()
    for line in project["dependencies"] + project["optional-dependencies"][extra]:
        own = re.fullmatch(r"lowbit\[([\w,]+)\]", line)
        if own:
            for inner in own[1].split(","):
                names |= requirements(inner)
        else:
            names.add(_normal(re.split(r"[^\w.-]", line)[0]))
    return names


def test_constraints_pin_all_that_the_tests_need() -> None:
    """Every installed package that the test extras require is pinned; torch and triton at the agreed versions."""
    pins = constraints()
    assert pins["torch"] == "2.13.0" and pins["triton"] == "3.7.1"
    todo, seen = sorted(requirements("test") | requirements("test-integrations")), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # not on this platform
        plain = [need for need in needs if ";" not in need]
        todo += [_normal(re.split(r"[^\w.-]", need)[0]) for need in plain]
    unpinned = {n for n in seen if n not in pins and _installed(n)}
    assert not unpinned, "add them to constraints.txt"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_version_is_stated_once() -> None:
    import lowbit

    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", lowbit.__version__)
    if _installed("lowbit"):
        assert importlib.metadata.version("lowbit") == lowbit.__version__

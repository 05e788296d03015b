"""The Python of the README and of docs/ runs, page by page; their commands, links and names exist."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch

from tests import forked

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
LOG = ROOT / "benchmarks/LOG.md"
PAGES = [
    README,
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/wishes").glob("*.md")),
]
NEEDS = {
    "README.md": ("safetensors",),
    "docs/calibration.md": ("transformers", "safetensors"),
    "docs/checkpoints.md": ("safetensors",),
    "docs/coming-from.md": ("safetensors",),
    "docs/command-line.md": ("typer", "rich", "safetensors", "matplotlib"),
    "docs/formats.md": ("safetensors",),
    "docs/runtimes.md": ("onnxscript", "onnxruntime", "executorch"),
    "docs/integrations.md": ("transformers", "peft", "accelerate", "lightning", "safetensors"),
    "docs/invariance.md": ("transformers",),
    "docs/packed.md": ("transformers", "peft", "accelerate", "compressed_tensors", "safetensors"),
    "docs/serving.md": ("transformers", "safetensors"),
    "docs/torchtitan.md": ("torchtitan",),
    "docs/transformers.md": ("transformers", "accelerate", "safetensors"),
    "docs/wishes/gpt-oss.md": ("transformers", "peft", "accelerate", "safetensors"),
    "docs/wishes/int8.md": ("transformers", "safetensors"),
    "docs/wishes/merge.md": ("transformers", "peft", "safetensors"),
    "docs/wishes/qat-experts.md": ("transformers", "accelerate", "safetensors"),
    "docs/wishes/rollouts.md": ("transformers", "safetensors"),
}
"""Packages that the snippets of a page import, beyond torch. Without them the test skips and names what is missing."""
SET_UP = {"", "lowbit", "lowbit_kernels", "recipes", "torch", "triton", "numpy", "pytest"}
"""What a page may import beyond Python's own modules: the README's test command installs it."""
ALONE = {
    f"lowbit.{name}" for name in ("accelerate", "hf", "lightning", "peft", "torchtitan", "vllm")
}
"""`import lowbit` does not import them, and some need other packages."""
DISTRIBUTED = {"docs/distributed.md"}
"""Pages whose snippets run in a process group of one rank."""
MAX_README_LINES = 150

RUNNER = textwrap.dedent(
    """
    import sys, torch, torch.distributed as dist
    torch.manual_seed(0)
    torch.set_num_threads(1)
    store, *paths = sys.argv[1:]
    if store:
        dist.init_process_group("gloo", init_method="file://" + store, rank=0, world_size=1)
    scope = {"__name__": "__main__"}
    for path in paths:
        exec(compile(open(path, encoding="utf-8").read(), path, "exec"), scope)
    if store:
        dist.destroy_process_group()
    """
)


@functools.cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    return [text for tag, text in fenced if tag == language]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@pytest.mark.pages
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_python_snippets_run(page: Path, tmp_path: Path) -> None:
    """In order, in one namespace, as a reader would paste them. What a `text` block shows is printed.

    A block that begins with a comment of a file name is written to that file and imported. Another test runs pytest on
    the files that begin with test_.
    """
    for package in NEEDS.get(name_of(page), ()):
        pytest.importorskip(package)
    if page.parent.name == "wishes":
        from tests.page_models import make  # imports those packages

        make("\n".join(blocks(page, "python")), tmp_path)
    snippets, files = [], write_files(page, tmp_path)
    for number, code in enumerate(blocks(page, "python"), start=1):
        if (name := file_of(code)) is not None:
            code = "" if name in files else f"import {name}"
        path = tmp_path / f"{page.stem}_snippet_{number}.py"
        path.write_text(code, encoding="utf-8")
        snippets.append(str(path))
    store = str(tmp_path / "store") if name_of(page) in DISTRIBUTED else ""
    done = forked.run(RUNNER, store, *snippets, folder=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    for output in blocks(page, "text"):
        assert shows(done.stdout, output), done.stdout


def shows(printed: str, expected: str) -> bool:
    """True if `printed` holds the words of `expected` in a row.

    Figures with a point or an exponent may be half or twice as large: where two codes are equally near, processors
    round differently, and calibration carries that on.
    """
    words, wanted = printed.split(), expected.split()
    starts = range(len(words) - len(wanted) + 1)
    return any(all(map(_alike, words[start:], wanted)) for start in starts)


FIGURE = re.compile(r"\d+\.\d+(?:e[-+]\d+)?|\d+e[-+]\d+")


def _alike(word: str, wanted: str) -> bool:
    figures = zip(FIGURE.findall(word), FIGURE.findall(wanted), strict=False)
    near = all(a <= 2 * b and b <= 2 * a for a, b in (map(float, each) for each in figures))
    return FIGURE.sub("0", word) == FIGURE.sub("0", wanted) and near


def file_of(code: str) -> str | None:
    """The name of the file, without .py, that a block is to be saved as: its first line is a comment of it."""
    named = re.match(r"# (\w+)\.py\n", code)
    return named[1] if named else None


def write_files(page: Path, folder: Path) -> list[str]:
    """Write the blocks that are files, and return the names of those that pytest runs."""
    named = {name: code for code in blocks(page, "python") if (name := file_of(code))}
    for name, code in named.items():
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return [name for name in named if name.startswith("test_")]


@each_page
def test_imported_packages_stand_in_the_table(page: Path) -> None:
    """Where a package of the table is not installed, the snippets are skipped: they do not fail."""
    parsed = [node for code in blocks(page, "python") for node in ast.walk(ast.parse(code))]
    names = [each.name for node in parsed if isinstance(node, ast.Import) for each in node.names]
    names += [node.module or "" for node in parsed if isinstance(node, ast.ImportFrom)]
    imported = {name.partition(".")[0] for name in names}
    files = {file_of(code) for code in blocks(page, "python")}
    assert not imported - sys.stdlib_module_names - SET_UP - files - {*NEEDS.get(name_of(page), ())}


@pytest.mark.pages
def test_the_tests_of_the_tutorial_pass(tmp_path: Path) -> None:
    """One run of pytest for both files, which share what they import and the processes that they start."""
    page = ROOT / "docs/tutorial.md"
    names = ["test_int8_tensor", "test_my_tensor"]
    assert write_files(page, tmp_path) == names
    for name in names:
        assert f"python -m pytest -q {name}.py\n" in blocks(page, "bash")
    files = [f"{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *files]
    options = {"cwd": tmp_path, "env": _environment(), "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=280, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"PASSED {file}" in done.stdout for file in files)
    assert "skipped" not in done.stdout


def _environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return {**clean, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "HF_HUB_OFFLINE": "1"}


def test_readme_is_short_and_names_every_page() -> None:
    lines = text_of(README).splitlines()
    assert len(lines) <= MAX_README_LINES
    assert len(blocks(README, "python")) == 6
    unnamed = [name_of(p) for p in PAGES if p != README and f"({name_of(p)})" not in prose(README)]
    assert not unnamed


def test_bytes_of_the_optimizer_state() -> None:
    """The README's figure: 4-bit codes of two moments, and a float32 scale a block of 128 for each."""
    import lowbit

    weight = torch.nn.Parameter(torch.zeros(512, 1024))
    weight.grad = torch.ones_like(weight)
    optimizer = lowbit.optim.AdamW4bit([weight])
    optimizer.step()
    moments = [optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq")]
    parts = [getattr(moment, name) for moment in moments for name in moment.tensor_attrs]
    size = sum(part.numel() * part.element_size() for part in parts) / weight.numel()
    assert f"{size:.2f} bytes a parameter" in text_of(README)


def test_commands_name_existing_modules_and_files() -> None:
    """Two commands; each installs an extra that exists, with the constraints, and runs a module that exists."""
    commands = [line for block in blocks(README, "bash") for line in block.splitlines() if line]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert len(commands) == 2
    for command in commands:
        venv, install, run = (shlex.split(part) for part in command.split(" && "))
        assert venv == ["python3", "-m", "venv", ".venv"]
        assert install[:4] == [".venv/bin/pip", "install", "-c", "constraints.txt"]
        extra = re.fullmatch(r"\.\[(\w+)\]", install[-1])
        assert extra is not None and extra[1] in extras
        assert run[:2] == [".venv/bin/python", "-m"]
    assert commands[0].endswith(" recipes.quickstart")
    assert (ROOT / "recipes/quickstart.py").exists() or (
        ROOT / "recipes/quickstart/__main__.py"
    ).exists()
    assert commands[1].endswith(" pytest -n 2")


@functools.cache
def benchmark_names() -> set[str]:
    from benchmarks.registry import all_benchmarks

    return set(all_benchmarks())


@pytest.mark.parametrize("page", [*PAGES, LOG], ids=name_of)
def test_modules_of_commands_exist(page: Path) -> None:
    """`python -m recipes.decode`, `python -m benchmarks optimizer_step` and their like."""
    modules = re.findall(r"python -m\s+((?:recipes|benchmarks)(?:\.\w+)?)", text_of(page))
    missing = {m for m in modules if importlib.util.find_spec(m) is None}
    assert not missing
    names = set(re.findall(r"python -m\s+benchmarks (\w+)", text_of(page)))
    assert names <= benchmark_names()


def test_folder_tree_is_true() -> None:
    """Every path the tree of docs/design.md names exists, and no module of lowbit is missing from it."""
    trees = [b for b in blocks(ROOT / "docs/design.md", "") if "\nlowbit/\n" in b]
    (tree,) = trees
    named, top = [], ""
    for line in tree.splitlines():
        if not line.startswith(" "):
            top = line.split()[0]
            named.append(top)
            continue
        names = itertools.takewhile(lambda word: word.endswith(("/", ".py")), line.split())
        named += [top + name for name in names]
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
    modules = {
        f"lowbit/{p.name}" + ("/" if p.is_dir() else "") for p in (ROOT / "lowbit").iterdir()
    }
    unnamed = (
        {m for m in modules if not Path(m).name.startswith(("__", "."))}
        - set(named)
        - {"lowbit/py.typed"}
    )
    assert not unnamed, "name them in the tree of docs/design.md"


def _links() -> list[tuple[Path, str]]:
    pages = [*PAGES, LOG, ROOT / "CHANGELOG.md"]
    found = {
        (page, link)
        for page in pages
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose(page))
    }
    return sorted(found)


def test_links_lead_somewhere() -> None:
    """To a file that exists and, behind #, to one of its headings."""
    broken = []
    for page, link in _links():
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(f"{name_of(page)}: {link}")
    assert not broken, "no such file or heading:\n" + "\n".join(broken)


def test_the_log_lists_its_entries() -> None:
    listed = {link.removeprefix("#") for page, link in _links() if page == LOG}
    entries = _anchors(LOG) - {"log"}
    assert entries and not entries - listed, "add them to the list at the top"


@functools.cache
def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_navigation_of_the_site_has_every_page() -> None:
    """Pages of docs/ and its folders; `mkdocs build --strict` says the same where mkdocs is installed."""
    folder = ROOT / "docs"
    named = set(re.findall(r": ([\w./-]+\.md)$", text_of(ROOT / "mkdocs.yml"), re.MULTILINE))
    pages = {str(p.relative_to(folder)) for p in folder.rglob("*.md")}
    notebooks = {str(p.relative_to(folder).with_suffix(".md")) for p in folder.rglob("*.ipynb")}
    unnamed = (pages | notebooks) - named
    assert not unnamed, "name them in the navigation, in mkdocs.yml"


def test_the_api_reference_has_every_op_of_the_kernels() -> None:
    import lowbit_kernels

    shown = re.findall(
        r"^::: lowbit_kernels\.\w+\.(\w+)$", text_of(ROOT / "docs/api/kernels.md"), re.M
    )
    assert shown == lowbit_kernels.__all__


def test_figures_of_choosing_stand_on_the_linked_pages() -> None:
    """A number in bold stands on a page of benchmarks/results that its row or paragraph links."""
    page, found = ROOT / "docs/choosing.md", 0
    for part in re.split(r"\n\n|\n(?=[|-])", text_of(page)):
        figures = re.findall(r"\*\*([-+]?[\d.,]+)%?\*\*", part)
        links = re.findall(r"\]\(([^)#]+results/[^)#]+\.md)\)", part)
        sources = "\n".join(text_of((page.parent / link).resolve()) for link in links)
        absent = [
            f for f in figures if not re.search(rf"(?<![\d.]){re.escape(f)}(?![\d])", sources)
        ]
        assert not absent, f"{absent} in {part!r}"
        found += len(figures)
    assert found > 30


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md", "docs/inference.md"])
def test_speeds_of_a_users_own_call_come_first(page: str) -> None:
    """Before those of a recipe, which needs code of one's own."""
    text = text_of(ROOT / page)
    assert text.index("transformers' `generate`") < text.index("recipes.decode")


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name == "wishes"], ids=name_of)
def test_figures_of_a_wish_stand_on_the_pages_that_it_links(page: Path) -> None:
    """Decimals, percentages and thousands, of its text."""
    links = re.findall(r"\]\((\.\.[^)#]+\.md)", prose(page))
    sources = "\n".join(text_of((page.parent / link).resolve()) for link in links)
    sources = re.sub(r"(?<=\d),(?=\d{3})", "", sources)
    text = re.sub(r"\(http[^)]+\)|`[^`]+`", "", prose(page))
    figures = re.findall(
        r"(?<![\w.,])(?:\d+(?:,\d{3})*\.\d+|\d+(?:,\d{3})+|\d+(?=%))(?![\w.]\d)", text
    )
    plain = [figure.replace(",", "") for figure in figures]
    absent = [f for f in plain if not re.search(rf"(?<![\d.]){re.escape(f)}(?!\d)", sources)]
    assert not absent


@each_page
def test_public_names_exist(page: Path) -> None:
    """Names in backticks such as `lowbit.optim.AdamW4bit`."""
    import lowbit

    absent = []
    for name in set(re.findall(r"`(lowbit(?:\.\w+)+)", prose(page))):
        found = lowbit
        package = ".".join(name.split(".")[:2])
        if package in ALONE:
            assert importlib.util.find_spec(package)
            continue
        if name.startswith("lowbit.testing"):  # `import lowbit` does not import it
            importlib.import_module("lowbit.testing")
        for part in name.split(".")[1:]:
            found = getattr(found, part, None)
        if found is None:
            absent.append(name)
    assert not absent


def test_names_in_backticks_are_lowbits() -> None:
    """Names of classes, and names that end in an underscore, exist in lowbit or are listed as another library's."""
    import lowbit

    spaces = [
        lowbit,
        lowbit.tensor,
        *(getattr(lowbit, name) for name in ("optim", "train", "qat", "inference", "sync")),
        importlib.import_module("lowbit.testing"),
    ]
    foreign = {"None", "LightningModule", "GradScaler", "clip_grad_norm_", "TrainingArguments"}
    foreign |= {"TorchDispatchMode", "DTensor", "ColwiseParallel", "RowwiseParallel", "Product"}
    foreign |= {"add_", "copy_", "lerp_", "mul_", "OSError", "CompressedTensorsConfig"}
    foreign |= {"AveragedModel", "HuggingFaceStorageWriter", "FlopCounterMode", "PipelineStage"}
    foreign |= {"MatMulNBits", "GatherBlockQuantized", "DequantizeLinear"}
    foreign |= {"Accelerator", "PeftModel", "TorchAoConfig"}
    foreign |= {"AWQModifier", "GPTQModifier", "QuantizeConfig"}
    foreign |= {"SpinQuantModifier", "QuIPModifier", "Path", "SFTTrainer", "DiTTransformer2DModel"}
    foreign |= {"SparseGPTModifier", "WandaPruningModifier"}
    foreign |= {
        "KVCache",
        "LowbitConfig",
        "QATCallback",
    }  # of lowbit.hf, whose import needs transformers
    absent = []
    for page in PAGES:
        names = re.findall(r"`([A-Z][A-Za-z0-9]*[a-z0-9]|[a-z_]+_)[`(]", prose(page))
        absent += [
            f"{name_of(page)}: {n}"
            for n in set(names) - foreign
            if not n.startswith("__")  # torch's protocols
            and not any(hasattr(space, n) for space in spaces)
        ]
    assert not absent


def test_extras_and_markers_are_used() -> None:
    """Every package of an extra is imported or run somewhere, and every marker marks a test."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = ("lowbit", "kernels", "recipes", "tests", "benchmarks", "docs/site")
    sources = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    code = "\n".join(p.read_text(encoding="utf-8") for p in sources) + (ROOT / ".ci/run").read_text(
        encoding="utf-8"
    )
    for marker in settings["tool"]["pytest"]["ini_options"]["markers"]:
        assert re.search(rf"mark\.{re.split('[:(]', marker)[0]}\b", code), marker
    plugins = {"pytest-timeout", "pytest-xdist"}
    plugins |= {"ipykernel", "mkdocs-material", "mkdocstrings-python"}  # of nbclient and mkdocs
    named = re.findall(r"(?:importorskip\(.|import|from|-m) ?([\w-]+)", code)
    used = {*named, *(name.partition("-")[0] for name in named)}
    for extra, lines in settings["project"]["optional-dependencies"].items():
        for name in {re.split(r"[^\w-]", line)[0] for line in lines} - {"lowbit"} - plugins:
            module = name.removesuffix("-py").replace("-", "_")
            assert {name, module} & used, f"{extra}: {name}"

"""Bars appear on a terminal alone, and nothing else changes."""

from __future__ import annotations

import os
import select
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowbit import progress
from tests import forked

pytest.importorskip("rich")

HEAD = """
import sys, time, torch
from torch import nn
import lowbit
from lowbit import progress
from lowbit.progress import waiting
progress.DELAY = 0.03
"""
LATER = "import lowbit.formats, torch._dynamo, torch.export"
"""What several programs import. Their forks find it imported."""
PROGRAMS = {
    "counted": """
        with progress.progress("packing", 4, unit="boxes") as advance:
            for _ in range(4):
                time.sleep(0.05)
                advance(1)
    """,
    "packing nested": """
        with progress.progress("packing", 10**7) as advance:
            time.sleep(0.1)
            with waiting("inside"):
                time.sleep(0.1)
            advance(10**7)
    """,
    "after an error": """
        try:
            with progress.progress("packing", 10):
                time.sleep(0.1)
                raise ValueError
        except ValueError:
            pass
        assert progress._DISPLAY._bars is None
    """,
    "quantizing": """
        from lowbit.inference import quantize
        inner = quantize.quantized
        quantize.quantized = lambda *given: (time.sleep(0.05), inner(*given))[1]
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
        lowbit.quantize_(model, lowbit.Int4WeightOnly())
    """,
    "a program": """
        from pathlib import Path
        from lowbit import formats
        class Slow(formats.ProgramFormat):
            name, suffix = "slow", ".txt"
            def write(self, call, path, lossy):
                time.sleep(0.1)
                path.write_text("")
                return []
        formats.register(Slow())
        model = nn.Sequential(nn.Linear(128, 128)).eval()
        lowbit.quantize_(model, lowbit.Int4WeightOnly())
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            given = (torch.ones(1, 128),)
            lowbit.export(model, Path(folder) / "model.txt", "slow", example_inputs=given)
    """,
    "measuring": """
        class Slow(nn.Linear):
            def forward(self, x):
                time.sleep(0.02)
                return super().forward(x)
        model = nn.Sequential(*[Slow(64, 64) for _ in range(3)])
        lowbit.autoquant(model, [torch.randn(2, 64)], [lowbit.Int4WeightOnly(32)], bits=32)
    """,
    "compiling": """
        from lowbit_kernels.runtime import host_compiler
        inner = host_compiler._compile
        host_compiler._compile = lambda source: (time.sleep(0.1), inner(source))[1]
        host_compiler.library('extern "C" int of_progress() { return 1; }')
    """,
}
SHOWN = {
    "counted": b"packing",
    "packing nested": b"inside",
    "after an error": b"packing",
    "quantizing": b"converting weights",
    "a program": b"writing slow",
    "measuring": b"measuring weights",
    "compiling": b"compiling a kernel for the CPU",
}


END = b"[the end of a program]"
EACH = """
import atexit, os
terminals, terminal, elsewhere = int(sys.argv[1]), *sys.argv[2:4]
os.dup2(os.open(terminal, os.O_RDWR | os.O_NOCTTY), 2)
for at, program in enumerate(sys.argv[4:]):
    if not (child := os.fork()):
        if at >= terminals:
            os.dup2(os.open(elsewhere, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
        exec(compile(program, "<program>", "exec"), globals())
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the end of an interpreter that has imported torch takes a second
    assert os.waitpid(child, 0)[1] == 0, program
    if at < terminals:
        os.write(2, END)
"""


def run(
    on_terminal: list[str], elsewhere: list[str], tmp_path: Path
) -> tuple[bytes, list[bytes], bytes]:
    """stdout of all programs, what each writes to a pseudo terminal, and what the others write to a file as stderr.

    They are forks of one process, which has imported torch and lowbit.
    """
    environment = {"LOWBIT_CACHE_DIR": str(tmp_path / "cache"), "TERM": "xterm", "COLUMNS": "100"}
    own, given = os.openpty()
    piped = tmp_path / "piped"
    code = f"{HEAD}\n{LATER}\nEND = {END!r}\n{EACH}"
    arguments = map(textwrap.dedent, on_terminal + elsewhere)
    child = forked.Program(
        code, len(on_terminal), os.ttyname(given), piped, *arguments, folder=tmp_path, **environment
    )
    written = b""
    while child.status() is None or select.select([own], [], [], 0)[0]:
        if select.select([own], [], [], 0.05)[0]:
            written += os.read(own, 4096)
    os.close(own)
    os.close(given)
    done = child.finished()
    assert done.returncode == 0, done.stderr + written.decode(errors="replace")
    *each, last = written.split(END)
    assert len(each) == len(on_terminal) and not last
    return done.stdout.encode(), each, piped.read_bytes()


# shorter than the delay of other bars
COMPILED_SHORTLY = """
    from lowbit_kernels.runtime.compiling import compiling
    progress.DELAY = 60
    with progress.progress("long", 10), compiling("the CPU"):
        time.sleep(0.3)
"""
COMPILED_TWICE = """
    sys.modules["rich"] = None
    from lowbit_kernels.runtime.compiling import compiling
    for _ in range(2):
        with compiling("the CPU"):
            pass
"""
SILENT = {
    "short": "progress.DELAY = 5\n" + textwrap.dedent(PROGRAMS["counted"].replace("0.05", "0.0")),
    "without rich": "sys.modules['rich'] = None\n" + textwrap.dedent(PROGRAMS["counted"]),
}


Shown = tuple[bytes, dict[str, bytes], bytes]


@pytest.fixture(scope="module")
def on_terminal(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """What all programs print, what each writes to a terminal, and what some write to a file."""
    if not hasattr(os, "openpty"):
        pytest.skip("needs pseudo terminals")
    programs = {**PROGRAMS, **SILENT}
    programs |= {"compiled twice": COMPILED_TWICE, "compiled shortly": COMPILED_SHORTLY}
    elsewhere = [PROGRAMS["counted"], PROGRAMS["quantizing"], SILENT["without rich"]]
    elsewhere += [COMPILED_SHORTLY, COMPILED_TWICE]
    printed, written, piped = run(
        [*programs.values()], elsewhere, tmp_path_factory.mktemp("terminal")
    )
    return printed, dict(zip(programs, written, strict=True)), piped


@pytest.mark.parametrize("name", PROGRAMS)
def test_bars_appear_on_a_terminal(name: str, on_terminal: Shown) -> None:
    printed, written, _ = on_terminal
    assert printed == b""
    assert SHOWN[name] in written[name]


def test_nothing_is_written_elsewhere(on_terminal: Shown) -> None:
    assert on_terminal[0] == on_terminal[2] == b""


def test_a_compiler_is_told_of_early_and_without_rich_by_one_line(on_terminal: Shown) -> None:
    written = on_terminal[1]
    assert SHOWN["compiling"] in written["compiled shortly"]
    line = b"lowbit: compiling a kernel for the CPU, once on this machine"
    assert written["compiled twice"].splitlines() == [line]


@pytest.mark.parametrize("name", SILENT)
def test_short_work_and_missing_rich_show_no_bar(name: str, on_terminal: Shown) -> None:
    assert on_terminal[1][name] == b""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_shows_bars(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(progress.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(progress.dist, "get_rank", lambda: rank)
    assert progress._is_on_terminal() is (rank == 0)

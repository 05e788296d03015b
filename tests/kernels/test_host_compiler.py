"""Compiling for this machine's processor: the cache, and failures of the compiler."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from lowbit import optim
from lowbit.optim.step import fused, launch
from lowbit_kernels.elementwise.fused_step import StepVariant
from lowbit_kernels.runtime import disk_cache, host_compiler, warned
from tests.optim.problems import parameters, run

SOURCE = 'extern "C" int answer() { return 42; }'


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """A new cache, and no state of other tests."""
    remembered = (
        *(host_compiler.library, host_compiler.compiler, host_compiler._version),
        launch.compiled,
    )
    warned.forget()
    fused._failed.clear()
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "cache"))
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()
    fused._failed.clear()


needs_compiler = pytest.mark.skipif(not host_compiler.compiler(), reason="no C++ compiler")


@needs_compiler
def test_compiled_once_and_kept(monkeypatch):
    assert host_compiler.library(SOURCE).answer() == 42
    (_,) = disk_cache.cache_folder().iterdir()
    host_compiler.library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(host_compiler, "_compile", None)
        assert host_compiler.library(SOURCE).answer() == 42


@needs_compiler
def test_a_kernel_that_was_compiled_hides_no_compiler_that_refuses_it(monkeypatch, tmp_path):
    """Tests keep compiled kernels from run to run. A compiler with another command or version compiles again."""
    wrapper = tmp_path / "c++"
    passes = shlex.join(host_compiler.compiler())
    wrapper.touch(0o700)
    monkeypatch.setenv("CXX", str(wrapper))
    for body, refuses in (
        (f'exec {passes} "$@"', False),
        ('[ "$1" = --version ] && echo 2 && exit 0\necho refused >&2\nexit 1', True),
    ):
        wrapper.write_text(f"#!/bin/sh\n{body}\n")
        for function in (host_compiler.library, host_compiler.compiler, host_compiler._version):
            function.cache_clear()
        if refuses:
            with pytest.raises(RuntimeError, match="cannot compile a kernel: refused"):
                host_compiler.library(SOURCE)
        else:
            assert host_compiler.library(SOURCE).answer() == 42


@needs_compiler
def test_a_truncated_file_is_compiled_again():
    """Loading a truncated library would crash the process."""
    host_compiler.library(SOURCE)
    (kept,) = disk_cache.cache_folder().iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # this process still uses it
    kept.write_bytes(whole[: len(whole) // 2])
    code = f"from lowbit_kernels.runtime import host_compiler as c; print(c.library({SOURCE!r}).answer())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert kept.read_bytes() == whole


@needs_compiler
@pytest.mark.parametrize("forbidden", ["memory", "temporary", "no memfd"])
def test_where_a_library_can_be_loaded_from_one_place_only(monkeypatch, forbidden):
    load = ctypes.CDLL

    def loaded(path):
        if path.startswith("/proc/self/fd") == (forbidden == "memory"):
            raise OSError("failed to map segment from shared object: Operation not permitted")
        return load(path)

    if forbidden == "no memfd":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    else:
        monkeypatch.setattr(ctypes, "CDLL", loaded)
    for _ in range(2):
        assert host_compiler.library(SOURCE).answer() == 42
        host_compiler.library.cache_clear()


@needs_compiler
def test_a_library_that_can_be_loaded_from_nowhere_raises(monkeypatch):
    def refuses(path):
        raise OSError("failed to map segment from shared object: Operation not permitted")

    monkeypatch.setattr(ctypes, "CDLL", refuses)
    for _ in range(2):  # first compiled, then from the disk
        with pytest.raises(RuntimeError, match=r"made or loaded: failed to map segment"):
            host_compiler.library(SOURCE)


@needs_compiler
def test_each_source_is_a_library_of_its_own():
    """The loader identifies libraries by path, and files in memory reuse the same number."""
    found = [
        host_compiler.library(SOURCE.replace("42", str(number))).answer() for number in range(4)
    ]
    assert found == [0, 1, 2, 3]


@needs_compiler
def test_another_process_compiles_nothing_and_may_fork():
    other = SOURCE.replace("42", "7")
    for source in (SOURCE, other):
        host_compiler.library(source)
    code = (
        "import os; from lowbit_kernels.runtime import host_compiler as c; c._compile = None\n"
        f"first = c.library({SOURCE!r})\n"
        "if os.fork() == 0:\n"
        "    os.closerange(3, 64)\n"  # as daemons do
        f"    os._exit(first.answer() + c.library({other!r}).answer())\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "49\n"), done.stderr


@needs_compiler
def test_two_processes_at_once(monkeypatch, tmp_path):
    """One compiles, and the other waits for its file. Neither ever reads a partial file."""
    script, ran = tmp_path / "cxx", tmp_path / "ran"
    passes = shlex.join(host_compiler.compiler())
    script.write_text(f'#!/bin/sh\necho "$@" >> {ran}\nexec {passes} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    code = (
        "import sys; from lowbit_kernels.runtime import host_compiler as c; print('ready', flush=True); input()\n"
        f"for i in range(5): print(c.library({SOURCE!r}.replace('42', str(i))).answer())"
    )
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "0\n1\n2\n3\n4\n"), err
    assert len(list(disk_cache.cache_folder().iterdir())) == 5
    assert sum("kernel.cpp" in line for line in ran.read_text().splitlines()) == 5


@needs_compiler
def test_the_compilers_own_files_are_private(monkeypatch, tmp_path):
    """A compiler writes files between its passes to $TMPDIR."""
    script = tmp_path / "cxx"
    compiler = shlex.join(host_compiler.compiler())
    script.write_text(
        f'#!/bin/sh\nstat -c %a "$TMPDIR" > {tmp_path}/rights\nexec {compiler} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    host_compiler.compiler.cache_clear()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert host_compiler.library(SOURCE).answer() == 42
    assert (tmp_path / "rights").read_text() == "700\n"


@needs_compiler
def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/g++ -O1")
    host_compiler.compiler.cache_clear()
    with pytest.warns(UserWarning, match=r"\$CXX is '/nonexistent/g\+\+ -O1'.*lowbit uses"):
        assert host_compiler.library(SOURCE).answer() == 42


@needs_compiler
def test_a_folder_that_takes_no_files(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "file" / "folder"))
    with pytest.warns(UserWarning, match=r"cannot be kept.*Not a directory"):
        assert host_compiler.library(SOURCE).answer() == 42


@needs_compiler
def test_a_wrong_program_raises_with_the_compilers_message():
    with pytest.raises(RuntimeError, match=r"(?s)cannot compile a kernel.*error"):
        host_compiler.library("this is no program")


def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


def test_without_a_compiler_pytorch_does_it_and_a_warning_says_so_once(monkeypatch, tmp_path):
    no_compiler(monkeypatch, tmp_path)
    params = parameters((64, 64), (9,))
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler") as caught:
        run(optim.AdamW8bit(params), params, 2)
        run(optim.AdamW4bit(params), params, 2)
    assert len(caught) == 1
    assert optim.AdamW8bit(params).state == {}
    with pytest.raises(RuntimeError, match=r"fused=True.*no C\+\+ compiler"):
        run(optim.AdamW8bit(params, fused=True), params, 1)
    with pytest.raises(RuntimeError, match=r"install g\+\+ or clang\+\+"):
        host_compiler.library(SOURCE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(optim.AdamW8bit(params, fused=False), params, 1)


def broken(monkeypatch, tmp_path, how):
    """Break the compiler in this way; return the text of the warning."""
    script = tmp_path / "cxx"
    compiler = shlex.join(host_compiler.compiler())
    monkeypatch.setenv("CXX", str(script))
    lines = "echo 'some note' >&2\necho \"$PWD x.cpp:1: error: no such processor\" >&2\nexit 1"
    if how == "not in UTF-8":
        lines = "printf '\\377\\n'\n" + lines
    script.write_text(f"#!/bin/sh\n{lines}\n")
    script.chmod(0o755)
    host_compiler.compiler.cache_clear()
    if how == "gone":
        assert host_compiler.compiler()
        script.unlink()
        return "cannot be run"
    if how == "no command":
        monkeypatch.setenv("CXX", f'{compiler} "-D')
        return "No closing quotation"
    if how == "disk full":

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        return "No space left"
    if how == "no temporary folder":

        def nowhere(*args, **kwargs):
            raise FileNotFoundError(2, "No usable temporary directory found")

        monkeypatch.setattr(tempfile, "TemporaryDirectory", nowhere)
        return "No usable temporary directory"
    return "no such processor"


HOW = ["refuses", "gone", "no command", "disk full", "no temporary folder", "not in UTF-8"]


@needs_compiler
@pytest.mark.parametrize("how", HOW)
def test_a_broken_compiler_breaks_no_training(monkeypatch, tmp_path, how):
    expected = broken(monkeypatch, tmp_path, how)
    params, others = parameters((64, 64)), parameters((64, 64))
    with pytest.warns(UserWarning, match=expected):
        run(optim.AdamW8bit(params), params, 2)
    run(optim.AdamW8bit(others, fused=False), others, 2)
    assert torch.equal(params[0], others[0])
    with pytest.raises(RuntimeError, match=f"fused=True.*{expected}"):
        run(optim.AdamW8bit(params, fused=True), params, 1)


@needs_compiler
def test_a_rejected_source_warns_once_for_all_variants(monkeypatch):
    monkeypatch.setattr(StepVariant, "source", lambda *args: "this is no program")
    params = parameters((64, 64), (9,))
    with pytest.warns(UserWarning, match="could not be compiled") as caught:
        run(optim.AdamW8bit(params), params, 2)
        run(optim.AdamW4bit(params), params, 2)
    assert len(caught) == 1
    assert tempfile.gettempdir() not in str(caught[0].message)


@needs_compiler
@pytest.mark.parametrize("asked", [None, True])
def test_a_kernel_that_failed_to_compile_is_compiled_later(monkeypatch, asked):
    """A disk that was full when the process made its first step."""
    tries = []

    def fail(source, *options):
        tries.append(source)
        raise OSError(28, "No space left on device")

    params = parameters((64, 64), (64, 64))
    with monkeypatch.context() as patch:
        patch.setattr(host_compiler, "_compile", fail)
        with pytest.warns(UserWarning, match="No space left.*again in 10 minutes"):
            run(optim.AdamW8bit(params), params, 3)
    assert len(tries) == 1, "not at every step, nor for every parameter"
    optimizer = optim.AdamW8bit(params, fused=asked)
    if asked is None:
        run(optimizer, params, 1)
        assert not optimizer._fused.launches
        monkeypatch.setattr(fused, "RETRY_SECONDS", 0.0)
    run(optimizer, params, 1)
    assert optimizer._fused.launches

"""Compiling for this machine's processor: what is kept, and what happens where it can't be done."""

from __future__ import annotations

import warnings

import pytest
import torch

from lowbit import optim
from lowbit.optim import kernel
from lowbit_kernels import disk_cache, host_compiler
from tests.optim.problems import parameters, run

SOURCE = 'extern "C" int answer() { return 42; }'


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """A cache of its own, and nothing remembered of other tests."""
    remembered = (
        *(host_compiler.library, host_compiler.compiler, host_compiler._version),
        *(kernel.compile_obstacle, kernel.compiled, kernel._warn_once),
    )
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "cache"))
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


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
def test_a_damaged_file_is_made_again():
    assert host_compiler.library(SOURCE).answer() == 42  # loaded from where it was compiled
    (kept,) = disk_cache.cache_folder().iterdir()
    kept.write_bytes(b"damaged")
    host_compiler.library.cache_clear()
    assert host_compiler.library(SOURCE).answer() == 42
    assert kept.stat().st_size > 1000


@needs_compiler
def test_a_folder_that_takes_no_files(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "file" / "folder"))
    assert host_compiler.library(SOURCE).answer() == 42


@needs_compiler
def test_what_is_no_program_raises_with_the_compilers_words():
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


@pytest.mark.parametrize("broken", ["refuses", "gone"])
def test_a_broken_compiler_breaks_no_training(monkeypatch, tmp_path, broken):
    script = tmp_path / "cxx"
    script.write_text(
        "#!/bin/sh\necho 'some note' >&2\necho 'x.cpp:1: error: no such processor' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    if broken == "gone":
        assert host_compiler.compiler()
        script.unlink()
    params, others = parameters((64, 64)), parameters((64, 64))
    expected = "no such processor" if broken == "refuses" else "cannot be run"
    with pytest.warns(UserWarning, match=expected):
        run(optim.AdamW8bit(params), params, 2)
    run(optim.AdamW8bit(others, fused=False), others, 2)
    assert torch.equal(params[0], others[0])
    with pytest.raises(RuntimeError, match=f"fused=True.*{expected}"):
        run(optim.AdamW8bit(params, fused=True), params, 1)

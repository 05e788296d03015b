"""Where NVRTC is available, and which cached code it uses. The tests of the ops launch kernels."""

from __future__ import annotations

import os
import sys
import types
import warnings

import pytest

from lowbit_kernels.runtime import nvrtc, trusted_folder, warned


def test_without_a_gpu_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(nvrtc.torch.cuda, "is_available", lambda: False)
    nvrtc.is_available.cache_clear()
    try:
        assert not nvrtc.is_available()
    finally:
        nvrtc.is_available.cache_clear()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and a fake NVRTC, which this machine may lack."""
    bindings = types.ModuleType("cuda.bindings")
    bindings.nvrtc = types.SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0))
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(nvrtc, "_compile", lambda source, arch: b"compiled")
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "cache"))
    warned.forget()
    return tmp_path / "cache"


def test_a_cubin_is_compiled_once(monkeypatch, cache):
    assert nvrtc.compiled("source", "sm_90") == b"compiled"
    monkeypatch.setattr(nvrtc, "_compile", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nvrtc.compiled("source", "sm_90") == b"compiled"


@pytest.mark.skipif(not trusted_folder.HAS_OWNERS, reason="files here have no owners")
@pytest.mark.parametrize("lax", ["folder", "another user's file"])
def test_a_planted_cubin_is_not_used(monkeypatch, cache, lax):
    monkeypatch.setattr(nvrtc, "_compile", lambda source, arch: b"planted")
    nvrtc.compiled("source", "sm_90")
    monkeypatch.setattr(nvrtc, "_compile", lambda source, arch: b"compiled")
    (path,) = cache.iterdir()
    where = cache if "folder" in lax else path
    if "another" not in lax:
        where.chmod(0o770)
    elif os.geteuid() == 0:
        os.chown(where, 64002, 64002)
    else:
        pytest.skip("files of another user can be made by root only")
    with pytest.warns(UserWarning, match="belongs to user 64002|can be written to by others"):
        assert nvrtc.compiled("source", "sm_90") == b"compiled"


@pytest.mark.gpu
def test_a_cubin_from_the_cache_runs(monkeypatch, tmp_path):
    import torch

    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "cache"))
    source = 'extern "C" __global__ void write(int* x) { *x = 42; }'
    arch = nvrtc.architecture(torch.device("cuda"))
    first = nvrtc.compiled(source, arch)
    monkeypatch.setattr(nvrtc, "_compile", None)
    assert nvrtc.compiled(source, arch) == first
    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    kernel = nvrtc.Module(nvrtc.compiled(source, arch)).kernel("write", 1)
    kernel(torch.cuda.current_stream().cuda_stream, 1, 1, x.data_ptr())
    assert x.item() == 42

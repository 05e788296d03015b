"""Where compiled kernels are kept; compiling and launching them is tested with the kernels, on a GPU."""

from __future__ import annotations

from pathlib import Path

from lowbit_kernels import disk_cache, nvrtc


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "own"))
    assert disk_cache.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("LOWBIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.cache_folder() == tmp_path / "lowbit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert disk_cache.cache_folder() == tmp_path / "home" / ".cache" / "lowbit"


def test_a_kernel_is_kept_whole_or_not_at_all(tmp_path):
    disk_cache.keep(tmp_path / "deep" / "a.cubin", b"code")
    assert (tmp_path / "deep" / "a.cubin").read_bytes() == b"code"
    assert len(list((tmp_path / "deep").iterdir())) == 1
    (tmp_path / "file").write_text("no folder")
    disk_cache.keep(tmp_path / "file" / "a.cubin", b"code")  # no error
    (tmp_path / "deep" / "b.cubin").mkdir()
    disk_cache.keep(tmp_path / "deep" / "b.cubin", b"code")
    assert len(list((tmp_path / "deep").iterdir())) == 2


def test_without_a_gpu_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(nvrtc.torch.cuda, "is_available", lambda: False)
    nvrtc.is_available.cache_clear()
    try:
        assert not nvrtc.is_available()
    finally:
        nvrtc.is_available.cache_clear()

"""Where compiled kernels are kept, and what is taken of what lies there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from lowbit_kernels import disk_cache


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "own"))
    assert disk_cache.cache_folder() == tmp_path / "own"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOWBIT_CACHE_DIR", ".")
    assert disk_cache.cache_folder() == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOWBIT_CACHE_DIR", "~/own")
    assert disk_cache.cache_folder() == tmp_path / "home" / "own"
    monkeypatch.delenv("LOWBIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.cache_folder() == tmp_path / "lowbit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert disk_cache.cache_folder() == tmp_path / "home" / ".cache" / "lowbit"


def test_without_a_home_the_folder_is_the_users_own(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("could not determine home directory")

    for name in ("LOWBIT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = disk_cache.cache_folder()
    assert folder == tmp_path / f"lowbit-{os.getuid()}" and folder.stat().st_mode & 0o77 == 0
    assert disk_cache.keep(b"code", ".so", "source") is not None
    other = os.getuid() + 1
    monkeypatch.setattr(
        os, "getuid", lambda: other
    )  # who finds a folder that somebody else has made
    folder.rename(tmp_path / f"lowbit-{other}")
    assert disk_cache.cache_folder() is None
    assert disk_cache.keep(b"code", ".so", "source") is None
    assert disk_cache.find(".so", "source") is None


def test_found_by_what_it_depends_on(folder):
    assert disk_cache.find(".cubin", "source", "9.0") is None
    path = disk_cache.keep(b"code", ".cubin", "source", "9.0")
    assert path is not None and path.parent == folder and path.read_bytes() == b"code"
    assert disk_cache.find(".cubin", "source", "9.0") == path
    assert disk_cache.find(".cubin", "source", "9.1") is None
    assert disk_cache.find(".so", "source", "9.0") is None


def test_kept_whole_or_not_at_all(monkeypatch, folder, tmp_path):
    path = disk_cache.keep(b"code", ".so", "source")
    assert list(folder.iterdir()) == [path]
    path.unlink()
    path.mkdir()
    assert disk_cache.keep(b"code", ".so", "source") is None
    assert list(folder.iterdir()) == [path]
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "file"))
    assert disk_cache.keep(b"code", ".so", "source") is None
    assert disk_cache.find(".so", "source") is None


@pytest.mark.parametrize("damage", [b"", b"cod", b"Code", b"code "])
def test_a_damaged_file_is_not_taken(folder, damage):
    path = disk_cache.keep(b"code", ".so", "source")
    path.write_bytes(damage)
    assert disk_cache.find(".so", "source") is None
    assert disk_cache.keep(b"code", ".so", "source") == path
    assert disk_cache.find(".so", "source") == path


def test_others_may_read_what_the_umask_lets_them(folder):
    before = os.umask(0o022)
    try:
        path = disk_cache.keep(b"code", ".so", "source")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644

"""Where compiled kernels are kept, and which files of that folder are used."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from lowbit_kernels.runtime import disk_cache, trusted_folder, warned


@pytest.fixture(autouse=True)
def _no_warning_given():
    warned.forget()
    yield
    warned.forget()


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
    assert folder == tmp_path / f"lowbit-{os.getuid()}" and not folder.exists()
    assert disk_cache.keep(b"code", ".so", "source")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_kernel_is_found_by_its_whole_key(folder):
    assert disk_cache.find(".cubin", "source", "9.0") is None
    assert not folder.exists(), "a look makes no folder"
    assert disk_cache.keep(b"code", ".cubin", "source", "9.0")
    assert disk_cache.find(".cubin", "source", "9.0") == b"code"
    assert disk_cache.find(".cubin", "source", "9.1") is None
    assert disk_cache.find(".so", "source", "9.0") is None


def test_a_process_that_holds_the_lock_for_long_is_not_waited_for(folder, monkeypatch):
    monkeypatch.setattr(disk_cache, "LONGEST_WAIT", 0.05)
    key, made = (".so", "source"), []

    def make():
        made.append(list(folder.iterdir()))
        return b"code"

    with disk_cache._alone(disk_cache._name(".so", ("source",))):
        (lock,) = folder.iterdir()
        assert disk_cache.find_or_make(make, *key) == b"code"
    assert made == [[lock]] and not lock.exists()
    assert disk_cache.find_or_make(make, *key) == b"code" and len(made) == 1
    with pytest.raises(ZeroDivisionError):
        disk_cache.find_or_make(lambda: bytes(1 // 0), ".so", "wrong")
    assert len(list(folder.iterdir())) == 1, "no lock stays behind"


@pytest.mark.parametrize("lacking", ["module", "locks"])
def test_without_locks_each_process_compiles(folder, monkeypatch, lacking):
    class NoLocks:
        LOCK_EX = LOCK_NB = 0

        def flock(handle, how):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(disk_cache, "fcntl", None if lacking == "module" else NoLocks)
    for _ in range(2):
        assert disk_cache.find_or_make(lambda: b"code", ".so", "source") == b"code"


def test_new_files_are_for_this_user_alone(folder):
    before = os.umask(0)
    try:
        assert disk_cache.keep(b"code", ".so", "source")
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert mode(path) == 0o600
    assert mode(folder) == mode(folder.parent) == 0o700
    assert disk_cache.find(".so", "source") == b"code"


def mode(path):
    return path.stat().st_mode & 0o7777


def test_the_rights_of_a_folder_stay_as_they_are(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    assert disk_cache.keep(b"code", ".so", "source")
    assert disk_cache.find(".so", "source") == b"code"
    assert mode(folder) == 0o755


def test_a_file_is_written_atomically(monkeypatch, folder, tmp_path):
    assert disk_cache.keep(b"code", ".so", "source")
    (path,) = folder.iterdir()
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match=f"cannot be kept on disk: .*directory: '{path}'"):
        assert not disk_cache.keep(b"code", ".so", "source")
    assert list(folder.iterdir()) == [path]
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"cannot be kept.*Not a directory.*LOWBIT_CACHE_DIR"):
        assert not disk_cache.keep(b"code", ".so", "source")
    assert disk_cache.find(".so", "source") is None


def test_a_full_disk_warns_once_and_leaves_no_file(monkeypatch, folder):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match=f"No space left on device: '{folder}/") as caught:
        for i in range(3):
            assert not disk_cache.keep(b"code", ".so", f"source {i}")
    assert len(caught) == 1 and "LOWBIT_CACHE_DIR" in str(caught[0].message)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("change", ["empty", "cut off", "other", "longer", "digest alone"])
def test_a_damaged_file_is_not_used(folder, change):
    disk_cache.keep(b"code", ".so", "source")
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    damaged = {
        "empty": b"",
        "cut off": whole[:-1],
        "other": b"Code" + whole[4:],
        "longer": whole + b" ",
        "digest alone": whole[4:],
    }
    path.write_bytes(damaged[change])
    with pytest.warns(UserWarning, match=f"{path} is damaged"):
        assert disk_cache.find(".so", "source") is None
    assert disk_cache.keep(b"code", ".so", "source")
    assert path.read_bytes() == whole
    assert disk_cache.find(".so", "source") == b"code"


def test_the_file_of_another_kernel_is_not_used(folder):
    """A user who could once write to the folder may have renamed it."""
    disk_cache.keep(b"one", ".so", "one")
    (one,) = folder.iterdir()
    disk_cache.keep(b"two", ".so", "two")
    (two,) = set(folder.iterdir()) - {one}
    one.replace(two)
    with pytest.warns(UserWarning, match="is damaged"):
        assert disk_cache.find(".so", "two") is None


def test_a_reason_is_warned_of_once(folder):
    for i in range(3):
        disk_cache.keep(b"code", ".so", f"source {i}")
    for path in folder.iterdir():
        path.chmod(0o620)
    with pytest.warns(UserWarning, match=r"can be written to by others \(mode 0620\)") as caught:
        for i in range(3):
            assert disk_cache.find(".so", f"source {i}") is None
    assert len(caught) == 1


def test_where_files_have_no_owners(monkeypatch, folder):
    """As on Windows: files are opened by path, without checks."""
    monkeypatch.setattr(trusted_folder, "HAS_OWNERS", False)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert disk_cache.find(".so", "source") is None
    assert disk_cache.keep(b"code", ".so", "source")
    assert disk_cache.find(".so", "source") == b"code"
    (path,) = folder.iterdir()
    path.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="is damaged"):
        assert disk_cache.find(".so", "source") is None

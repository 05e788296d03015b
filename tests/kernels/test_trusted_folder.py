"""Folders that are safe to run code from, and the behaviour without one."""

from __future__ import annotations

import stat
import subprocess
import sys
import tempfile

import pytest

from lowbit_kernels.runtime import host_compiler, trusted_folder
from tests.kernels.planted import AS_ROOT, ATTACKER, NEEDED, SOMEBODY, SOURCE, answer, own, staged

pytestmark = NEEDED


def test_folders_and_links_of_root_and_world_readable_files_are_used(stage, monkeypatch):
    """A cache that an administrator has filled for all users, who cannot write to it."""
    folder = stage.folder("filled", 0o755, 0)
    path = stage.plant(folder, 0)
    path.write_bytes(stage.honest)
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(stage.link("cache", folder, 0)))
    monkeypatch.setattr(host_compiler, "_compile", None)
    assert answer(stage) == (42, [])


def test_below_a_sticky_folder_and_through_own_links(stage, monkeypatch):
    """As in /tmp, and as with ~/.cache linked to a larger disk; the link is relative and leads upwards."""
    stage.folder("scratch", 0o1777, 0)
    stage.folder("home")
    stage.link("home/.cache", "../scratch/./new", stage.victim)
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(stage.root / "home" / ".cache" / "lowbit"))
    (stage.root / "home").chmod(0o711)
    stage.folder("scratch/new", 0o700)
    assert answer(stage) == (42, [])
    monkeypatch.setattr(host_compiler, "_compile", None)
    assert answer(stage) == (42, [])
    folder = stage.root / "scratch" / "new" / "lowbit"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("what", ["links in a circle", "file"])
@pytest.mark.parametrize("below", ["", "cache"])
def test_a_path_that_is_not_a_folder(stage, monkeypatch, what, below):
    path = stage.root / "a"
    if what == "file":
        path.write_text("")
    else:
        stage.link("a", stage.root / "b", stage.victim)
        stage.link("b", path, stage.victim)
    own(path, stage.victim)
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(path / below))
    found, said = answer(stage)
    assert found == 42
    (warning,) = said
    assert ("symbolic links" if "links" in what else "Not a directory") in warning
    assert str(stage.root) in warning and "LOWBIT_CACHE_DIR" in warning


@pytest.mark.parametrize("rights", [0o755, 0o777, 0o1777], ids=oct)
def test_temporary_files_lie_where_others_cannot_replace_them(stage, monkeypatch, rights):
    """sudo may keep another user's $TMPDIR."""
    theirs = stage.folder("tmp", rights, stage.victim if rights == 0o777 else ATTACKER)
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(stage.folder("cache", 0o700)))
    monkeypatch.setattr(tempfile, "tempdir", str(theirs))
    before = theirs.stat().st_mtime_ns
    found, said = answer(stage)
    assert found == 42 and theirs.stat().st_mtime_ns == before
    (warning,) = said
    assert str(theirs) in warning and "Set TMPDIR" in warning


def test_without_a_safe_folder_for_temporary_files_nothing_is_compiled(stage, monkeypatch):
    theirs = stage.folder("tmp", 0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(theirs))
    monkeypatch.setattr(trusted_folder, "TEMPORARY", ())
    with pytest.raises(RuntimeError, match=r"safe from other users: .* \(mode 0777\).*TMPDIR"):
        answer(stage)


@AS_ROOT
def test_in_a_container_without_root(monkeypatch):
    """In a user namespace that maps this user alone, root's folders appear to belong to nobody."""
    code = f"""
import ctypes, os, sys
from pathlib import Path
from lowbit_kernels.runtime import host_compiler as c
os.setgroups([]); os.setgid({SOMEBODY}); os.setuid({SOMEBODY})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: otherwise /proc/self stays root's
if ctypes.CDLL(None, use_errno=True).unshare(0x10000000) != 0:  # CLONE_NEWUSER
    sys.exit("no user namespace")
Path("/proc/self/uid_map").write_text("{SOMEBODY} {SOMEBODY} 1")
assert os.stat("/").st_uid not in (0, {SOMEBODY})
print(c.library({SOURCE!r}).answer())
c.library.cache_clear(); c._compile = None
print(c.library({SOURCE!r}).answer())
"""
    with staged(SOMEBODY) as stage:
        monkeypatch.setenv("LOWBIT_CACHE_DIR", str(stage.folder("own", 0o700)))
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "no user namespace" in done.stderr:
        pytest.skip("this machine makes no user namespaces")
    assert (done.returncode, done.stdout) == (0, "42\n42\n"), done.stderr
    assert "UserWarning" not in done.stderr, done.stderr

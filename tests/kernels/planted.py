"""A stage for planted cache entries: other users of the machine, and a library that leaves a mark when it runs."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lowbit_kernels.runtime import disk_cache, host_compiler, warned

SOURCE = 'extern "C" int answer() { return 42; }'
MARKER = (
    "LOWBIT_TESTS_MARKER"  # the environment variable that names the file which planted code makes
)
EVIL = f"""
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void planted() {{ close(open(getenv("{MARKER}"), O_CREAT | O_WRONLY, 0666)); }}
extern "C" int answer() {{ return 666; }}
"""
ATTACKER, SOMEBODY = 64002, 64001  # user ids that belong to no person
SECONDS = 20
ME = os.geteuid() if hasattr(os, "geteuid") else 0
AS_ROOT = pytest.mark.skipif(ME != 0, reason="acting as another user takes root")
NEEDED = [
    pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files here have no owners"),
    pytest.mark.skipif(not host_compiler.compiler(), reason="no C++ compiler"),
]


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Inside, this process has the rights of that user, and is only in the user's own group."""
    if uid == os.geteuid():
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raise TimeoutError after `SECONDS`, since opening a FIFO could wait forever."""

    def late(*args: object) -> None:
        raise TimeoutError(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Stage:
    """A folder that every user can enter, a victim, and the cache entry that an attacker plants there."""

    root: Path
    marker: Path
    victim: int
    name: str
    evil: bytes
    honest: bytes

    def folder(self, name: str, mode: int = 0o755, owner: int | None = None) -> Path:
        """A new folder of the victim or of another user; its ancestors on the stage belong to root, mode 0755."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        path.chmod(mode)
        own(path, self.victim if owner is None else owner)
        return path

    def plant(self, folder: Path, owner: int | None = None, mode: int = 0o644) -> Path:
        """Write the attacker's entry under the name that the victim looks up."""
        path = folder / self.name
        path.write_bytes(self.evil)
        path.chmod(mode)
        own(path, ATTACKER if owner is None else owner)
        return path

    def link(self, name: str, target: Path, owner: int) -> Path:
        path = self.root / name
        path.symlink_to(target)
        own(path, owner)
        return path


def answer(stage: Stage) -> tuple[int, list[str]]:
    """The result that a fresh process of the victim gets, and its warnings."""
    host_compiler.library.cache_clear()
    warned.forget()
    with as_user(stage.victim), bounded(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = host_compiler.library(SOURCE).answer()
    host_compiler.library.cache_clear()
    return found, [str(w.message) for w in caught]


def own(path: Path, uid: int) -> None:
    """Change the owner of a file, which only root can do, unless it already has that owner."""
    if path.lstat().st_uid != uid:
        if os.geteuid() != 0:
            pytest.skip("only root can make files of another user")
        os.chown(path, uid, uid, follow_symlinks=False)


@contextlib.contextmanager
def staged(victim: int) -> Iterator[Stage]:
    # pytest's own folders are closed to other users
    root = Path(tempfile.mkdtemp(prefix="lowbit-planted-"))
    try:
        root.chmod(0o755)
        with as_user(victim):
            if not os.access(root, os.X_OK, effective_ids=True):
                pytest.skip("$TMPDIR is closed to other users")
        (marks := root / "marks").mkdir()
        marks.chmod(0o777)
        marker = marks / "ran"
        name, evil = _entry(root / "made-evil", _compiled(EVIL))
        _, honest = _entry(root / "made-honest", _compiled(SOURCE))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(MARKER, str(marker))
            yield Stage(root, marker, victim, name, evil, honest)
    finally:
        shutil.rmtree(root)


@functools.cache
def _compiled(source: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made.so")
        command = [*host_compiler.compiler(), "-x", "c++", "-", "-shared", "-fPIC", "-o", str(made)]
        subprocess.run(command, input=source.encode(), check=True)
        return made.read_bytes()


def key(source: str = SOURCE) -> tuple[str, ...]:
    """The key under which `host_compiler.library` looks up a source."""
    c = host_compiler
    return (".so", source, c._version(), c._processor(), *c.compiler(), *c.OPTIONS, *c.NATIVE)


def _entry(folder: Path, code: bytes) -> tuple[str, bytes]:
    """The name and content of a cache entry of `code`, as anyone who knows the cache's format can make it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWBIT_CACHE_DIR", str(folder))
        disk_cache.keep(code, *key())
    (path,) = folder.iterdir()
    return path.name, path.read_bytes()

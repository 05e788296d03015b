"""Planted cache entries of other users do not run: the kernel is compiled again, and a warning says why."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time

import pytest

from lowbit_kernels.runtime import host_compiler
from tests.kernels.planted import (
    AS_ROOT,
    ATTACKER,
    NEEDED,
    SOMEBODY,
    SOURCE,
    answer,
    own,
    staged,
)

pytestmark = NEEDED


def contents(folder) -> dict[str, tuple[int, int]]:
    return {p.name: (p.lstat().st_ino, p.lstat().st_mtime_ns) for p in folder.iterdir()}


def test_an_own_entry_is_used(stage, monkeypatch):
    """This shows that the planted entries of the other tests would run if they were used."""
    folder = stage.folder("cache", 0o700)
    stage.plant(folder, stage.victim, 0o600)
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(folder))
    assert answer(stage) == (666, [])
    assert stage.marker.exists()


def another_users(stage):
    folder = stage.folder("cache", 0o755, ATTACKER)
    return folder, folder, f"belongs to user {ATTACKER}"


def writable_by_all(stage):
    folder = stage.folder("cache", 0o777)
    return folder, folder, "0777"


def writable_by_all_but_sticky(stage):
    folder = stage.folder("cache", 0o1777)
    return folder, folder, "1777"


def writable_by_the_group(stage):
    folder = stage.folder("cache", 0o775)
    return folder, folder, "0775"


def below_one_writable_by_all(stage):
    stage.folder("open", 0o777)
    folder = stage.folder("open/cache")
    return folder, folder, "0777"


def below_another_users(stage):
    stage.folder("theirs", 0o755, ATTACKER)
    folder = stage.folder("theirs/cache")
    return folder, folder, f"belongs to user {ATTACKER}"


def another_users_link_to_their_folder(stage):
    folder = stage.folder("theirs", 0o755, ATTACKER)
    return stage.link("cache", folder, ATTACKER), folder, f"belongs to user {ATTACKER}"


def another_users_link_to_a_folder_of_the_victim(stage):
    folder = stage.folder("mine")
    return stage.link("cache", folder, ATTACKER), folder, f"belongs to user {ATTACKER}"


def own_link_to_another_users_folder(stage):
    folder = stage.folder("theirs", 0o755, ATTACKER)
    return stage.link("cache", folder, stage.victim), folder, f"belongs to user {ATTACKER}"


def below_a_link_to_another_users_folder(stage):
    stage.folder("theirs", 0o755, ATTACKER)
    folder = stage.folder("theirs/cache")
    link = stage.link("link", stage.root / "theirs", stage.victim)
    return link / "cache", folder, f"belongs to user {ATTACKER}"


FOLDERS = [
    another_users,
    writable_by_all,
    writable_by_all_but_sticky,
    writable_by_the_group,
    below_one_writable_by_all,
    below_another_users,
    another_users_link_to_their_folder,
    another_users_link_to_a_folder_of_the_victim,
    own_link_to_another_users_folder,
    below_a_link_to_another_users_folder,
]


@pytest.mark.parametrize("made", FOLDERS)
def test_a_folder_that_others_can_plant_in_is_not_used(stage, monkeypatch, made):
    chosen, folder, why = made(stage)
    # The file itself is fine: it belongs to the victim, and only the victim may write it.
    stage.plant(folder, owner=stage.victim, mode=0o600)
    before = contents(folder)
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(chosen))
    found, said = answer(stage)
    assert not stage.marker.exists(), "planted code has run"
    assert found == 42
    (warning,) = said
    assert why in warning and "LOWBIT_CACHE_DIR" in warning
    assert contents(folder) == before, "the folder was written to"


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_the_home_of_another_user_is_not_used(stage, monkeypatch, variable):
    """sudo may keep both variables of the calling user."""
    home = stage.folder("home", 0o755, ATTACKER)
    below = ("lowbit",) if variable == "XDG_CACHE_HOME" else (".cache", "lowbit")
    monkeypatch.setenv(variable, str(home))
    for i in range(len(below)):
        folder = stage.folder(str(home.joinpath(*below[: i + 1])), 0o755, ATTACKER)
    stage.plant(folder)
    found, said = answer(stage)
    assert not stage.marker.exists(), "planted code has run"
    assert found == 42
    (warning,) = said
    assert f"{home} belongs to user {ATTACKER}" in warning and "LOWBIT_CACHE_DIR" in warning


def another_users_file(stage, folder):
    stage.plant(folder)
    return f"belongs to user {ATTACKER}"


def file_writable_by_the_group(stage, folder):
    stage.plant(folder, stage.victim, 0o660)
    return "0660"


def file_writable_by_all(stage, folder):
    stage.plant(folder, stage.victim, 0o606)
    return "0606"


def link_to_another_users_file(stage, folder):
    theirs = stage.plant(stage.folder("theirs", 0o755, ATTACKER))
    own_link = folder / stage.name
    own_link.symlink_to(theirs)
    own(own_link, stage.victim)
    return "symbolic link"


def link_to_an_own_file(stage, folder):
    mine = stage.plant(stage.folder("mine"), stage.victim, 0o600)
    (folder / stage.name).symlink_to(mine)
    own(folder / stage.name, stage.victim)
    return "symbolic link"


def fifo(stage, folder):
    os.mkfifo(folder / stage.name)
    own(folder / stage.name, stage.victim)
    return "not a regular file"


def folder_of_that_name(stage, folder):
    (folder / stage.name).mkdir()
    own(folder / stage.name, stage.victim)
    return "not a regular file"


def device(stage, folder):
    try:
        os.mknod(folder / stage.name, 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # null
    except PermissionError:
        pytest.skip("making a device takes root")
    own(folder / stage.name, stage.victim)
    return "not a regular file"


def socket_of_that_name(stage, folder):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "s"))
    (folder / "s").rename(folder / stage.name)
    own(folder / stage.name, stage.victim)
    return "cannot be opened"


def twelve_gibibytes(stage, folder):
    os.truncate(stage.plant(folder, stage.victim, 0o600), 12 << 30)
    return "12884901888 bytes"


def unreadable(stage, folder):
    stage.plant(folder, stage.victim, 0)
    if stage.victim == 0:
        pytest.skip("root reads every file")
    return "cannot be opened"


def empty(stage, folder):
    os.truncate(stage.plant(folder, stage.victim, 0o600), 0)
    return "damaged"


def cut_off(stage, folder):
    path = stage.plant(folder, stage.victim, 0o600)
    path.write_bytes(stage.honest[: len(stage.honest) // 2])
    return "damaged"


def one_bit_flipped(stage, folder):
    path = stage.plant(folder, stage.victim, 0o600)
    code = bytearray(stage.honest)
    code[len(code) // 2] ^= 1
    path.write_bytes(code)
    return "damaged"


FILES = [
    another_users_file,
    file_writable_by_the_group,
    file_writable_by_all,
    link_to_another_users_file,
    link_to_an_own_file,
    fifo,
    folder_of_that_name,
    device,
    socket_of_that_name,
    twelve_gibibytes,
    unreadable,
    empty,
    cut_off,
    one_bit_flipped,
]


@pytest.mark.parametrize("made", FILES)
def test_a_file_that_others_may_have_written_is_replaced(stage, monkeypatch, made):
    folder = stage.folder("cache", 0o700)
    why = made(stage, folder)
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(folder))
    started = time.monotonic()
    found, said = answer(stage)
    assert time.monotonic() - started < 10
    assert not stage.marker.exists(), "planted code has run"
    assert found == 42
    assert why in said[0] and stage.name in said[0]
    if made is folder_of_that_name:  # a file cannot replace a folder
        assert len(said) == 2 and "cannot be kept" in said[1]
        return
    assert len(said) == 1
    with monkeypatch.context() as patch:
        patch.setattr(host_compiler, "_compile", None)
        assert answer(stage) == (42, []), "the file made instead is not taken"
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600 and path.lstat().st_uid == stage.victim


@AS_ROOT
def test_a_process_of_another_user(monkeypatch):
    """A process that has given up root's rights for good, not only for a while."""
    code = (
        "import ctypes, os, sys\n"
        "from lowbit_kernels.runtime import host_compiler as c\n"
        f"os.setgroups([]); os.setgid({SOMEBODY}); os.setuid({SOMEBODY})\n"
        f"print(c.library({SOURCE!r}).answer())\n"
        "c.library.cache_clear()\n"
        "if 'kept' in sys.argv: c._compile = None\n"
        f"print(c.library({SOURCE!r}).answer())"
    )
    with staged(SOMEBODY) as stage:
        planted = stage.folder("planted", 0o755, ATTACKER)
        stage.plant(planted)
        for folder, arguments in ((planted, ()), (stage.folder("own", 0o700), ("kept",))):
            monkeypatch.setenv("LOWBIT_CACHE_DIR", str(folder))
            command = [sys.executable, "-c", code, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert not stage.marker.exists(), "planted code has run"
            assert (done.returncode, done.stdout) == (0, "42\n42\n"), done.stderr
            assert done.stderr.count("UserWarning") == (folder == planted), done.stderr
            assert (f"belongs to user {ATTACKER}" in done.stderr) == (folder == planted)

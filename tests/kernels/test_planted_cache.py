"""Planted cache entries of other users do not run: the kernel is compiled again, and a warning says why."""

from __future__ import annotations

import os
import stat

import pytest

from lowbit_kernels.runtime import host_compiler
from tests.kernels.planted import (
    ATTACKER,
    NEEDED,
    answer,
    own,
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


def link_to_another_users_file(stage, folder):
    theirs = stage.plant(stage.folder("theirs", 0o755, ATTACKER))
    own_link = folder / stage.name
    own_link.symlink_to(theirs)
    own(own_link, stage.victim)
    return "not a regular file"


def fifo(stage, folder):
    os.mkfifo(folder / stage.name)
    own(folder / stage.name, stage.victim)
    return "not a regular file"


def unreadable(stage, folder):
    stage.plant(folder, stage.victim, 0)
    if stage.victim == 0:
        pytest.skip("root reads every file")
    return "Permission denied"


FILES = [
    another_users_file,
    file_writable_by_the_group,
    link_to_another_users_file,
    fifo,
    unreadable,
]


@pytest.mark.parametrize("made", FILES)
def test_a_file_that_others_may_have_written_is_replaced(stage, monkeypatch, made):
    folder = stage.folder("cache", 0o700)
    why = made(stage, folder)
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(folder))
    found, said = answer(stage)
    assert not stage.marker.exists(), "planted code has run"
    assert found == 42
    (warning,) = said
    assert why in warning and stage.name in warning
    with monkeypatch.context() as patch:
        patch.setattr(host_compiler, "_compile", None)
        assert answer(stage) == (42, []), "the file made instead is not taken"
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600 and path.lstat().st_uid == stage.victim

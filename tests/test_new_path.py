"""A file or folder is replaced whole: after a kill at any step, on a full disk, with another process beside it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from lowbit.files import new_path

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")

CHILD = textwrap.dedent(
    """
    import importlib.util, json, os, signal, sys
    spec = importlib.util.spec_from_file_location("new_path", sys.argv[1])
    new_path = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(new_path)
    from pathlib import Path
    if sys.argv[2] != "True":
        new_path._exchange = lambda: None
    for name, step in json.loads(sys.argv[3]):
        if not (process := os.fork()):
            break  # goes on below
        print("killed" if os.waitpid(process, 0)[1] == signal.SIGKILL else "not killed", flush=True)
    else:
        sys.exit()
    out, done = Path(name), 0

    def counted(call):
        def stepped(*args, **kwargs):
            global done
            done += 1
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return stepped

    for module, name in [(os, "rename"), (os, "replace"), (os, "open"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"),
                         (new_path, "_exchanged"), (new_path, "_flush"), (new_path, "_lock")]:
        setattr(module, name, counted(getattr(module, name)))
    if out.suffix:
        with new_path.new_file(out) as path:
            path.write_text("new")
    else:
        with new_path.workplace(out) as place:
            (place / "made").mkdir()
            (place / "made/config.json").write_text("new")
            (place / "made/inner").mkdir()
            (place / "made/inner/more").write_text("new")
            new_path.put_folder(place / "made", out)
    print(done)
    """
)


def replaced(outs: list[tuple[Path, int]], exchanges: bool) -> list[str]:
    """Replace each path in a fork of its own, which is killed at its step: a rename, a flush, an opened or a removed
    file. The lines that they print: the number of steps for one that ends, and for each whether it was killed."""
    paths = json.dumps([(str(out), step) for out, step in outs])
    command = [sys.executable, "-S", "-c", CHILD, new_path.__file__, str(exchanges), paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


def write(out: Path, content: str) -> None:
    if out.suffix:
        out.write_text(content)
        return
    out.mkdir()
    (out / "config.json").write_text(content)


def content(out: Path) -> str:
    return (out if out.suffix else out / "config.json").read_text()


@pytest.mark.parametrize(
    ("name", "exchanges", "replaces"),
    [("out.pt", True, True), ("out", True, True), ("out", False, True), ("out", True, False)],
    ids=str,
)
def test_killed_at_each_step(name: str, exchanges: bool, replaces: bool, tmp_path: Path) -> None:
    """`out` is whole afterwards, old or new, and the next run leaves nothing beside it."""
    out = tmp_path / name
    if replaces:
        write(out, "old")
    count, ended = replaced([(out, 0)], exchanges)
    steps, seen, back = int(count), set(), 0
    assert ended == "not killed" and steps > 8 and [p.name for p in tmp_path.iterdir()] == [name]
    outs = [tmp_path / f"{step}" / name for step in range(1, steps + 1)]
    for out in outs:
        out.parent.mkdir()
        if replaces:
            write(out, "old")
    assert replaced([*zip(outs, range(1, steps + 1), strict=True)], exchanges) == ["killed"] * steps
    for step, out in enumerate(outs, start=1):
        folder = out.parent
        was_there, has_lock = out.exists(), any(folder.glob(".*/lock"))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            new_path.clear(out)
        assert bool(told) == has_lock, step
        if replaces and not was_there:
            assert not exchanges and "the old one is back" in str(told[0].message), step
            back += 1
        seen.add(content(out) if out.exists() else "none")
        assert [p.name for p in folder.iterdir()] == ([name] if out.exists() else []), step
    assert seen == {"old" if replaces else "none", "new"}
    assert bool(back) == (replaces and not exchanges and not out.suffix)


def test_a_workplace_in_use_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with new_path.workplace(out) as first, new_path.workplace(out) as second:
        assert first.is_dir() and second.is_dir() and first != second
        new_path.clear(out)
        assert first.is_dir() and second.is_dir()
    assert [*tmp_path.iterdir()] == []


def test_a_workplace_without_a_lock_is_known_as_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(handle: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(new_path, "_lock", unsupported)
    out = tmp_path / "out"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with new_path.workplace(out) as place:
            new_path.clear(out)
            assert place.is_dir()
        new_path.clear(out)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["lock", "notes.txt"])
def test_what_is_not_surely_left_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without a lock, and a file system without locks."""
    place = tmp_path / ".out.lowbit-0123456789ab"
    place.mkdir()
    (place / name).write_text("mine")
    other = tmp_path / ".out.other"
    other.mkdir()

    def unsupported(handle: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(new_path, "_lock", unsupported)
    told = pytest.warns(UserWarning, match=r"0123456789ab is left of .* delete it unless")
    with told, new_path.workplace(tmp_path / "out") as made:
        assert (made / "unlocked").exists()
    assert (place / name).read_text() == "mine" and other.is_dir() and not made.exists()


def test_everything_is_flushed_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the folder afterwards."""
    done: list[str] = []
    flush, replace = new_path._flush, os.replace
    monkeypatch.setattr(new_path, "_flush", lambda p: done.append(f"flush {p.name}") or flush(p))
    monkeypatch.setattr(os, "replace", lambda a, b: done.append(f"put {a.name}") or replace(a, b))

    def exchanged(
        a: Path, b: Path, real: Callable[[Path, Path], bool] = new_path._exchanged
    ) -> bool:
        done.append("exchange")
        return real(a, b)

    monkeypatch.setattr(new_path, "_exchanged", exchanged)
    with new_path.new_file(tmp_path / "m.pt") as path:
        path.write_text("new")
    assert done == ["flush m.pt", "put m.pt", f"flush {tmp_path.name}"]
    done.clear()
    write(tmp_path / "out", "old")
    with new_path.workplace(tmp_path / "out") as place:
        write(place / "made", "new")
        new_path.put_folder(place / "made", tmp_path / "out")
    assert done[:3] == ["flush config.json", "flush made", "exchange"]
    assert done[3:] == [f"flush {place.name}", f"flush {tmp_path.name}"]
    assert content(tmp_path / "out") == "new"


def test_an_error_of_the_system_names_the_file(tmp_path: Path) -> None:
    out = tmp_path / "m.pt"
    out.write_text("old")

    def write() -> None:
        with new_path.new_file(out) as path:
            path.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device", "somewhere else")

    with pytest.raises(OSError, match=r"No space left on device: '.*m\.pt'"):
        write()
    assert out.read_text() == "old" and [*tmp_path.iterdir()] == [out]

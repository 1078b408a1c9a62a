"""Files that others have made: only regular ones are opened."""

import os
import socket
from pathlib import Path

import pytest

from inlinevit.files import NotRegularFileError, is_inside, open_regular, read_json, read_text


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        # The names of sockets are short.
        home = os.getcwd()
        os.chdir(path.parent)
        listener.bind(path.name)
        os.chdir(home)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_folder(path: Path) -> None:
    path.mkdir()


KINDS = {
    "a named pipe": make_pipe,
    "a socket": make_socket,
    "a character device": make_device,
    "a folder": make_folder,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("linked", [False, True])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str, linked: bool) -> None:
    path = tmp_path / "x.jpg"
    KINDS[kind](path)
    if linked:
        (tmp_path / "link.jpg").symlink_to(path)
        path = tmp_path / "link.jpg"
    with pytest.raises(NotRegularFileError, match=f"x?.jpg is {kind}, not a regular file: ") as caught:
        open_regular(path)
    assert caught.value.kind == kind


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before opening sees a regular file, as it would if the file were replaced in between."""
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    regular = os.stat(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda *arguments, **options: regular)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotRegularFileError, match="a named pipe"):
        open_regular(tmp_path / "pipe")
    assert len(os.listdir("/proc/self/fd")) == before, "it is closed again"


def test_regular_files_and_links_to_them_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é", encoding="utf-8")
    (tmp_path / "b.txt").symlink_to("a.txt")
    assert read_text(tmp_path / "b.txt") == "é"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")


def test_json(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": [1]}')
    assert read_json(file) == {"a": [1]}
    for content in ("[" * 100_000, "{", "1" * 5000, "\xff"):
        file.write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=r"nested|Expecting|digits|decode"):
            read_json(file)


def test_inside(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "out.tar").touch()
    (tmp_path / "data" / "in.tar").touch()
    (tmp_path / "data" / "inner.tar").symlink_to("in.tar")
    (tmp_path / "data" / "link.tar").symlink_to("../out.tar")
    (tmp_path / "alias").symlink_to("data")
    assert is_inside(tmp_path / "alias" / "in.tar", tmp_path / "data")
    assert is_inside(tmp_path / "data" / "inner.tar", tmp_path / "alias")
    assert not is_inside(tmp_path / "data" / "link.tar", tmp_path / "data")
    assert not is_inside(tmp_path / "data" / ".." / "out.tar", tmp_path / "data")
    assert not is_inside(tmp_path / "data", tmp_path / "data")

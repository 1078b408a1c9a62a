"""Files that others have made: only regular ones are opened."""

import ast
import os
import socket
from pathlib import Path

import pytest

from inlinevit.utils.files import NotRegularFileError, is_inside, open_regular, read_json, read_text, read_yaml
from tests import ROOT


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


def make_output_dir(path: Path) -> None:
    path.mkdir()


KINDS = {
    "a named pipe": make_pipe,
    "a socket": make_socket,
    "a character device": make_device,
    "a folder": make_output_dir,
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


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content",
    [BOMB, "&a [*a]", "&a {b: *a}", "[" * 100_000, "a: [", "!!python/object/apply:os.system [ls]", "!!timestamp x",
     "!!int x", "!!float [1]", "!!binary [1]", "9" * 5000, "2020-99-99", "? [a]\n: b", "\x00", "\xff"],
    ids=range(15),
)  # fmt: skip
def test_yaml_that_makes_no_sense_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.yaml").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"\w") as caught:
        read_yaml(tmp_path / "a.yaml")
    assert "\n" not in str(caught.value)


def test_yaml_may_name_parts_of_itself(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a [1, 2]\nb: *a\nc: {<<: {d: 3}}\n")
    assert read_yaml(tmp_path / "a.yaml") == {"a": [1, 2], "b": [1, 2], "c": {"d": 3}}


def test_yaml_is_parsed_in_one_place() -> None:
    """Anything else might build objects, or never end."""
    folder = ROOT / "src" / "inlinevit"
    calls = {
        (str(file.relative_to(folder)), node.attr)
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml"
    }
    # The value of an option on the command line comes from the user; what is dumped comes from us.
    allowed = {("utils/files.py", "safe_load"), ("utils/files.py", "YAMLError")}
    assert {call for call in calls if call[1] != "safe_dump"} == allowed


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

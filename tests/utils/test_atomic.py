import io
import json
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from PIL import Image

from inlinevit.utils import atomic as files
from inlinevit.utils.atomic import (
    atomic_text_writer,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_png,
    is_stream,
    json_items,
)


def test_content_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    atomic_write_json(path, {"a": "é"})
    atomic_write_json(path, {"b": [1]})
    assert json.loads(path.read_text()) == {"b": [1]}
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "^no space left on the disk for .*file: free some"),
        (OSError(122, "Disk quota exceeded"), "^no space left on the disk for .*file: free some"),
        (OSError(27, "File too large"), "^no space left on the disk for .*file: free some"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
    ],
)
def test_failure_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    path = tmp_path / "file"
    atomic_write_bytes(path, b"old")

    def fail(aside: Path, content: bytes) -> None:
        aside.write_bytes(content[:1])
        raise error

    monkeypatch.setattr(files, "write_bytes", fail)
    with pytest.raises(OSError, match=message):
        atomic_write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("items", [[], [{"name": "ä"}], [1, "two", None]])
def test_a_list_is_written_item_by_item(items: list[object]) -> None:
    stream = io.StringIO()
    with json_items(stream) as write:
        for item in items:
            write(item)
    assert json.loads(stream.getvalue()) == items


def write_text(path: Path, size: int) -> None:
    with atomic_text_writer(path) as stream:
        stream.write("x" * size)


def write_png(path: Path, size: int) -> None:
    atomic_write_png(path, Image.frombytes("L", (size, 1), random.Random(0).randbytes(size)))


@pytest.mark.parametrize("write", [write_text, write_png])
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("size", [10_000, 1_000_000])
def test_a_full_disk_leaves_what_was_there(
    write: Callable[[Path, int], None],
    is_new: bool,
    size: int,
    tmp_path: Path,
    file_limit: Callable[[int], AbstractContextManager[None]],
) -> None:
    """Whether the disk is full in the middle of writing, or when the last bytes are flushed."""
    path = tmp_path / "file"
    if not is_new:
        path.write_text("old")
    with file_limit(4096), pytest.raises(OSError, match=r"^no space left on the disk for .*file: free some"):
        write(path, size)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == ([] if is_new else [("file", "old")])
    write(path, 10)
    assert path.stat().st_size >= 10


def test_interruptions_leave_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def interrupt() -> None:
        with atomic_text_writer(path) as stream:
            stream.write("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_is_replaced_and_what_it_points_to_is_not(tmp_path: Path) -> None:
    photo, link, twin = tmp_path / "photo", tmp_path / "link", tmp_path / "twin"
    photo.write_text("photo")
    link.symlink_to(photo)
    twin.hardlink_to(photo)
    for path in (link, twin):
        write_text(path, 5)
        assert path.read_text() == "xxxxx"
        assert not path.is_symlink()
    # Not even through a link with the name that a file has while it is written.
    (tmp_path / ".out.unfinished").symlink_to(photo)
    write_text(tmp_path / "out", 5)
    assert photo.read_text() == "photo"
    assert sorted(os.listdir(tmp_path)) == ["link", "out", "photo", "twin"]


def test_names_as_long_as_they_may_be(tmp_path: Path) -> None:
    for letter in ("x", "ä"):
        path = tmp_path / (letter * (255 // len(letter.encode())))
        write_text(path, 3)
        assert path.read_text() == "xxx"


def test_pipes_and_devices_are_written_to(tmp_path: Path) -> None:
    write_text(Path(os.devnull), 5)
    assert not Path(os.devnull).is_file()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, 5)
    assert os.read(reader, 10) == b"xxxxx"
    os.close(reader)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_stream_that_goes_to_a_file_is_not_replaced(tmp_path: Path) -> None:
    """As /dev/stdout does, where a shell was told so: what is written before and after goes to the same file."""
    path = tmp_path / "out"
    with path.open("w") as stream:
        stream.write("before ")
        stream.flush()
        target = Path(f"/dev/fd/{stream.fileno()}")
        assert is_stream(target)
        link = tmp_path / "link"
        link.symlink_to(target)
        write_text(link, 3)
        stream.write(" after")
    assert path.read_text() == "before xxx after"
    assert not is_stream(path)

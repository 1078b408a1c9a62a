"""Files that a kill or a full disk cannot spoil: written aside, then renamed."""

import errno
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO, cast

from PIL import Image

# What the system says when there is no more space for a file.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What is put behind the name of a file that is being written. Longer names than most file systems take are cut.
UNFINISHED = ".unfinished"
LONGEST_NAME = 255
# Files that stand for streams that a process has open, once links in the names of folders are followed.
OPEN_STREAM = re.compile(r"/proc/(?P<process>\d+)(/task/\d+)?/fd/(?P<number>\d+)")
MOST_LINKS = 40


def make_output_dir(path: Path) -> None:
    """Make the folder of the results before the work, so that nothing is lost if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path} cannot be a folder of results ({error.strerror}): name another one") from error


@contextmanager
def disk_full_errors(path: Path) -> Iterator[None]:
    """A context in which something is written, and a full disk is told of in a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise OSError(
            f"no space left on the disk for {path}: free some and run the same command again, a training run goes on "
            "from its last checkpoint"
        ) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and see that it is on the disk."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A context that gives a path beside a file, for its new content; at the end, it replaces the file.

    Should something go wrong, the file stays as it was, and nothing is left beside it. A symbolic link is replaced
    itself: the file that it points to is not changed.
    """
    aside = path.with_name(_name_aside(path.name))
    with disk_full_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Nothing that lies there is written to, and no link followed.
        aside.unlink(missing_ok=True)
        try:
            yield aside
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def _name_aside(name: str) -> str:
    """The name of a file while it is being written."""
    length = LONGEST_NAME - len(f".{UNFINISHED}")
    return f".{os.fsdecode(os.fsencode(name)[:length])}{UNFINISHED}"


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Give a file new content: whoever reads it, whenever, sees all of the old or all of the new."""
    with atomic_path(path) as aside:
        write_bytes(aside, content)


def is_stream(path: Path) -> bool:
    """Whether a path is not a file that could be replaced, but a pipe, a device, or a stream such as /dev/stdout."""
    if _descriptor(path) is not None:
        return True
    return os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path)


def _descriptor(path: Path) -> int | None:
    """The number of the open stream that a path such as /dev/stdout stands for; None if it stands for none."""
    place = os.path.abspath(path)
    # Links are followed one by one, because the last of them hides that /dev/stdout stands for a stream.
    for _ in range(MOST_LINKS):
        place = os.path.join(os.path.realpath(os.path.dirname(place)), os.path.basename(place))
        if found := OPEN_STREAM.fullmatch(place):
            return int(found["number"]) if int(found["process"]) == os.getpid() else None
        if not os.path.islink(place):
            return None
        place = os.path.join(os.path.dirname(place), os.readlink(place))
    return None


@contextmanager
def _replacing(path: Path, mode: str, **options: Any) -> Iterator[IO[Any]]:
    """A stream for new content, opened with a mode and options of `open`; see atomic_text_writer."""
    if not is_stream(path):
        with atomic_path(path) as aside, open(aside, mode, **options) as stream:
            yield stream
        return
    descriptor = _descriptor(path)
    if descriptor is not None:
        # Opened by its name, a stream that goes to a file would begin at the beginning of that file.
        sys.stdout.flush()
    with disk_full_errors(path), open(path if descriptor is None else os.dup(descriptor), mode, **options) as stream:
        yield stream


@contextmanager
def atomic_text_writer(path: Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """A context that gives a stream for the new text of a file, in UTF-8, which replaces the file at the end.

    Should something go wrong, the file stays as it was. Pipes and devices are written to directly.

    Args:
        path: The file.
        newline: As for `open`; "" for csv, which writes its own ends of lines.
    """
    with _replacing(path, "w", encoding="utf-8", newline=newline) as stream:
        yield cast(TextIO, stream)


@contextmanager
def atomic_binary_writer(path: Path) -> Iterator[BinaryIO]:
    """As atomic_text_writer, for bytes."""
    with _replacing(path, "wb") as stream:
        yield cast(BinaryIO, stream)


def atomic_write_png(path: Path, image: Image.Image) -> None:
    """Give a file an image as its content, in PNG's format."""
    with atomic_binary_writer(path) as stream:
        image.save(stream, format="PNG")


def finite(values: dict[str, float]) -> dict[str, float | None]:
    """Numbers, with None for those that JSON has no word for."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def atomic_write_json(path: Path, value: Any) -> None:
    """Give a JSON file new content."""
    atomic_write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


@contextmanager
def json_items(stream: TextIO) -> Iterator[Callable[[Any], None]]:
    """Write a JSON list to a stream, item by item: the context gives the function that writes one item."""
    count = 0

    def write(item: Any) -> None:
        nonlocal count
        stream.write((",\n" if count else "[\n") + json.dumps(item, ensure_ascii=False))
        count += 1

    try:
        yield write
    finally:
        stream.write("\n]\n" if count else "[]\n")


@contextmanager
def json_list_writer(path: Path) -> Iterator[Callable[[Any], None]]:
    """Write a JSON list to a file, item by item: the context gives the function that writes one item.

    If an error ends the context, an existing file stays as it was. Without one, the items written so far become the
    file, as valid JSON, unless the disk is full.
    """
    failure: BaseException | None = None
    with atomic_text_writer(path) as stream:
        try:
            with json_items(stream) as write:
                yield write
        except BaseException as error:
            if path.exists() or (isinstance(error, OSError) and error.errno in FULL_DISK):
                raise
            failure = error
    if failure is not None:
        raise failure


def fsync_dir(path: Path) -> None:
    """See that renamed files of a folder are on the disk under their new names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Atomic writing: files are written under another name, then renamed, so a kill or a full disk cannot damage them."""

import errno
import json
import math
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from PIL import Image

# Error numbers when there is no more space for a file.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Suffix of a file that is being written. Names that are too long for most file systems are cut.
UNFINISHED = ".unfinished"
LONGEST_NAME = 255
# Paths of open streams of a process, after links in the names of folders are resolved.
OPEN_STREAM = re.compile(r"/proc/(?P<process>\d+)(/task/\d+)?/fd/(?P<number>\d+)")
MOST_LINKS = 40


def make_output_dir(path: Path) -> None:
    """Create the folder of the results before the work begins, so that nothing is lost if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path} cannot be a folder of results ({error.strerror}): name another one") from error


@contextmanager
def disk_full_errors(path: Path) -> Iterator[None]:
    """Turn the error of a full disk into one with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise OSError(
            f"no space left on the disk for {path}: free some and run the same command again, a training run "
            "resumes from its last checkpoint"
        ) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def path_beside(path: Path, name: str, suffix: str) -> Path:
    """Return a path in the folder of another one; a name that is too long with its suffix is cut."""
    kept = os.fsencode(name)[: LONGEST_NAME - len(suffix)]
    return path.with_name(f"{os.fsdecode(kept)}{suffix}")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path beside a file, for its new content; at the end, it replaces the file.

    On an error, the file stays as it was, and nothing is left beside it. A symbolic link is replaced itself: the file
    that it points to is not changed.
    """
    aside = path_beside(path, f".{path.name}", UNFINISHED)
    with disk_full_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whatever exists there is removed, not written to; links are not followed.
        aside.unlink(missing_ok=True)
        try:
            yield aside
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a path beside a folder, for its new content, where there is nothing; at the end, it replaces the folder.

    On an error, the folder stays as it was, and nothing is left beside it.
    """
    aside, old = (path_beside(path, f".{path.name}", suffix) for suffix in (UNFINISHED, f".old{UNFINISHED}"))
    with disk_full_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            for leftover in (aside, old):
                _remove(leftover)
            yield aside
            if os.path.lexists(path):
                os.replace(path, old)
            os.replace(aside, path)
        finally:
            for leftover in (aside, old):
                _remove(leftover)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Replace the content of a file: readers see all of the old or all of the new content."""
    with atomic_path(path) as aside:
        write_bytes(aside, content)


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe, a device, or a stream such as /dev/stdout, which cannot be replaced."""
    if _descriptor(path) is not None:
        return True
    return os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path)


def _descriptor(path: Path) -> int | None:
    """Return the descriptor of the open stream of a path such as /dev/stdout; None for other paths."""
    current = os.path.abspath(path)
    # Links are resolved one by one, because the last of them hides that /dev/stdout is a stream.
    for _ in range(MOST_LINKS):
        current = os.path.join(os.path.realpath(os.path.dirname(current)), os.path.basename(current))
        if found := OPEN_STREAM.fullmatch(current):
            return int(found["number"]) if int(found["process"]) == os.getpid() else None
        if not os.path.islink(current):
            return None
        current = os.path.join(os.path.dirname(current), os.readlink(current))
    return None


@contextmanager
def atomic_text_writer(path: Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """Yield a stream for the new text of a file, in UTF-8, which replaces the file at the end.

    On an error, the file stays as it was. Pipes and devices are written to directly.

    Args:
        path: The file.
        newline: As for `open`; "" for csv, which writes its own line endings.
    """
    if not is_stream(path):
        with atomic_path(path) as aside, open(aside, "w", encoding="utf-8", newline=newline) as stream:
            yield stream
        return
    target: Path | int = path
    if (descriptor := _descriptor(path)) is not None:
        # Opened by its name, a stream to a file would start at the beginning of that file.
        sys.stdout.flush()
        target = os.dup(descriptor)
    with disk_full_errors(path), open(target, "w", encoding="utf-8", newline=newline) as stream:
        yield stream


def atomic_write_png(path: Path, image: Image.Image) -> None:
    """Write an image as a PNG file."""
    with atomic_path(path) as aside:
        image.save(aside, format="PNG")


def finite(values: dict[str, float]) -> dict[str, float | None]:
    """Return numbers with None for NaN and infinity, which JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def atomic_write_json(path: Path, value: Any) -> None:
    """Write a JSON file."""
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


def fsync_dir(path: Path) -> None:
    """Flush the names of a folder's files to the disk, after some were renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

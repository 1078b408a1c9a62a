"""Files that a kill or a full disk cannot spoil: written aside, then renamed."""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def make_folder(path: Path) -> None:
    """Make the folder of the results before the work, so that nothing is lost if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path} cannot be a folder of results ({error.strerror}): name another one") from error


@contextmanager
def space_for(path: Path) -> Iterator[None]:
    """A context in which something is written, and a full disk is told of in a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
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


def replace_bytes(path: Path, content: bytes) -> None:
    """Give a file new content: whoever reads it, whenever, sees all of the old or all of the new."""
    aside = path.with_name(f".{path.name}.unfinished")
    with space_for(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_bytes(aside, content)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def finite(values: dict[str, float]) -> dict[str, float | None]:
    """Numbers, with None for those that JSON has no word for."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def replace_json(path: Path, value: Any) -> None:
    """Give a JSON file new content."""
    replace_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


@contextmanager
def json_list(path: Path) -> Iterator[Callable[[Any], None]]:
    """A context in which a JSON list is written, item by item: it gives the function that writes one.

    Should something go wrong, what was written before is JSON all the same.
    """
    with path.open("w", encoding="utf-8") as stream:
        separator = "[\n"

        def write(item: Any) -> None:
            nonlocal separator
            stream.write(separator + json.dumps(item, ensure_ascii=False))
            separator = ",\n"

        try:
            yield write
        finally:
            stream.write("[]\n" if separator == "[\n" else "\n]\n")


def sync_folder(path: Path) -> None:
    """See that renamed files of a folder are on the disk under their new names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

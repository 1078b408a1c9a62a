"""Reading files that others have made: only regular files are opened, so that nothing waits for ever."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

# What can stand under the name of a file, besides a regular file.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
# Without O_NONBLOCK, opening a named pipe waits for a writer. Not every system has these flags.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))


class NotRegularFileError(OSError):
    """Something that is not a regular file stands under the name of one.

    Attributes:
        kind: What it is, such as "a named pipe".
    """

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        super().__init__(f"{os.fspath(path)} is {kind}, not a regular file: name or put a regular file there")
        self.kind = kind


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a symbolic link to one, for reading. This never waits for a pipe or a device.

    The type is checked twice: before the file is opened, since opening alone has an effect on some devices, and on the
    open file, since another one may have taken its place.

    Args:
        path: The file.

    Raises:
        NotRegularFileError: It is a pipe, a device, a socket or a folder.
        OSError: It cannot be opened.
    """
    _require_regular(path, os.stat(path).st_mode)
    descriptor = os.open(path, _FLAGS)
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_regular(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotRegularFileError(path, _KINDS.get(stat.S_IFMT(mode), "a special file"))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file; raises as open_regular does."""
    with open_regular(path) as stream:
        return stream.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """The content of a regular file in UTF-8; raises as open_regular does, and ValueError if it is not UTF-8."""
    return read_bytes(path).decode("utf-8")


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: It cannot be opened, or it is not a regular file.
        ValueError: It is not valid JSON, or nested too deeply; the message does not name the file.
    """
    content = read_bytes(path)
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def is_inside(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a place inside a folder once all symbolic links are followed."""
    place, home = (Path(os.path.realpath(each)) for each in (path, folder))
    return home in place.parents

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
# Nodes of a YAML file: those of people have thousands.
_MOST_NODES = 1_000_000


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


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The content of a YAML file of plain values; see parse_yaml.

    Raises:
        OSError: It cannot be opened, or it is not a regular file.
        ValueError: It is not valid YAML in UTF-8, or has too many nodes; the message does not name the file.
    """
    return parse_yaml(read_text(path))


def parse_yaml(text: str) -> Any:
    """YAML as dicts, lists, numbers and words; no objects are built from it.

    Raises:
        ValueError: It is not valid, or repeats parts of itself until it has more than a million nodes.
    """
    # Here, because the models alone do not need it.
    import yaml

    try:
        content = yaml.safe_load(text)
    # What is wrong with a tag (`!!timestamp x`) makes the library raise more than its own errors.
    except (yaml.YAMLError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())[:300] or type(error).__name__) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if _count_nodes(content, {}) > _MOST_NODES:
        raise ValueError("it repeats itself too often")
    return content


def _count_nodes(value: Any, counts: dict[int, float]) -> float:
    """How many nodes a structure has when everything that is in it twice is written out.

    Args:
        value: The structure.
        counts: Nodes of the parts that are known, by their identity; gets more.
    """
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in counts:
        # Until it is known: a part that holds itself has no end.
        counts[id(value)] = float("inf")
        parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        counts[id(value)] = 1 + sum(_count_nodes(part, counts) for part in parts)
    return counts[id(value)]


def is_inside(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a place inside a folder once all symbolic links are followed."""
    place, home = (Path(os.path.realpath(each)) for each in (path, folder))
    return home in place.parents

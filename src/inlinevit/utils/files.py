"""Safe reading of files from elsewhere: only regular files are opened, so that nothing blocks."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

# Types of files besides regular ones.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
# Without O_NONBLOCK, opening a named pipe waits for a writer. Not every system has these flags.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
# Nodes of a YAML file; usual files have thousands.
_MOST_NODES = 1_000_000


class NotRegularFileError(OSError):
    """A path is not that of a regular file.

    Attributes:
        kind: What it is instead, such as "a named pipe".
    """

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        super().__init__(f"{os.fspath(path)} is {kind}, not a regular file: name or put a regular file there")
        self.kind = kind


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a symbolic link to one, for reading. This never waits for a pipe or a device.

    The type is checked twice: before the file is opened, since opening some devices has effects, and on the open file,
    since it may have been replaced in between.

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
    """Read a regular file; raises as open_regular does."""
    with open_regular(path) as stream:
        return stream.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a regular file in UTF-8; raises as open_regular does, and ValueError if it is not UTF-8."""
    return read_bytes(path).decode("utf-8")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; raises as open_regular does, and ValueError if it is not valid or nested too deeply.

    The message of ValueError does not name the file.
    """
    content = read_bytes(path)
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Read a YAML file of plain values in UTF-8; raises as open_regular and parse_yaml do."""
    return parse_yaml(read_text(path))


def parse_yaml(text: str) -> Any:
    """Parse YAML into dicts, lists, numbers and strings; no other objects are constructed.

    Raises:
        ValueError: It is not valid, or has more than a million nodes when its aliases are expanded.
    """
    # Here, because the models alone do not need it.
    import yaml

    try:
        content = yaml.safe_load(text)
    # Wrong tags (`!!timestamp x`) make the library raise other errors than its own.
    except (yaml.YAMLError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())[:300] or type(error).__name__) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if _count_nodes(content, {}) > _MOST_NODES:
        raise ValueError("it repeats itself too often")
    return content


def _count_nodes(value: Any, counts: dict[int, float]) -> float:
    """Count the nodes of a structure when its aliases are expanded; `counts` are those of known parts, by id."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in counts:
        # Until it is known: a part that contains itself is infinite.
        counts[id(value)] = float("inf")
        parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        counts[id(value)] = 1 + sum(_count_nodes(part, counts) for part in parts)
    return counts[id(value)]


def is_inside(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether a path is inside a folder after all symbolic links are resolved."""
    real_path, real_folder = (Path(os.path.realpath(each)) for each in (path, folder))
    return real_folder in real_path.parents

"""A lock on the folder of a run, so that one process at a time writes into it."""

import errno
import fcntl
import json
import os
import socket
import warnings
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

RUN_LOCK = ".lock"
# Locked folders, by device and inode: fcntl's locks do not exclude runs of the same process from each other.
_HELD: set[tuple[int, int]] = set()


class RunLock:
    """A lock on the folder of a run, with the host and the process that hold it.

    The operating system releases it when the process ends, in whatever way. A process that ends regularly also removes
    the file; one that was killed leaves it, and the next process that takes the lock reports it as stale.

    Args:
        folder: The folder of the run; it exists.
        is_run: Whether a run has used the folder before; otherwise, the lock file of another program is not replaced.
        option: The option that chooses the folder, for messages.
    """

    def __init__(self, folder: Path, is_run: bool = True, option: str = "--run.output") -> None:
        self.file, self.is_run, self.option = folder / RUN_LOCK, is_run, option
        self.stream: IO[bytes] | None = None
        self.key = (0, 0)

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock; ValueError if another process, or another run of this one, holds it."""
        status = os.stat(self.file.parent)
        self.key = status.st_dev, status.st_ino
        if self.key in _HELD:
            raise ValueError(
                f"{self.file.parent} is in use by another run of this process: wait for its end, or choose another "
                f"{self.option}"
            )
        stream = self._open()
        former = _read_owner(stream)
        if former is not None and not self.is_run and not {"host", "pid"} <= former.keys():
            stream.close()
            raise ValueError(
                f"{self.file} is not the lock of a training run and would be replaced: choose another {self.option}"
            )
        stream.seek(0)
        stream.truncate()
        own = {"host": socket.gethostname(), "pid": os.getpid(), "since": datetime.now().isoformat(timespec="seconds")}
        try:
            stream.write(json.dumps(own).encode())
            stream.flush()
        except OSError:
            # The disk is full.
            self.file.unlink(missing_ok=True)
            with suppress(OSError):
                stream.close()
            raise
        self.stream = stream
        _HELD.add(self.key)
        if former is not None:
            warnings.warn(
                f"{self.file} is stale: {_describe(former)} has ended without removing it, its lock is taken over",
                stacklevel=2,
            )

    def _open(self) -> IO[bytes]:
        """Open and lock the file; it is the one that has this name, and not one that its owner has just removed."""
        while True:
            # A process that only reads the folder, such as an evaluation, does not need the lock.
            descriptor = os.open(
                self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644
            )
            stream = os.fdopen(descriptor, "r+b")
            try:
                # Record locks, unlike flock's, are not inherited by data workers, which may outlive a killed run.
                fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = _read_owner(stream)
                stream.close()
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise ValueError(
                        f"{self.file.parent} is in use by {_describe(owner)}: wait until it has ended, stop it, or "
                        f"choose another {self.option}"
                    ) from None
                raise OSError(
                    f"{self.file} cannot be locked ({error.strerror}): choose a {self.option} on a file system that "
                    "supports locks"
                ) from error
            try:
                if os.path.samestat(os.fstat(stream.fileno()), os.stat(self.file)):
                    return stream
            except FileNotFoundError:
                pass
            stream.close()

    def release(self, folder: Path | None = None) -> None:
        """Release the lock, and remove its file, which is in `folder` if the folder of the run was renamed."""
        if self.stream is not None:
            (self.file if folder is None else folder / RUN_LOCK).unlink(missing_ok=True)
            self.stream.close()
            self.stream = None
            _HELD.discard(self.key)


def _read_owner(stream: IO[bytes]) -> dict[str, Any] | None:
    """Return the process that has written a lock file; None if it is empty."""
    stream.seek(0)
    content = stream.read(4096)
    try:
        owner = json.loads(content)
    except ValueError:
        return {} if content else None
    return owner if isinstance(owner, dict) else {}


def _describe(owner: dict[str, Any] | None) -> str:
    """Describe a process for a message."""
    if not owner:
        return "another process"
    host, pid, since = (str(owner.get(key, "?"))[:80] for key in ("host", "pid", "since"))
    return f"process {pid} on {host} (since {since})"

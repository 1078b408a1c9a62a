"""The tokens of one stage: a map that is read and written by rows, in memory or in a file."""

import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..utils.atomic import FULL_DISK
from ..utils.memory import FLOAT_BYTES, GIGABYTE


class TokenMap(ABC):
    """A float32 map (height, width, channels) that is read and written by rows.

    Args:
        height: Rows.
        width: Tokens of a row.
        channels: Channels of a token.
    """

    def __init__(self, height: int, width: int, channels: int) -> None:
        self.height, self.width, self.channels = height, width, channels

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return FLOAT_BYTES * self.width * self.channels

    @abstractmethod
    def read(self, top: int, bottom: int) -> Tensor:
        """Return the rows from `top` to before `bottom`, (rows, width, channels): the map itself, or a copy."""

    @abstractmethod
    def write(self, top: int, rows: Tensor) -> None:
        """Replace the rows from `top` on by others, (rows, width, channels)."""

    @abstractmethod
    def release(self, top: int, bottom: int) -> None:
        """Give back the memory of rows that are not read again."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory, or close the file."""


class MemoryTokenMap(TokenMap):
    """A map in memory of its own, which is taken as rows are written and given back by rows.

    Args:
        height: See TokenMap.
        width: See TokenMap.
        channels: See TokenMap.
    """

    def __init__(self, height: int, width: int, channels: int) -> None:
        super().__init__(height, width, channels)
        size = height * self.row_bytes
        # Private pages: those of a shared mapping could not be given back.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self.memory = mmap.mmap(-1, size, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.tokens = torch.frombuffer(self.memory, dtype=torch.float32).view(height, width, channels)

    def read(self, top: int, bottom: int) -> Tensor:
        """See TokenMap.read; these rows are the map itself."""
        return self.tokens[top:bottom]

    def write(self, top: int, rows: Tensor) -> None:
        """See TokenMap.write."""
        target = self.tokens[top : top + len(rows)]
        # Rows of the map itself may have been changed in place.
        if rows.data_ptr() != target.data_ptr():
            target.copy_(rows)

    def release(self, top: int, bottom: int) -> None:
        """See TokenMap.release: whole pages of these rows are given back."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = -(-top * self.row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # Rounded down, since a page that begins in these rows and ends after them would be given back, too.
        length = bottom * self.row_bytes // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self.memory.madvise(mmap.MADV_DONTNEED, first, length)

    def close(self) -> None:
        """See TokenMap.close: rows that are still referred to stay readable, but are lost."""
        self.release(0, self.height)
        self.tokens = torch.empty(0)


class FileTokenMap(TokenMap):
    """A map in a file, which is not mapped into memory: only rows that are being computed with are resident.

    Args:
        height: See TokenMap.
        width: See TokenMap.
        channels: See TokenMap.
        folder: Where the file is made, without a name: it vanishes however the process ends.
        path: In place of `folder`, the file itself, which is kept; its rows are those that it has already.
    """

    def __init__(
        self, height: int, width: int, channels: int, *, folder: Path | None = None, path: Path | None = None
    ) -> None:
        super().__init__(height, width, channels)
        self.size = height * self.row_bytes
        self.place = path or folder
        if path is None:
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        else:
            self.file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        try:
            # All of it at once, so that a full disk is noticed before the work begins.
            os.posix_fallocate(self.file.fileno(), 0, self.size)
        except OSError as error:
            self.file.close()
            raise self.explain(error) from error

    def read(self, top: int, bottom: int) -> Tensor:
        """See TokenMap.read; these rows are a copy."""
        rows = torch.empty(bottom - top, self.width, self.channels)
        if rows.numel() == 0:
            return rows
        buffer, done = memoryview(cast(Any, rows.numpy())).cast("B"), 0
        while done < len(buffer):
            count = os.preadv(self.file.fileno(), [buffer[done:]], top * self.row_bytes + done)
            assert count > 0, "the file is shorter than the map"
            done += count
        return rows

    def write(self, top: int, rows: Tensor) -> None:
        """See TokenMap.write."""
        buffer, done = memoryview(cast(Any, rows.contiguous().numpy())).cast("B"), 0
        while done < len(buffer):
            try:
                done += os.pwrite(self.file.fileno(), buffer[done:], top * self.row_bytes + done)
            except OSError as error:
                raise self.explain(error) from error

    def release(self, top: int, bottom: int) -> None:
        """See TokenMap.release: rows in a file take no memory."""

    def flush(self) -> None:
        """Write all rows to the disk."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """See TokenMap.close."""
        self.file.close()

    def explain(self, error: OSError) -> OSError:
        """Return the error to raise for one of the file: a full disk is reported with a remedy."""
        if error.errno not in FULL_DISK:
            return error
        return OSError(
            f"the tokens of the image need {self.size / GIGABYTE:.1f} GB in {self.place}, which has no space left: "
            "free some, name another folder to spill to, or allow more memory"
        )

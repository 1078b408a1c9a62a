"""From exceptions to one sentence on stderr and an exit code."""

import errno
import os
import re
import sys
from argparse import ArgumentError
from typing import TextIO

from ..engine.errors import RunEnded, Stopped
from ..utils.extras import missing_extra
from ..utils.validation import did_you_mean

TRACEBACK = "INLINEVIT_TRACEBACK"


def report_error(error: Exception, options: list[str]) -> int:
    """Print what is wrong in one sentence and return the exit code; raise what is not the user's mistake again.

    Args:
        error: The exception.
        options: Options or commands that the user could have meant.
    """
    message = " ".join(str(error).split()).removesuffix(".")
    if isinstance(error, ArgumentError):
        return print_error(f"error: {message}{hint(message, options)}", 2)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return print_error(f"error: no space left on the disk ({message}): free some and run the same command again", 1)
    if isinstance(error, OSError) and error.errno is not None:
        return print_error(f"error: {error.filename or 'a file'} cannot be used ({error.strerror}): check the path", 1)
    if isinstance(error, ValueError | OSError):
        return print_error(f"error: {message}", 1)
    if (extra := missing_extra(error)) is not None:
        return print_error(f"error: {message}: pip install 'inlinevit[{extra}]'", 1)
    if isinstance(error, RuntimeError) and re.search(r"Connection (closed|reset) by peer", message):
        return print_error("error: another process has ended before this one: see its message", 1)
    if isinstance(error, Stopped):
        return print_error(message, 128 + error.signal_number)
    if isinstance(error, RunEnded):
        return print_error(f"error: {message}", 1)
    raise error


def print_error(message: str, code: int) -> int:
    """Print a message to stderr, with the number of the process where there are several; return the code."""
    rank = os.environ.get("RANK", "0")
    print(message if rank == "0" else f"process {rank}: {message}", file=sys.stderr)
    return code


def hint(message: str, options: list[str]) -> str:
    """Return what the user could have meant, for a message of the parser; "" if the message has a remedy itself."""
    if re.search(r"did you mean|`inlinevit recipes", message):
        return ""
    if wrong := re.search(r"(?:[Oo]ption '|arguments: --|invalid choice: ')([\w.]+)", message):
        near = did_you_mean(wrong[1], options)
    elif wrong := re.search(r"Literal\[(.*)\]\. Got value: (\S+)", message):
        near = did_you_mean(wrong[2], re.findall(r"'(.*?)'", wrong[1]))
    else:
        near = ""
    return f": {near or 'see --help'}"


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line."""
    print(f"warning: {message}", file=sys.stderr)

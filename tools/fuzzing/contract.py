"""What is promised for every input: a valid result, or a refusal in one sentence; no code, no hang, no crash."""

import os
import resource
import sys
import time
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ACCEPTED, REFUSED = "accepted", "refused"
# Seconds of this process and bytes that one input may cost; inputs have some kilobytes.
MOST_SECONDS = 5.0
MOST_BYTES = 2**30
LONGEST_MESSAGE = 1500
# Events of Python's audit hooks that no data may cause.
FORBIDDEN_EVENTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "os.startfile",
    "os.kill",
    "subprocess.Popen",
    "pty.spawn",
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.getaddrinfo",
    "urllib.Request",
    "ftplib.connect",
    "http.client.connect",
    "ctypes.dlopen",
    "ctypes.dlsym",
    "pickle.find_class",
    "os.putenv",
)
# Changes to files, which may happen in the folder of the inputs.
CHANGES = (
    "os.chmod",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class RanCode(BaseException):
    """Data have caused what only code may; no `except Exception` hides it."""


@dataclass
class Outcome:
    """What came of one input.

    Attributes:
        kind: "accepted", "refused", or what went wrong.
        detail: The message, or the traceback.
    """

    kind: str
    detail: str = ""

    @property
    def is_finding(self) -> bool:
        """Whether the promise was broken."""
        return self.kind not in (ACCEPTED, REFUSED)


class Watch:
    """Notices code that runs, by an audit hook, which stays for the life of the process.

    Args:
        folder: The only place where files may be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = os.path.realpath(folder)
        self.active = False
        self.seen: list[str] = []
        self.packages = {name.partition(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event in FORBIDDEN_EVENTS:
            self._report(f"{event} {arguments!r:.200}")
        elif event == "import" and arguments[0].partition(".")[0] not in self.packages:
            self._report(f"import of {arguments[0]}")
        elif event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES):
            for path in arguments[: 2 if event in ("os.rename", "os.symlink", "os.link") else 1]:
                if isinstance(path, str | bytes | os.PathLike) and not self._is_inside(os.fsdecode(path)):
                    self._report(f"{event} of {path!r:.200}")

    def _is_inside(self, path: str) -> bool:
        place = os.path.realpath(path)
        return place == self.folder or place.startswith(f"{self.folder}{os.sep}")

    def _report(self, what: str) -> None:
        self.seen.append(what)
        raise RanCode(what)


def judge(run: Callable[[Path], None], path: Path, watch: Watch | None = None, marker: Path | None = None) -> Outcome:
    """Run one input, and say whether the promise was kept.

    Args:
        run: Reads the input and checks the result; raises AssertionError if that is not valid.
        path: The input.
        watch: Notices code that runs.
        marker: A file that code in the inputs would make.
    """
    start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if watch is not None:
        watch.seen.clear()
        watch.active = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(path)
        outcome = Outcome(ACCEPTED)
    except (ValueError, OSError, ArgumentError) as error:
        outcome = judge_message(error)
    except RanCode as error:
        outcome = Outcome("code", str(error))
    except AssertionError:
        outcome = Outcome("wrong result", traceback.format_exc())
    # Whatever it is, it is a finding: an error of another kind is a traceback for the user.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome = Outcome(f"crash: {type(error).__name__}", traceback.format_exc()[-5000:])
    finally:
        if watch is not None:
            watch.active = False
    if (watch is not None and watch.seen) or (marker is not None and marker.exists()):
        return Outcome("code", "; ".join(watch.seen if watch is not None else []) or "the marker was made")
    if outcome.is_finding:
        return outcome
    if time.process_time() - start > MOST_SECONDS:
        return Outcome("slow", f"{time.process_time() - start:.1f} seconds, then {outcome.kind}: {outcome.detail}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024
    if grown > MOST_BYTES:
        return Outcome("memory", f"{grown} bytes, then {outcome.kind}: {outcome.detail}")
    return outcome


def judge_message(error: Exception) -> Outcome:
    """Whether a refusal is one sentence on one line."""
    message = str(error)
    problems = {
        "empty": not message.strip(),
        "of several lines": "\n" in message or "\r" in message,
        f"longer than {LONGEST_MESSAGE} characters": len(message) > LONGEST_MESSAGE,
        "advice to run code": "weights_only=False" in message,
    }
    wrong = [what for what, is_so in problems.items() if is_so]
    if wrong:
        return Outcome(
            f"message {wrong[0]}", f"{type(error).__name__}: {message[:3000]}\n{traceback.format_exc()[-3000:]}"
        )
    return Outcome(REFUSED, f"{type(error).__name__}: {message}")

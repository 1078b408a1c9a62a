"""Progress of long jobs, on stderr: a bar with the time left on a terminal, a line every half minute in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..data.images import printable
from ..utils.console import new_console

# Seconds between lines in a log; shorter jobs print nothing there.
LINE_SECONDS = 30.0
# The bar of a job that takes fewer seconds disappears at its end; a part of a job gets a bar only after these seconds.
SHORT_SECONDS = 2.0


class _Job:
    """A job that is shown, or a nested one: a part of another job.

    Args:
        what: What is done, such as "predicting".
        total: How many steps there are; None = not known.
        unit: What a step is, in the plural, such as "images".
        parent: The job that this is a part of; None = of no other.
    """

    def __init__(self, what: str, total: int | None, unit: str, parent: "_Job | None") -> None:
        self.what, self.total, self.unit, self.is_nested = printable(what), total, unit, parent is not None
        self.display: Progress | None = _make_display() if parent is None else parent.display
        self.bar: TaskID | None = None
        # Steps that are done, and how many of them the last line was about.
        self.done, self.reported = 0, 0
        self.started = self.last_line = time.monotonic()
        if self.display is not None and not self.is_nested:
            self.display.start()
            self.add_bar()

    def add_bar(self) -> None:
        """Show a bar on the terminal."""
        if self.display is not None:
            self.bar = self.display.add_task(self.what, total=self.total, completed=self.done, unit=self.unit)

    def advance(self) -> None:
        """Count a step."""
        self.done += 1
        now = time.monotonic()
        if self.display is None:
            if now - self.last_line >= LINE_SECONDS:
                self.print_line(now)
            return
        if self.bar is None and now - self.started >= SHORT_SECONDS:
            self.add_bar()
        if self.bar is not None:
            self.display.update(self.bar, completed=self.done)

    def print_line(self, now: float) -> None:
        """Print a line for a log."""
        self.last_line, self.reported = now, self.done
        count = f"{self.done} {self.unit}" if self.total is None else f"{self.done} of {self.total} {self.unit}"
        words = [f"{self.what}: {count}", f"{timedelta(seconds=round(now - self.started))} elapsed"]
        if self.total is not None and self.done:
            left = (now - self.started) / self.done * (self.total - self.done)
            words.append(f"left {timedelta(seconds=round(left))}")
        print(", ".join(words), file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the bar, or print the last line."""
        now = time.monotonic()
        if self.display is None:
            if now - self.started >= LINE_SECONDS and self.reported != self.done:
                self.print_line(now)
        elif self.is_nested:
            if self.bar is not None:
                self.display.remove_task(self.bar)
        else:
            self.display.live.transient = now - self.started < SHORT_SECONDS
            self.display.stop()


def _make_display() -> Progress | None:
    """Return rich's display of bars; None if stderr is not a terminal."""
    console = new_console(stderr=True)
    if not console.is_interactive:
        return None
    return Progress(
        # File names may look like markup.
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        # rich would print results to the console of the bar: only where that is the same terminal.
        redirect_stdout=sys.stdout.isatty(),
    )


# What is shown now: a job, the part of it that is being done, ….
_shown: list[_Job] = []


@contextmanager
def job_progress(what: str, total: int | None, unit: str, *, disable: bool = False) -> Iterator[Callable[[], None]]:
    """Show how far a job is; the context gives the function to call after each step.

    On a terminal there is a bar with the time left. In a log there is a line every LINE_SECONDS and one at the end;
    nothing for shorter jobs. Everything goes to stderr.

    Args:
        what: What is done, such as "predicting".
        total: How many steps there are; None = not known.
        unit: What a step is, in the plural, such as "images".
        disable: Show nothing.
    """
    if disable:
        yield lambda: None
        return
    job = _Job(what, total, unit, _shown[-1] if _shown else None)
    _shown.append(job)
    try:
        yield job.advance
    finally:
        _shown.remove(job)
        job.close()


@contextmanager
def nested_progress(what: str, total: int | None, unit: str) -> Iterator[Callable[[], None]]:
    """Show how far a part of a job is, below the job itself; if no job is shown, nothing. See job_progress."""
    with job_progress(what, total, unit, disable=not _shown) as advance:
        yield advance

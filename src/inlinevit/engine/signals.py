"""SIGTERM and Ctrl-C: the first asks a run to stop, the second ends it."""

import multiprocessing
import os
import signal
import time
from types import FrameType

# A launcher may forward a signal that the whole process group gets: within these seconds, it counts once.
REPEATED_SIGNAL = 0.2


class StopRequest:
    """A context in which SIGTERM and Ctrl-C are recorded, so that a run can save a checkpoint and stop.

    A second Ctrl-C raises KeyboardInterrupt; a second SIGTERM ends the process and its data workers at once.

    Attributes:
        signal_number: The signal that was received; None if there was none.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.time = 0.0
        self.former_handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        self.former_handlers = {
            number: signal.signal(number, self.handle) for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.former_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if number == signal.SIGINT == self.signal_number:
            raise KeyboardInterrupt
        if number == signal.SIGTERM == self.signal_number and time.monotonic() - self.time > REPEATED_SIGNAL:
            for worker in multiprocessing.active_children():
                worker.kill()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if self.signal_number is None:
            self.time = time.monotonic()
        self.signal_number = number

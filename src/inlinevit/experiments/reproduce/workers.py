"""Processes that train one run after another, several at a time."""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType

import torch

from ...engine.trainer import Stopped
from ...tasks.classification.config import ClassificationConfig
from .cells import Ended, train_cell

# Told of each run, by its place: None when it begins, and how it ended.
Listener = Callable[[int, Ended | None], None]


def work(connection: Connection) -> None:
    """What a worker does: train what it is sent, until nobody is there to send anything."""
    torch.set_num_threads(1)
    try:
        while True:
            connection.send(train_cell(connection.recv()))
    except (EOFError, ConnectionError, Stopped, KeyboardInterrupt):
        return


class Workers:
    """A few processes that share out runs among themselves.

    Args:
        configs: The runs, in the order of their turn.
        jobs: How many processes.
        tell: Told of each run that begins or ends.
    """

    def __init__(self, configs: Sequence[ClassificationConfig], jobs: int, tell: Listener) -> None:
        self.configs, self.tell = configs, tell
        self.left = deque(range(len(configs)))
        self.processes: dict[Connection, SpawnProcess] = {}
        self.at_work: dict[Connection, int] = {}
        self.jobs = min(jobs, len(configs))
        self.stop_signal: int | None = None

    def run(self) -> None:
        """Train all.

        Raises:
            Stopped: SIGTERM or Ctrl-C asked for it; runs at work have left checkpoints.
        """
        with self.stoppable():
            try:
                for _ in range(self.jobs):
                    self.start()
                while self.processes:
                    for connection in wait(list(self.processes)):
                        assert isinstance(connection, Connection)
                        self.hear(connection)
            finally:
                for process in self.processes.values():
                    process.kill()
        if self.stop_signal is not None:
            raise Stopped("stopped: the same command goes on from here", self.stop_signal)

    def start(self) -> None:
        """Start a process and give it work."""
        ours, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=work, args=(theirs,), daemon=True)
        # Ctrl-C reaches all processes of a terminal; those that are not yet training leave it to this one.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        theirs.close()
        self.processes[ours] = process
        self.give(ours)
        if self.stop_signal is not None:
            # It was not there yet when the signal was passed on.
            process.terminate()

    def give(self, connection: Connection) -> None:
        """Give a process its next work, or let it go."""
        if self.left and self.stop_signal is None:
            place = self.left.popleft()
            self.at_work[connection] = place
            self.tell(place, None)
            # A process that has just died is found by hear().
            with suppress(ConnectionError):
                connection.send(self.configs[place])
        else:
            connection.close()
            self.processes.pop(connection).join()

    def hear(self, connection: Connection) -> None:
        """Take what a process says: how its run ended, or that it is no more."""
        place = self.at_work.pop(connection)
        try:
            ended = connection.recv()
        except (EOFError, ConnectionError):
            process = self.processes.pop(connection)
            process.join()
            connection.close()
            if self.stop_signal is None:
                self.tell(place, Ended("failed", f"its process ended with code {process.exitcode}"))
                if self.left:
                    self.start()
            return
        self.tell(place, ended)
        self.give(connection)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """A context in which SIGTERM and Ctrl-C let all processes stop after the step at hand."""

        def stop(number: int, frame: FrameType | None) -> None:
            again, self.stop_signal = self.stop_signal is not None, number
            for process in list(self.processes.values()):
                # Asked for the second time: the user does not want to wait.
                process.kill() if again and number == signal.SIGINT else process.terminate()

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

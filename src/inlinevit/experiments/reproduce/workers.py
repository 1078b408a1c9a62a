"""Processes that train runs in parallel."""

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

# Called with the index of a run: with None when it starts, and with the result when it ends.
Listener = Callable[[int, Ended | None], None]


def work(connection: Connection) -> None:
    """Train the configurations that arrive, until the connection closes."""
    torch.set_num_threads(1)
    try:
        while True:
            connection.send(train_cell(connection.recv()))
    except (EOFError, ConnectionError, Stopped, KeyboardInterrupt):
        return


class Workers:
    """A pool of processes, each of which trains one run at a time.

    Args:
        configs: The runs, in order.
        jobs: Number of processes.
        update: Called when a run starts or ends.
    """

    def __init__(self, configs: Sequence[ClassificationConfig], jobs: int, update: Listener) -> None:
        self.configs, self.update = configs, update
        self.left = deque(range(len(configs)))
        self.processes: dict[Connection, SpawnProcess] = {}
        self.running: dict[Connection, int] = {}
        self.jobs = min(jobs, len(configs))
        self.stop_signal: int | None = None

    def run(self) -> None:
        """Train all runs.

        Raises:
            Stopped: SIGTERM or Ctrl-C arrived; running trainings have saved checkpoints.
        """
        with self.stoppable():
            try:
                for _ in range(self.jobs):
                    self.start()
                while self.processes:
                    for connection in wait(list(self.processes)):
                        assert isinstance(connection, Connection)
                        self.receive(connection)
            finally:
                for process in self.processes.values():
                    process.kill()
        if self.stop_signal is not None:
            raise Stopped("stopped: run the same command again to resume", self.stop_signal)

    def start(self) -> None:
        """Start a process and send it a run."""
        ours, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=work, args=(theirs,), daemon=True)
        # Ctrl-C reaches all processes of a terminal; those that are not training yet ignore it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        theirs.close()
        self.processes[ours] = process
        self.send(ours)
        if self.stop_signal is not None:
            # It did not exist when the signal was passed on.
            process.terminate()

    def send(self, connection: Connection) -> None:
        """Send a process its next run, or end it if there is none."""
        if self.left and self.stop_signal is None:
            place = self.left.popleft()
            self.running[connection] = place
            self.update(place, None)
            # A process that has just died is found by receive().
            with suppress(ConnectionError):
                connection.send(self.configs[place])
        else:
            connection.close()
            self.processes.pop(connection).join()

    def receive(self, connection: Connection) -> None:
        """Receive how a run ended, or that its process has died."""
        place = self.running.pop(connection)
        try:
            ended = connection.recv()
        except (EOFError, ConnectionError):
            process = self.processes.pop(connection)
            process.join()
            connection.close()
            if self.stop_signal is None:
                self.update(place, Ended("failed", f"its process ended with code {process.exitcode}"))
                if self.left:
                    self.start()
            return
        self.update(place, ended)
        self.send(connection)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Pass SIGTERM and Ctrl-C on to all processes, which then stop after the present step."""

        def stop(number: int, frame: FrameType | None) -> None:
            again, self.stop_signal = self.stop_signal is not None, number
            for process in list(self.processes.values()):
                # The second Ctrl-C: the user does not want to wait.
                process.kill() if again and number == signal.SIGINT else process.terminate()

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

"""Processes that train runs in parallel."""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import FrameType

import torch

from ...engine.trainer import Stopped
from ...tasks.classification.config import ClassificationConfig
from .cells import Ended, train_cell


def work(connection: Connection, config: ClassificationConfig) -> None:
    """Train a run and send how it ended."""
    torch.set_num_threads(1)
    with suppress(ConnectionError, Stopped, KeyboardInterrupt):
        connection.send(train_cell(config))


class Workers:
    """Trains runs, each in a process of its own.

    Args:
        configs: The runs by name, in order.
        jobs: Number of processes at a time.
        update: Called with the name of a run: with None when it starts, and with the result when it ends.
    """

    def __init__(
        self, configs: Mapping[str, ClassificationConfig], jobs: int, update: Callable[[str, Ended | None], None]
    ) -> None:
        self.left = deque(configs.items())
        self.jobs, self.update = jobs, update
        self.running: dict[Connection, tuple[str, ForkServerProcess]] = {}
        self.stop_signal: int | None = None

    def run(self) -> None:
        """Train all runs.

        Raises:
            Stopped: SIGTERM or Ctrl-C arrived; running trainings have saved checkpoints.
        """
        with self.stoppable():
            try:
                while self.running or (self.left and self.stop_signal is None):
                    while self.left and self.stop_signal is None and len(self.running) < self.jobs:
                        self.start(*self.left.popleft())
                    for connection in wait(list(self.running)):
                        assert isinstance(connection, Connection)
                        self.receive(connection)
            finally:
                for _, process in self.running.values():
                    process.kill()
        if self.stop_signal is not None:
            raise Stopped("stopped: run the same command again to resume", self.stop_signal)

    def start(self, name: str, config: ClassificationConfig) -> None:
        """Start the process of a run."""
        self.update(name, None)
        # A server imports torch once; each process is a fork of it, which starts in milliseconds.
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, config), daemon=True)
        # Ctrl-C reaches all processes of a terminal; those that are not training yet ignore it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        theirs.close()
        self.running[ours] = name, process
        if self.stop_signal is not None:
            # It did not exist when the signal was passed on.
            process.terminate()

    def receive(self, connection: Connection) -> None:
        """Receive how a run ended, or that its process has died."""
        name, process = self.running[connection]
        try:
            ended = connection.recv()
        except (EOFError, ConnectionError):
            ended = None
        process.join()
        del self.running[connection]
        connection.close()
        if ended is None and self.stop_signal is None:
            ended = Ended("failed", f"its process ended with code {process.exitcode}")
        if ended is not None:
            self.update(name, ended)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Pass SIGTERM and Ctrl-C on to all processes, which then stop after the present step."""

        def stop(number: int, frame: FrameType | None) -> None:
            again, self.stop_signal = self.stop_signal is not None, number
            for _, process in list(self.running.values()):
                # The second Ctrl-C: the user does not want to wait.
                process.kill() if again and number == signal.SIGINT else process.terminate()

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

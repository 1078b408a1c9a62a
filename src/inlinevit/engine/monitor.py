"""Losses and gradient norms of training steps: kept on the device, and read from there many steps at a time.

Reading a number from a GPU makes the host wait until everything before it is computed. So a step leaves its numbers on
the device, every `log_every` steps a copy to the host is started, and the copy is read one step later, while the device
is busy with that step.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor


@dataclass
class StepValues:
    """The numbers of one step.

    Attributes:
        step: The step, counted from 1.
        lr: Its learning rate.
        seconds: How long it took on the host, with waiting for data. The last step of a read has the waiting for the
            device as well.
        own: The loss of each batch of this process, then the norm of the gradients (0 if it is not checked).
        mean: The same, as means over all processes.
    """

    step: int
    lr: float
    seconds: float
    own: Sequence[float] = ()
    mean: Sequence[float] = ()

    @property
    def loss(self) -> float:
        """The mean loss of all batches of all processes."""
        return sum(self.mean[:-1]) / (len(self.mean) - 1)

    def find_non_finite(self) -> tuple[str, int | None] | None:
        """What is NaN or infinite, and the number of the batch if it is one of this process; None if nothing is."""
        if all(map(math.isfinite, self.mean)):
            return None
        *losses, norm = self.own
        for batch, loss in enumerate(losses):
            if not math.isfinite(loss):
                return f"the loss is {loss}", batch
        if not math.isfinite(norm):
            return f"the norm of the gradients is {norm} (loss {self.loss:.4g})", len(losses) - 1
        return "the loss of another process is NaN or infinite", None


class StepMonitor:
    """Collects the numbers of steps on the device and reads them in blocks.

    All processes must call `read` after the same steps with the same `start` and `wait`, which average over processes.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.collected: list[tuple[StepValues, Tensor]] = []
        self.copied: list[StepValues] = []
        self.host = torch.empty(0)
        self.copy_is_done: torch.Event | None = None

    def add(self, step: StepValues, numbers: Tensor) -> None:
        """Keep the numbers of a step, which are on the device in the order of StepValues.own, (batches + 1,)."""
        self.collected.append((step, numbers))

    def read(
        self, requests: tuple[bool, bool], *, start: bool, wait: bool
    ) -> tuple[list[StepValues], tuple[bool, bool]]:
        """Return the steps that have been copied to the host since the last call.

        Args:
            requests: What this process asks of all: to stop, to save. One process that is alone is answered at once,
                and several when they read.
            start: Whether to start copying what was added.
            wait: Whether to copy what was added, and to wait for it.

        Returns:
            The steps, and for each request whether any process made it.
        """
        steps, (stop, save) = self._finish()
        if wait or stop or save or (self.accelerator.num_processes == 1 and any(requests)):
            self._start(requests)
            more, now = self._finish()
            return steps + more, (stop or now[0], save or now[1])
        if start:
            self._start(requests)
        return steps, (False, False)

    def _start(self, requests: tuple[bool, bool]) -> None:
        """Start copying what was added to the host, with the means over all processes."""
        self.copied = [step for step, _ in self.collected]
        on_gpu = self.accelerator.device.type == "cuda"
        # Pinned, because copying from other memory waits for the device.
        flags = torch.tensor(requests, dtype=torch.float32, pin_memory=on_gpu)
        flags = flags.to(self.accelerator.device, non_blocking=True)
        numbers = torch.cat([*(numbers for _, numbers in self.collected), flags])
        self.collected = []
        both = torch.stack([numbers, self.accelerator.reduce(numbers, "mean")])
        self.host = torch.empty(both.shape, pin_memory=on_gpu).copy_(both, non_blocking=True)
        if on_gpu:
            self.copy_is_done = torch.Event(both.device)
            self.copy_is_done.record()

    def _finish(self) -> tuple[list[StepValues], tuple[bool, bool]]:
        """Wait for the copy that was started, and return what `read` does; no steps if none was."""
        if not self.copied:
            return [], (False, False)
        steps, self.copied = self.copied, []
        started = time.monotonic()
        if self.copy_is_done is not None:
            self.copy_is_done.synchronize()
        # The device has worked on the steps until now.
        steps[-1].seconds += time.monotonic() - started
        own, mean = self.host.tolist()
        # A row for each step, then the two requests.
        width = (len(own) - 2) // len(steps)
        for row, step in enumerate(steps):
            columns = slice(row * width, (row + 1) * width)
            step.own, step.mean = own[columns], mean[columns]
        return steps, (mean[-2] > 0, mean[-1] > 0)

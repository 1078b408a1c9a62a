"""How the samples of a step are dealt out to processes and batches."""

import warnings
from dataclasses import dataclass
from typing import Protocol


class StartedWith(Protocol):
    """What a run was started with, as its checkpoints record it."""

    total_batch: int
    processes: int
    batch_size: int
    workers: int


@dataclass(frozen=True)
class BatchPlan:
    """The share of one process in each step.

    The samples of a step are drawn first and then dealt out. They are drawn for the processes, batches and workers that
    the run was started with, and stay the same when it is resumed on others with the same total batch.

    Attributes:
        process: This process.
        processes: How many there are.
        batch_size: Samples in a batch of one process.
        grad_accum_steps: Batches of one process in a step.
        workers: Data workers of one process.
        drawn_processes: How many processes the order is drawn for.
        drawn_batch_size: The batch size that the order is drawn for.
        drawn_workers: The number of workers that the order is drawn for.
    """

    process: int
    processes: int
    batch_size: int
    grad_accum_steps: int
    workers: int
    drawn_processes: int
    drawn_batch_size: int
    drawn_workers: int

    @property
    def total_batch(self) -> int:
        """Samples of a step."""
        return self.processes * self.batch_size * self.grad_accum_steps

    @classmethod
    def first(
        cls, batch_size: int, *, process: int = 0, processes: int = 1, grad_accum_steps: int = 1, workers: int = 0
    ) -> "BatchPlan":
        """The plan of a run that starts: the order is drawn for what there is."""
        return cls(process, processes, batch_size, grad_accum_steps, workers, processes, batch_size, workers)

    def resumed(self, progress: StartedWith, multiple: int) -> "BatchPlan":
        """The plan for a run that was started on other processes: as many samples in a step, in the same order.

        If the settings do not come to the same total batch as they are, processes take batches that are not larger
        than configured, and accumulate gradients.

        Args:
            progress: How far the run has come, and what its order was drawn for.
            multiple: Batch sizes have to be multiples of this.
        """
        batch_size, grad_accum_steps = self.batch_size, self.grad_accum_steps
        if self.total_batch != progress.total_batch:
            share, left = divmod(progress.total_batch, self.processes)
            sizes = [size for size in range(multiple, self.batch_size + 1, multiple) if share % size == 0]
            if left or not share or not sizes:
                raise ValueError(
                    f"the run has {progress.total_batch} samples in a step, which {self.processes} processes with "
                    f"batches of up to {self.batch_size} (multiples of {multiple}) cannot share equally: use a number "
                    f"of processes that divides {progress.total_batch}, or another --data.batch_size"
                )
            batch_size, grad_accum_steps = sizes[-1], share // sizes[-1]
            warnings.warn(
                f"the run has {progress.total_batch} samples in a step: on {self.processes} processes, that is "
                f"{grad_accum_steps} batches of {batch_size} each",
                stacklevel=2,
            )
        return BatchPlan(
            self.process,
            self.processes,
            batch_size,
            grad_accum_steps,
            self.workers,
            progress.processes,
            progress.batch_size,
            progress.workers,
        )

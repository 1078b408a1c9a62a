"""How the samples of a training step are split over processes and accumulated batches."""

import warnings
from dataclasses import dataclass, replace
from typing import Protocol


class InitialBatches(Protocol):
    """The processes and batches that a run was started with, as its checkpoints record them."""

    total_batch: int
    processes: int
    batch_size: int
    workers: int


@dataclass(frozen=True)
class BatchPlan:
    """What one process contributes to each step.

    The order of the samples depends on the processes, batches and workers that the run was started with. When a run is
    resumed on others, with the same total batch, the samples of each step stay the same and are resharded.
    """

    # The index of this process.
    process: int
    processes: int
    # Samples in a batch of one process, batches of one process in a step, data workers of one process.
    batch_size: int
    grad_accum_steps: int
    workers: int
    # When the run was started.
    initial_processes: int
    initial_batch_size: int
    initial_workers: int

    @property
    def total_batch(self) -> int:
        """Samples of a step."""
        return self.processes * self.batch_size * self.grad_accum_steps

    @classmethod
    def initial(
        cls, batch_size: int, *, process: int = 0, processes: int = 1, grad_accum_steps: int = 1, workers: int = 0
    ) -> "BatchPlan":
        """Return the plan of a run that starts."""
        return cls(process, processes, batch_size, grad_accum_steps, workers, processes, batch_size, workers)

    def initial_plans(self) -> list["BatchPlan"]:
        """Return the plans of all processes that the run was started with, for one batch of each."""
        sizes = {"processes": self.initial_processes, "workers": self.initial_workers}
        processes = range(self.initial_processes)
        return [BatchPlan.initial(self.initial_batch_size, process=process, **sizes) for process in processes]

    def resumed(self, start: InitialBatches, multiple: int) -> "BatchPlan":
        """Return the plan of a run that was started on other processes: the same samples in each step.

        If the settings result in another total batch, processes take smaller batches, and accumulate more of them.

        Args:
            start: What the run was started with.
            multiple: Batch sizes have to be multiples of this.
        """
        batch_size, grad_accum_steps = self.batch_size, self.grad_accum_steps
        if self.total_batch != start.total_batch:
            per_process, left = divmod(start.total_batch, self.processes)
            sizes = [size for size in range(multiple, self.batch_size + 1, multiple) if per_process % size == 0]
            if left or not per_process or not sizes:
                raise ValueError(
                    f"the run has {start.total_batch} samples in a step, which {self.processes} processes with "
                    f"batches of up to {self.batch_size} (multiples of {multiple}) cannot split equally: use a number "
                    f"of processes that divides {start.total_batch}, or another --data.batch_size"
                )
            batch_size, grad_accum_steps = sizes[-1], per_process // sizes[-1]
            warnings.warn(
                f"the run has {start.total_batch} samples in a step: on {self.processes} processes, that is "
                f"{grad_accum_steps} batches of {batch_size} each",
                stacklevel=2,
            )
        return replace(
            self,
            batch_size=batch_size,
            grad_accum_steps=grad_accum_steps,
            initial_processes=start.processes,
            initial_batch_size=start.batch_size,
            initial_workers=start.workers,
        )

"""The folder of a run while it trains: it is locked, resumed from and written to."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from torch import nn

from ..utils.atomic import atomic_write_bytes, atomic_write_json, disk_full_errors, finite, make_output_dir
from ..utils.validation import require
from .checkpoints import MANIFEST, CheckpointFolder, Progress, archive_folder, find_damage, pack_weights
from .config import TrainConfig, check_unchanged, read_plain, to_plain
from .distributed import run_on_all, run_on_main
from .lock import RUN_LOCK, RunLock
from .runs import (
    RUN_CHECKPOINTS,
    RUN_CONFIG,
    RUN_TASK,
    RUN_WEIGHTS,
    check_free_folder,
    check_run_folder,
    is_run,
    task_of,
)
from .state import get_weights, is_sharded, pack, restore, save_shards


class RunFolder:
    """The folder of a run.

    Problems are found when this is constructed, before the first step.

    Args:
        config: The run's configuration.
        accelerator: The processes; each of them constructs one.
        command: The word of the task's commands.
        metadata: Contents of the task's JSON files, by name.
    """

    def __init__(self, config: TrainConfig, accelerator: Accelerator, command: str, metadata: dict[str, Any]) -> None:
        self.config, self.accelerator = config, accelerator
        name, command = task_of(type(config)), f"inlinevit {command}".strip()
        self.metadata = {RUN_TASK: {"name": name, "command": command, "files": list(metadata)}, **metadata}
        self.path = Path(config.run.output)
        self.checkpoints = CheckpointFolder(self.path / RUN_CHECKPOINTS, config.run.keep_checkpoints)
        self.lock: RunLock | None = None
        # The checkpoint to resume from, if there is one.
        self.resume_path = run_on_main(accelerator, self._find_checkpoint)

    def _find_checkpoint(self) -> Path | None:
        """Return the checkpoint to resume from, if there is one; nothing is changed."""
        if not self.path.is_dir():
            return self._choose_checkpoint()
        with RunLock(self.path, is_run(self.path)):
            return self._choose_checkpoint()

    def _choose_checkpoint(self) -> Path | None:
        """Return the checkpoint that the settings name, or the newest good one."""
        choice = self.config.run.resume
        if choice == "never":
            check_run_folder(self.path)
            return None
        if choice != "auto":
            path = Path(choice)
            require((path / MANIFEST).is_file(), f"{choice} is not a checkpoint: name a step-… folder")
            problem = find_damage(path)
            require(problem is None, f"checkpoint {choice} is damaged: {problem}")
            return path
        newest = self.checkpoints.newest_good()
        if newest is None:
            check_free_folder(self.path, self.metadata)
        return newest

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A context in which no other run writes into the folder."""
        run_on_main(self.accelerator, self._lock)
        try:
            yield
        finally:
            if self.lock is not None:
                self.lock.release()

    def _lock(self) -> None:
        """Lock the folder, and rename it first if the run is to start over."""
        make_output_dir(self.path)
        lock = RunLock(self.path, is_run(self.path))
        lock.acquire()
        resume = self.config.run.resume
        if self.resume_path is None and resume == "auto" and self.checkpoints.paths():
            lock.release()
            raise ValueError(f"{self.path} was used by another run since this one was set up: start it again")
        if resume == "never" and set(os.listdir(self.path)) > {RUN_LOCK}:
            # The lock is renamed with the folder, so no other process can take it in between.
            former = archive_folder(self.path)
            warnings.warn(f"{self.path} held a run: it is now {former}", stacklevel=2)
            make_output_dir(self.path)
            again = RunLock(self.path)
            again.acquire()
            lock.release(former)
            lock = again
        self.lock = lock

    def begin(
        self, progress: Progress, model: nn.Module, ema: nn.Module | None, optimizer: Any, is_same_batch: bool
    ) -> None:
        """Load the checkpoint to resume from, if there is one, and write the configuration.

        Args:
            progress: How far the run has come.
            model: The model.
            ema: The model with averaged weights, if there is one.
            optimizer: The model's optimizer, as accelerate has prepared it.
            is_same_batch: Whether the settings result in the total batch of the run.
        """

        def resume() -> None:
            path = self.resume_path
            if path is None:
                return
            require(path.is_dir(), f"{self.path} is not the same on all machines: name a folder that they share")
            if self.config.run.resume == "auto":
                check_unchanged(read_plain(self.path / RUN_CONFIG), self.config, is_same_batch)
            restore(path, model, ema, optimizer, self.accelerator)

        def write() -> None:
            self.checkpoints.resume_from(progress)
            config = yaml.safe_dump(to_plain(self.config), sort_keys=False)
            atomic_write_bytes(self.path / RUN_CONFIG, config.encode())
            for name, content in self.metadata.items():
                atomic_write_json(self.path / name, content)

        run_on_all(self.accelerator, resume)
        run_on_main(self.accelerator, write)

    def save(self, progress: Progress, model: nn.Module, ema: nn.Module | None, optimizer: Any) -> None:
        """Write a checkpoint; arguments as for begin."""
        if not is_sharded(model):
            run_on_main(
                self.accelerator,
                lambda: self.checkpoints.save(progress, pack(model, ema, optimizer, self.accelerator)),
            )
            return
        aside = run_on_main(self.accelerator, lambda: self.checkpoints.prepare(progress.step))

        def write() -> Any:
            with disk_full_errors(aside):
                return save_shards(aside, model, optimizer, self.accelerator)

        parts = run_on_all(self.accelerator, write)
        written = {name: entry for entries, _ in parts for name, entry in entries.items()}
        run_on_main(self.accelerator, lambda: self.checkpoints.commit(progress, parts[0][1], written))

    def save_evaluation(self, progress: Progress) -> None:
        """Add the result of an evaluation to the newest checkpoint."""
        run_on_main(self.accelerator, lambda: self.checkpoints.save_evaluation(progress))

    def write_results(self, progress: Progress, model: nn.Module) -> None:
        """Write the final weights and the results of the last evaluation."""
        weights = get_weights(model)
        if self.accelerator.is_main_process:
            atomic_write_bytes(self.path / RUN_WEIGHTS, pack_weights(weights))
            results = {
                "step": progress.step,
                "metrics": finite(progress.metrics),
                "best": progress.best,
                "best_step": progress.best_step,
            }
            atomic_write_json(self.path / "results.json", results)

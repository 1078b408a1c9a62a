"""Checkpoints that a kill cannot spoil: written aside, renamed when whole, checked by hash when read."""

import hashlib
import io
import json
import os
import shutil
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from .files import replace_json, space_for, sync_folder, write_bytes

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
EVALUATION = "evaluation.json"
UNFINISHED = ".unfinished-"
# What an evaluation adds to a run's progress.
EVALUATION_FIELDS = ("evaluated_step", "metrics", "best", "best_step")


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: Steps that are done.
        evaluated_step: When the last evaluation was.
        metrics: What it gave.
        best: The best value of the task's metric so far.
        best_step: When it was reached.
        loss_sum: Sum of the losses since the last line of metrics.jsonl.
        loss_count: How many they are.
        total_batch: Samples that a step sees.
        steps_per_epoch: Steps of an epoch.
    """

    step: int = 0
    evaluated_step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    loss_sum: float = 0.0
    loss_count: int = 0
    total_batch: int = 0
    steps_per_epoch: int = 0


class CheckpointFolder:
    """The checkpoints of a run: step-00001200/, …, and best, which points to one of them.

    Args:
        folder: Where they lie.
        keep: How many of the last ones to keep.
    """

    def __init__(self, folder: Path, keep: int = 1) -> None:
        self.folder = folder
        self.keep = keep
        # Checkpoints that the next one makes obsolete, however new they are.
        self.abandoned: list[Path] = []

    def go_on_from(self, progress: Progress) -> None:
        """Take up a run: what lies after its progress is damaged, or the run is to go another way from here."""
        self.clean()
        self.abandoned = [path for path in self.paths() if path.name > f"step-{progress.step:08d}"]
        # The run may have been killed between a checkpoint and its mark.
        self.mark_best(progress)

    def save(self, progress: Progress, weights: dict[str, dict[str, Tensor]], state: Any) -> Path:
        """Write a checkpoint, then drop those that are not to be kept.

        Args:
            progress: How far the run has come.
            weights: Weights by the name of their file: model, ema.
            state: Whatever else the run needs to go on; torch.load(weights_only=True) must be able to read it.

        Returns:
            The folder of the checkpoint.
        """
        # Everything is made in memory first, so that a full disk shows as an OSError of this process's own writing.
        stream = io.BytesIO()
        torch.save(state, stream)
        files = {
            **{f"{name}.safetensors": safetensors.torch.save(tensors) for name, tensors in weights.items()},
            "state.pt": stream.getvalue(),
            PROGRESS: json.dumps(asdict(progress)).encode(),
        }
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        files[MANIFEST] = json.dumps(hashes).encode()
        path = self.folder / f"step-{progress.step:08d}"
        aside = self.folder / f"{UNFINISHED}{path.name}"
        try:
            with space_for(path):
                self.clean()
                aside.mkdir(parents=True)
                for name, content in files.items():
                    write_bytes(aside / name, content)
                sync_folder(aside)
                # A folder of that name is damaged, or of a run that went another way.
                shutil.rmtree(path, ignore_errors=True)
                os.rename(aside, path)
                sync_folder(self.folder)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._prune(path)
        return path

    def note_evaluation(self, progress: Progress) -> None:
        """Add to the newest checkpoint what its evaluation gave."""
        path = self.folder / f"step-{progress.step:08d}"
        if not path.is_dir():
            # The run goes on from a checkpoint that lies elsewhere.
            return
        content = asdict(progress)
        replace_json(path / EVALUATION, {name: content[name] for name in EVALUATION_FIELDS})
        self.mark_best(progress)
        self._prune(path)

    def mark_best(self, progress: Progress) -> None:
        """Point `best` to the best checkpoint, if that is the newest one."""
        path = self.folder / f"step-{progress.step:08d}"
        if progress.best_step != progress.step or not path.is_dir():
            return
        link = self.folder / f"{UNFINISHED}best"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        os.replace(link, self.best)

    def _prune(self, newest: Path) -> None:
        """Drop what is not to be kept, now that `newest` is written."""
        for path in self.abandoned:
            if path != newest:
                shutil.rmtree(path, ignore_errors=True)
        self.abandoned = []
        best = self.best.resolve()
        for path in self.paths()[self.keep :]:
            if path.resolve() != best:
                shutil.rmtree(path, ignore_errors=True)
        if not self.best.exists():
            self.best.unlink(missing_ok=True)

    @property
    def best(self) -> Path:
        """The checkpoint with the best evaluation."""
        return self.folder / "best"

    def paths(self) -> list[Path]:
        """The checkpoints by step, newest first."""
        return sorted(self.folder.glob("step-*"), reverse=True)

    def clean(self) -> None:
        """Remove what killed runs left half-written."""
        for leftover in self.folder.glob(f"{UNFINISHED}*"):
            if leftover.is_symlink():
                leftover.unlink()
            else:
                shutil.rmtree(leftover, ignore_errors=True)

    def newest_good(self) -> Path | None:
        """The newest checkpoint that is whole; damaged ones are skipped with a warning."""
        for path in self.paths():
            problem = damage(path)
            if problem is None:
                return path
            warnings.warn(f"checkpoint {path} is skipped, because it is damaged: {problem}", stacklevel=2)
        return None


def read_progress(path: Path) -> Progress:
    """How far the run had come at this checkpoint."""
    progress = Progress(**json.loads((path / PROGRESS).read_text()))
    try:
        return replace(progress, **json.loads((path / EVALUATION).read_text()))
    except (OSError, ValueError, TypeError):
        # The run ended before or in the evaluation, which will be made up for.
        return progress


def read_weights(path: Path, name: str) -> dict[str, Tensor]:
    """Weights of a checkpoint."""
    file = path / f"{name}.safetensors"
    if not file.exists():
        raise FileNotFoundError(f"checkpoint {path} has no {file.name}: go on with the settings it was written with")
    return safetensors.torch.load_file(file)


def read_state(path: Path) -> Any:
    """Whatever else is in a checkpoint; nothing in the file is run."""
    return torch.load(path / "state.pt", map_location="cpu", weights_only=True)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if its files are just as they were written."""
    try:
        hashes: dict[str, str] = json.loads((path / MANIFEST).read_text())
        if PROGRESS not in hashes:
            return f"{MANIFEST} has changed since it was written"
        for name, expected in hashes.items():
            with (path / name).open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != expected:
                    return f"{name} has changed since it was written"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def set_aside(folder: Path) -> Path | None:
    """Rename a folder with results, so that a run can begin anew in its place and nothing is lost.

    Returns:
        Its new name; None if there was no such folder, or nothing in it.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    numbers = (number for number in range(1, 10_000) if not folder.with_name(f"{folder.name}.{number}").exists())
    target = folder.with_name(f"{folder.name}.{next(numbers)}")
    os.rename(folder, target)
    return target

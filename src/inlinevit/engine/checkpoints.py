"""Checkpoints that survive a kill: written under another name, renamed when complete, verified when read.

A checkpoint is a folder of safetensors and JSON files. Its manifest has the progress of the run, the size and the hash
of each file, and its own hash. Nothing in it is a pickle, so reading one runs no code. What is read is checked for
names, types, ranges and shapes as well, since a file can be replaced together with its hash.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ..utils.atomic import atomic_write_bytes, disk_full_errors, fsync_dir, write_bytes
from ..utils.files import NotRegularFileError, open_regular, read_json
from ..utils.validation import Range, check_fields, require

MANIFEST = "manifest.json"
STATE = "state.json"
UNFINISHED = ".unfinished-"
# The files of a checkpoint: one for each set of tensors or, if they are sharded, one for each process.
TENSOR_FILE = re.compile(r"(?:model|ema|optimizer|shard-\d{5}-model-\d{5}-of-\d{5})\.safetensors")
# What the folder of a checkpoint is called; whatever else lies beside them is not ours.
CHECKPOINT_NAME = re.compile(r"step-\d{8,}")
FORMAT = 1
# No count in a checkpoint is larger.
LARGEST_COUNT = 2**53


# A file in a manifest: its size as "bytes", its hash as "sha256".
FileEntry = dict[str, Any]


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: Steps that are done.
        evaluated_step: The step of the last evaluation.
        metrics: Its metrics.
        best: The best value of the task's metric so far.
        best_step: Its step.
        loss_sum: Sum of the losses since the last line of metrics.jsonl.
        loss_count: Number of these losses.
        total_batch: Samples in a step.
        steps_per_epoch: Steps of an epoch.
        processes: Number of processes when the run was started.
        batch_size: Samples in a batch of each of them.
        workers: Data workers of each of them.
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
    processes: int = 1
    batch_size: int = 0
    workers: int = 0

    def __post_init__(self) -> None:
        counts = ("step", "evaluated_step", "best_step", "loss_count", "total_batch", "steps_per_epoch", "batch_size")
        check_fields(
            self,
            "",
            **dict.fromkeys((*counts, "workers"), Range(0, LARGEST_COUNT)),
            processes=Range(1, LARGEST_COUNT),
        )
        latest = max(self.loss_count, self.evaluated_step, self.best_step or 0)
        require(latest <= self.step, f"it has losses or an evaluation of a later step than {self.step}, its own")
        require(
            (self.best is None) == (self.best_step is None),
            "it has a best value without its step, or a step without its value",
        )

    def start_from(self, checkpoint: Path | None, steps_per_epoch: int, total_steps: int) -> None:
        """Note the steps of an epoch of the run; refuse a checkpoint, None = none, of a run with other steps."""
        before = steps_per_epoch if checkpoint is None else self.steps_per_epoch
        self.steps_per_epoch = steps_per_epoch
        require(
            before == steps_per_epoch,
            f"{checkpoint} has {before} steps in an epoch and this run {steps_per_epoch}: use the training data it was "
            "written with",
        )
        require(
            self.step <= total_steps,
            f"{checkpoint} is at step {self.step}, and this run has {total_steps}: make the schedule longer",
        )


class CheckpointFolder:
    """The checkpoints of a run: step-00001200/, …, and best, which points to one of them.

    Args:
        folder: Where they are.
        keep: Number of the last ones to keep.
    """

    def __init__(self, folder: Path, keep: int = 1) -> None:
        self.folder = folder
        self.keep = keep
        # Checkpoints to remove with the next one, although they are of later steps.
        self.abandoned: list[Path] = []

    def resume_from(self, progress: Progress) -> None:
        """Continue a run: checkpoints of later steps are damaged, or the run differs from here on."""
        self.clean()
        self.abandoned = [path for path in self.paths() if path.name > f"step-{progress.step:08d}"]
        # The run may have been killed before it marked the best checkpoint.
        self.mark_best(progress)

    def prepare(self, step: int) -> Path:
        """Make the empty folder in which the files of a checkpoint are written before it is committed."""
        aside = self.folder / f"{UNFINISHED}step-{step:08d}"
        with disk_full_errors(aside):
            self.clean()
            aside.mkdir(parents=True)
        return aside

    def commit(
        self, progress: Progress, files: Mapping[str, bytes], written: Mapping[str, FileEntry] | None = None
    ) -> Path:
        """Complete a checkpoint that was prepared, then remove old ones; returns its folder.

        Args:
            progress: How far the run has come.
            files: Contents of files to write, by name.
            written: Files that are in the prepared folder already.
        """
        path = self.folder / f"step-{progress.step:08d}"
        aside = self.folder / f"{UNFINISHED}{path.name}"
        entries = {**(written or {}), **{name: entry_of(content) for name, content in files.items()}}
        contents = {**files, MANIFEST: manifest_bytes(progress, entries)}
        try:
            with disk_full_errors(path):
                for name, content in contents.items():
                    write_bytes(aside / name, content)
                fsync_dir(aside)
                # A folder of that name is damaged, or was abandoned.
                shutil.rmtree(path, ignore_errors=True)
                os.rename(aside, path)
                fsync_dir(self.folder)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._prune(path)
        return path

    def save(self, progress: Progress, files: Mapping[str, bytes]) -> Path:
        """Write a checkpoint whose files are all in memory; see prepare and commit."""
        self.prepare(progress.step)
        return self.commit(progress, files)

    def save_evaluation(self, progress: Progress) -> None:
        """Add the result of an evaluation to the newest checkpoint."""
        path = self.folder / f"step-{progress.step:08d}"
        if not path.is_dir():
            # The run resumes from a checkpoint in another folder.
            return
        # A kill before this leaves the progress without the evaluation, which will be repeated.
        atomic_write_bytes(path / MANIFEST, manifest_bytes(progress, read_manifest(path)[1]))
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
        """Remove old checkpoints, now that `newest` is written."""
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
        """The link to the checkpoint with the best evaluation."""
        return self.folder / "best"

    def paths(self) -> list[Path]:
        """Return the checkpoints by step, newest first."""
        return sorted(
            (path for path in self.folder.glob("step-*") if CHECKPOINT_NAME.fullmatch(path.name)), reverse=True
        )

    def clean(self) -> None:
        """Remove unfinished checkpoints of killed runs."""
        for leftover in self.folder.glob(f"{UNFINISHED}*"):
            if leftover.is_symlink():
                leftover.unlink()
            else:
                shutil.rmtree(leftover, ignore_errors=True)

    def newest_good(self) -> Path | None:
        """Return the newest checkpoint that is not damaged, with a warning for each newer one; None if there is none.

        Raises:
            ValueError: There are checkpoints, and all of them are damaged.
        """
        problems: dict[Path, str] = {}
        for path in self.paths():
            problem = find_damage(path)
            if problem is None:
                for damaged, reason in problems.items():
                    warnings.warn(f"checkpoint {damaged} is skipped, because it is damaged: {reason}", stacklevel=2)
                return path
            problems[path] = problem
        if not problems:
            return None
        listed = "; ".join(f"{path.name}: {reason}" for path, reason in problems.items())
        remedies = ["restore one", "start over with --run.resume never, which keeps this run under another name"]
        if weights := next(filter(None, map(_undamaged_weights, problems)), None):
            remedies.append(f"train from weights alone with --model.checkpoint {weights} and another --run.output")
        raise ValueError(
            f"every checkpoint in {self.folder} is damaged ({listed}), and all of them were kept: "
            f"{', or '.join(remedies)}"
        )


def entry_of(content: bytes) -> FileEntry:
    """Return the entry of a file with this content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def sha256_of(stream: Any) -> str:
    """Return the hash of an open file."""
    return hashlib.file_digest(stream, "sha256").hexdigest()


def manifest_bytes(progress: Progress, files: Mapping[str, FileEntry]) -> bytes:
    """Return the content of a manifest."""
    content = {"format": FORMAT, "progress": asdict(progress), "files": dict(sorted(files.items()))}
    return json.dumps({**content, "sha256": entry_of(json.dumps(content).encode())["sha256"]}).encode()


def read_manifest(path: Path) -> tuple[Progress, dict[str, FileEntry]]:
    """Return the progress of the run at a checkpoint, and the entries of the checkpoint's files by name.

    Raises:
        ValueError: There is no manifest, or it is not valid.
    """
    content = _read_json(path / MANIFEST)
    changed = f"{MANIFEST} has changed since it was written"
    require(isinstance(content, dict) and content.keys() == {"format", "progress", "files", "sha256"}, changed)
    if content["format"] != FORMAT or isinstance(content["format"], bool):
        raise ValueError(f"{MANIFEST} is of format {content['format']!r:.20}, and this version reads {FORMAT}")
    files, values = content["files"], content["progress"]
    require(isinstance(files, dict) and STATE in files, changed)
    for name, entry in files.items():
        require(name == STATE or TENSOR_FILE.fullmatch(name) is not None, changed)
        require(isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"}, changed)
        require(type(entry["bytes"]) is int and isinstance(entry["sha256"], str), changed)
    require(isinstance(content["sha256"], str), changed)
    require(isinstance(values, dict) and values.keys() == asdict(Progress()).keys(), changed)
    try:
        progress = Progress(**values)
    except ValueError as error:
        raise ValueError(f"{changed} ({error})") from None
    require(manifest_bytes(progress, files) == json.dumps(content).encode(), changed)
    name = path.resolve().name
    if CHECKPOINT_NAME.fullmatch(name) and int(name.removeprefix("step-")) != progress.step:
        raise ValueError(f"{MANIFEST} is of step {progress.step}, but its folder is {name}")
    return progress, files


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if its files are as they were written."""
    try:
        _, entries = read_manifest(path)
        for file in path.iterdir():
            if file.suffix == ".safetensors" and file.name not in entries:
                return f"{file.name} is not in {MANIFEST}"
        for name, entry in entries.items():
            if problem := _find_file_damage(path / name, entry):
                return problem
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror or error}"
    return None


def _find_file_damage(file: Path, entry: FileEntry) -> str | None:
    """Return what is wrong with a file; None if it is as it was written."""
    try:
        with open_regular(file) as stream:
            if os.fstat(stream.fileno()).st_size == entry["bytes"] and sha256_of(stream) == entry["sha256"]:
                return None
    except FileNotFoundError:
        return f"{file.name} is missing"
    except NotRegularFileError as error:
        return f"{file.name} is {error.kind}, not a regular file"
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    return f"{file.name} has changed since it was written"


def _undamaged_weights(path: Path) -> Path | None:
    """Return the weights file of a damaged checkpoint, if that file itself is not damaged."""
    try:
        _, entries = read_manifest(path)
    except (ValueError, OSError):
        return None
    for name in ("ema.safetensors", "model.safetensors"):
        if name in entries and _find_file_damage(path / name, entries[name]) is None:
            return path / name
    return None


def _read_json(file: Path) -> Any:
    """Read a JSON file; ValueError if it is missing, not a regular file, or not valid."""
    try:
        return read_json(file)
    except FileNotFoundError:
        raise ValueError(f"{file.name} is missing") from None
    except NotRegularFileError as error:
        raise ValueError(f"{file.name} is {error.kind}, not a regular file") from None
    except ValueError as error:
        raise ValueError(f"{file.name} is not valid JSON ({error})") from None


def pack_weights(weights: Mapping[str, Tensor]) -> bytes:
    """Return weights as the content of a safetensors file."""
    return safetensors.torch.save(dict(weights))


def read_weights(path: Path, name: str) -> dict[str, Tensor]:
    """Read the tensors of one file of a checkpoint: model, ema or optimizer.

    Raises:
        ValueError: There is no such file, or it is not valid.
    """
    file = path / f"{name}.safetensors"
    if not file.is_file():
        raise ValueError(f"checkpoint {path} has no {file.name}: resume with the settings it was written with")
    try:
        return safetensors.torch.load_file(file)
    # safetensors raises errors of its own, and others for headers that make no sense.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise ValueError(f"{file} is not valid ({problem}): resume from another checkpoint") from None


def pack_state(state: Any) -> dict[str, bytes]:
    """Return the state of an optimizer, and of whatever else a run needs, as files: tensors, and other values as JSON.

    Args:
        state: Dictionaries, lists and tuples of tensors, numbers, strings, booleans and None.
    """
    values = _flattened(state)
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in values.items() if name not in tensors}
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return {"optimizer.safetensors": pack_weights(copies), STATE: json.dumps(others).encode()}


def _flattened(state: Any, name: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries and lists by their path: {"optimizer.param_groups.0.lr": 0.1, …}."""
    if state is None or isinstance(state, Tensor | bool | int | float | str):
        return {name: state}
    if not isinstance(state, Mapping | list | tuple):
        raise TypeError(f"{name} is of {type(state).__name__}, which a checkpoint cannot hold")
    values: dict[str, Any] = {}
    for key, item in state.items() if isinstance(state, Mapping) else enumerate(state):
        values |= _flattened(item, f"{name}.{key}" if name else str(key))
    return values


def read_state(path: Path) -> dict[str, Any]:
    """Return the values that pack_state has written, by their path in the state.

    Raises:
        ValueError: A file is not valid, or the two do not fit together.
    """
    tensors = read_weights(path, "optimizer")
    try:
        values = _read_json(path / STATE)
        if not isinstance(values, dict) or values.keys() & tensors.keys():
            raise ValueError(f"{STATE} should have values by name, and none of optimizer.safetensors")
    except ValueError as error:
        raise ValueError(f"checkpoint {path} is not valid ({error}): resume from another one") from None
    return {**values, **tensors}


def archive_folder(folder: Path) -> Path:
    """Rename a folder to NAME.1, NAME.2, …, so that a run can start over and nothing is lost; returns its new path."""
    numbers = (number for number in range(1, 10_000) if not os.path.lexists(f"{folder}.{number}"))
    target = folder.with_name(f"{folder.name}.{next(numbers)}")
    os.rename(folder, target)
    return target

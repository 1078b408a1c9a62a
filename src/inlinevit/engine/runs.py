"""What a training run leaves in its folder, whatever its task: which configuration, which weights."""

import os
import warnings
from pathlib import Path

import torch

from ..utils.atomic import atomic_write_bytes
from ..utils.files import read_yaml
from ..utils.validation import require
from .checkpoints import MANIFEST, CheckpointFolder, find_damage, pack_weights
from .config import AnyConfig, config_from_dict
from .lock import RUN_LOCK, is_foreign_lock

RUN_CONFIG = "config.yaml"
RUN_WEIGHTS = "model.safetensors"
RUN_CHECKPOINTS = "checkpoints"
BEST = "best"
# In a checkpoint, averaged weights are the better ones.
CHECKPOINT_WEIGHTS = ("ema.safetensors", "model.safetensors")
# What a task notes in the folder tells whose run it is.
RUN_CLASSES = "classes.json"
RUN_CATEGORIES = "categories.json"
RUN_LABELS = "labels.json"
TASKS = {
    RUN_CLASSES: ("classification", "inlinevit eval or inlinevit predict"),
    RUN_CATEGORIES: ("detection", "inlinevit detect eval or inlinevit detect predict"),
    RUN_LABELS: ("segmentation", "inlinevit segment eval or inlinevit segment predict"),
}

# What a run leaves in its folder, besides its checkpoints.
RUN_FILES = (RUN_CONFIG, RUN_WEIGHTS, "results.json", "metrics.jsonl", *TASKS)


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a training run."""
    if CheckpointFolder(folder / RUN_CHECKPOINTS).paths():
        return True
    try:
        config = read_yaml(folder / RUN_CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and {"optimizer", "schedule", "run"} <= config.keys()


def check_run_folder(folder: Path) -> None:
    """Refuse to rename a folder that is not that of a training run: it may hold anything."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another --run.output")
    if folder.name in ("", ".."):
        raise ValueError(
            f"{folder} cannot be renamed under this name, as --run.resume never does: write --run.output "
            f"{os.path.realpath(folder)} from another folder"
        )
    if folder.is_dir() and set(os.listdir(folder)) > {RUN_LOCK} and not is_run(folder):
        raise ValueError(
            f"{folder} is not the folder of a training run, so --run.resume never does not rename it: choose another "
            "--run.output"
        )


def check_lock_file(folder: Path) -> None:
    """Refuse a folder whose lock would replace the file of another program."""
    if is_foreign_lock(folder) and not is_run(folder):
        raise ValueError(
            f"{folder / RUN_LOCK} is not the lock of a training run and would be replaced: choose another --run.output"
        )


def check_free_folder(folder: Path) -> None:
    """Refuse a folder in which a run that starts would replace files that are not those of a run."""
    taken = [name for name in (*RUN_FILES, RUN_CHECKPOINTS) if os.path.lexists(folder / name)]
    if taken and not is_run(folder):
        raise ValueError(
            f"{folder} holds {taken[0]}, which is not of a training run and would be replaced: choose another "
            "--run.output"
        )


def run_config(kind: type[AnyConfig], run: str) -> AnyConfig:
    """The configuration of a training run.

    Args:
        kind: The class of the task's configurations.
        run: The folder of the run.
    """
    file = Path(run) / RUN_CONFIG
    if not file.is_file():
        problem = f"{run} holds no {RUN_CONFIG}" if file.parent.is_dir() else f"no folder at {run}"
        raise FileNotFoundError(f"{problem}: name the folder of a {task_of(kind)} run")
    return load_config(kind, file)


def task_of(kind: type) -> str:
    """The task that a class of configurations is for, in a word."""
    return kind.__name__.removesuffix("Config").lower()


def load_config(kind: type[AnyConfig], path: str | Path) -> AnyConfig:
    """The configuration that a training run has left.

    Args:
        kind: The class of the task's configurations.
        path: The file.
    """
    try:
        return config_from_dict(kind, read_yaml(path))
    except (ValueError, TypeError) as error:
        task = task_of(kind)
        for note, (other, commands) in TASKS.items():
            if other != task and Path(path).with_name(note).is_file():
                raise ValueError(
                    f"{Path(path).parent} holds a {other} run, not a {task} run: use {commands}"
                ) from error
        problem = " ".join(str(error).split())
        raise ValueError(f"{path} is no configuration of a {task} run ({problem}): mend it") from error


def run_weights(run: Path, checkpoint: str | None) -> Path:
    """The file with the weights of a training run.

    Args:
        run: Its folder.
        checkpoint: "best", the folder of a checkpoint, or a file; None = the final weights or, if the run has not
            reached its end, those of the newest good checkpoint.
    """
    folder = CheckpointFolder(run / RUN_CHECKPOINTS)
    if checkpoint is None:
        if (run / RUN_WEIGHTS).is_file():
            return run / RUN_WEIGHTS
        newest = folder.newest_good()
        if newest is None:
            raise FileNotFoundError(f"{run} holds neither {RUN_WEIGHTS} nor a good checkpoint: train on, or anew")
        warnings.warn(f"the run in {run} is not finished: using its checkpoint {newest.name}", stacklevel=2)
        return _weights_in(newest)
    require(bool(checkpoint.strip()), "the checkpoint is empty: name one, or leave it out")
    chosen = folder.best if checkpoint == BEST else Path(checkpoint)
    if checkpoint != BEST and not chosen.is_dir():
        return chosen
    # Weights may lie in any folder; one with a manifest is a checkpoint, and its files are to be as they were written.
    problem = find_damage(chosen) if checkpoint == BEST or (chosen / MANIFEST).exists() else None
    if problem is not None:
        raise ValueError(f"{chosen} cannot be used ({problem}): choose another checkpoint")
    return _weights_in(chosen)


def _weights_in(checkpoint: Path) -> Path:
    for name in CHECKPOINT_WEIGHTS:
        if (checkpoint / name).is_file():
            return checkpoint / name
    if next(checkpoint.glob("shard-*.safetensors"), None) is not None:
        return _merged(checkpoint)
    raise FileNotFoundError(f"{checkpoint} holds no {' or '.join(CHECKPOINT_WEIGHTS)}: name a checkpoint or a file")


def _merged(checkpoint: Path) -> Path:
    """The weights of a sharded checkpoint in one file, which is written beside its checkpoints if it is not there."""
    # Here, because torch.distributed takes its time, and sharded checkpoints are rare.
    from .state import read_shards, shard_layout

    checkpoint = checkpoint.resolve()
    file = checkpoint.parent / f"{checkpoint.name}.safetensors"
    if not file.is_file() or file.stat().st_mtime < (checkpoint / MANIFEST).stat().st_mtime:
        layout = {name: value for name, value in shard_layout(checkpoint).items() if name.startswith("model.")}
        tensors = {name: torch.empty_like(value, device="cpu") for name, value in layout.items()}
        read_shards(checkpoint, tensors, prefix="model.")
        weights = {name.removeprefix("model."): value for name, value in tensors.items()}
        atomic_write_bytes(file, pack_weights(weights))
    return file

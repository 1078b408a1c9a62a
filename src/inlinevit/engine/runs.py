"""What a training run leaves in its folder, whatever its task: its configuration, its weights, its metadata."""

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch

from ..layers.registry import is_known
from ..utils.atomic import atomic_write_bytes
from ..utils.files import read_json, read_yaml
from ..utils.validation import require, shorten
from .checkpoints import MANIFEST, CheckpointFolder, find_damage, pack_weights
from .config import AnyConfig, config_from_dict
from .lock import RUN_LOCK

Parsed = TypeVar("Parsed")

RUN_CONFIG = "config.yaml"
RUN_WEIGHTS = "model.safetensors"
RUN_CHECKPOINTS = "checkpoints"
BEST = "best"
# In a checkpoint, averaged weights are preferred.
CHECKPOINT_WEIGHTS = ("ema.safetensors", "model.safetensors")
# Names the task of a run, its command and its further files.
RUN_TASK = "task.json"
# What every run writes into its folder, besides its checkpoints.
RUN_FILES = (RUN_CONFIG, RUN_WEIGHTS, RUN_TASK, "results.json", "metrics.jsonl", "train.log")


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a training run."""
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


def check_free_folder(folder: Path, metadata: Iterable[str]) -> None:
    """Refuse a folder in which a new run and its task's files would replace files that are not those of a run."""
    taken = [name for name in (*RUN_FILES, *metadata, RUN_CHECKPOINTS) if os.path.lexists(folder / name)]
    if taken and not is_run(folder):
        raise ValueError(
            f"{folder} holds {taken[0]}, which is not of a training run and would be replaced: choose another "
            "--run.output"
        )


@dataclass
class Run(Generic[AnyConfig]):
    """A training run that is read."""

    folder: Path
    config: AnyConfig

    def weights(self, checkpoint: str | None) -> Path:
        """Return the file with its weights; see run_weights()."""
        return run_weights(self.folder, checkpoint)

    def metadata(self, name: str, parse: Callable[[Any], Parsed]) -> Parsed:
        """Read a JSON file of the task; `parse` raises ValueError, TypeError or KeyError if its content is wrong."""
        file = self.folder / name
        remedy = "restore it from the run, or train again"
        try:
            return parse(read_json(file))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{file} is missing: {remedy}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file} cannot be used ({' '.join(str(error).split())}): {remedy}") from error


def has_config(folder: str) -> bool:
    """Return whether this is a folder with the configuration of a run, as opposed to the name of a model."""
    return (Path(folder) / RUN_CONFIG).is_file()


def open_run(config_class: type[AnyConfig], folder: str) -> Run[AnyConfig]:
    """Open the folder of a training run, which has a configuration of this class.

    Raises:
        FileNotFoundError: There is no run.
        ValueError: It is the run of another task, or its configuration is damaged.
    """
    path = Path(folder)
    task = task_of(config_class)
    if not has_config(folder):
        problem = f"{folder} holds no {RUN_CONFIG}" if path.is_dir() else f"no folder at {folder}"
        raise FileNotFoundError(f"{problem}: name the folder of a {task} run")
    # Without task.json, the configuration decides.
    stored = stored_task(path)
    name, command = stored.get("name", task), stored.get("command", "inlinevit")
    require(name == task, f"{folder} holds a {name} run, not a {task} run: use {command} eval or {command} predict")
    try:
        run = Run(path, config_from_dict(config_class, read_yaml(path / RUN_CONFIG)))
    except (ValueError, TypeError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path / RUN_CONFIG} is not the configuration of a {task} run ({problem}): fix it") from error
    require_attentions(folder, cast(Any, run.config).run.attention_modules)
    return run


def require_attentions(folder: str, modules: Any) -> None:
    """Refuse a run with attentions that are not registered, and say which modules to import: none is imported here.

    Args:
        folder: The folder of the run, for the message.
        modules: The record of the run, `run.attention_modules` of its configuration.
    """
    for name, module in modules.items() if isinstance(modules, dict) else ():
        if not is_known(str(name)):
            remedy = f"add --import {shorten(module)}, or import it in Python first, if you trust that module"
            if module == "__main__":
                remedy = "register it first, as the script that trained the model did"
            what = f"attention {shorten(name)!r} of the module {shorten(module)}"
            raise ValueError(f"{folder} needs {what}, which is not imported: {remedy}")


def recorded_attentions(folder: Path) -> Any:
    """Return the record of a run for require_attentions(); None if there is no run, or its configuration is damaged."""
    try:
        config = read_yaml(folder / RUN_CONFIG)
        return config["run"]["attention_modules"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def task_of(config_class: type) -> str:
    """Return the name of the task that a configuration class is for."""
    return config_class.__name__.removesuffix("Config").lower()


def stored_task(folder: Path) -> dict[str, Any]:
    """Return the content of task.json; empty if the file is missing or damaged."""
    try:
        content = read_json(folder / RUN_TASK)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def metadata_files(folder: Path) -> list[str]:
    """Return the names of the task's files in the folder of a run."""
    names = stored_task(folder).get("files")
    return [str(name) for name in names] if isinstance(names, list) else []


def run_weights(run: Path, checkpoint: str | None) -> Path:
    """Return the file with the weights of a training run.

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
            raise FileNotFoundError(
                f"{run} holds neither {RUN_WEIGHTS} nor a good checkpoint: resume the run, or train again"
            )
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
    """Return the weights of a sharded checkpoint as one file, which is written beside the checkpoint if missing."""
    # Imported here: torch.distributed is slow to import, and sharded checkpoints are rare.
    from .state import read_shards, shard_layout

    checkpoint = checkpoint.resolve()
    file = checkpoint.parent / f"{checkpoint.name}.safetensors"
    if not file.is_file() or file.stat().st_mtime < (checkpoint / MANIFEST).stat().st_mtime:
        layout = {name: value for name, value in shard_layout(checkpoint).items() if name.startswith("model.")}
        tensors = {name: torch.empty_like(value, device="cpu") for name, value in layout.items()}
        read_shards(checkpoint, tensors)
        weights = {name.removeprefix("model."): value for name, value in tensors.items()}
        atomic_write_bytes(file, pack_weights(weights))
    return file

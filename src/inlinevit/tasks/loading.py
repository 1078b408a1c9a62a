"""From the name of a model to a predictor, whatever its task."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.extras import extras_named
from ..utils.validation import did_you_mean, require
from . import TASKS, TaskEntry

if TYPE_CHECKING:
    from ..engine.predictor import Predictor

# The extension of programs of torch.export.
PROGRAM = ".pt2"
# How many folders above a file of weights that of its run may be: RUN/checkpoints/step-00000001/model.safetensors.
DEPTH = 3
_ONE_OF_THEM = f"one of {', '.join(TASKS)}"


def load(
    name: str | os.PathLike[str],
    *,
    task: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    device: Any = None,
    img_size: int | None = None,
) -> "Predictor[Any]":
    """Load a model that is ready to use, with its transform and its classes.

    Args:
        name: The folder of a training run of any task, a checkpoint or a file of weights in one, the file of an
            exported model (.onnx, or .xml of OpenVINO), a published model (hf-hub:USER/NAME or local-dir:FOLDER), or
            the name of a model of this library or of timm, for classification.
        task: classification, multilabel, detection or segmentation; None = that of the run.
        checkpoint: With a run, "best" for its best checkpoint, the folder of another one, or a file (None = the final
            weights). With the name of a model, the file of its weights (None = the published ones are downloaded).
        device: Where to compute, such as "cpu" or "cuda"; None = the best device there is. Exported models run on the
            CPU.
        img_size: For classification, the side of the model's input; None = what it was trained for.

    Returns:
        A Predictor with `model`, `transform`, `classes`, `config` and `to(device)`; calling it predicts images.

    Raises:
        ModuleNotFoundError: A package is missing that the task needs; the message names what to install.
        OSError: There is neither a run nor a model of this name, or the published weights cannot be downloaded.
        ValueError: The run is damaged or of another task, or an argument does not apply.
    """
    with extras_named():
        return _load(os.fspath(name), task, None if checkpoint is None else os.fspath(checkpoint), device, img_size)


def _load(name: str, task: str | None, checkpoint: str | None, device: Any, img_size: int | None) -> "Predictor[Any]":
    from ..engine.config import fill_options
    from ..engine.exported_model import is_exported
    from ..engine.exported_run import check_exported_device
    from ..engine.runs import has_config
    from ..engine.setup import resolve_device
    from ..models.hub import fetch_source

    require(bool(name.strip()), "the name is empty: name the folder of a training run, or a model")
    if task is not None:
        require(task in TASKS, f"there is no task {task}: {did_you_mean(task, TASKS) or f'choose {_ONE_OF_THEM}'}")
    chosen = resolve_device(None if device is None else str(device))
    name = fetch_source(name)
    exported = is_exported(name)
    if exported:
        check_exported_device(name, None if device is None else chosen.type)
    elif not has_config(name):
        _refuse_exported(Path(name))
        if (run := _run_above(Path(name))) is not None:
            require(checkpoint is None, f"{name} is a checkpoint: leave out checkpoint={checkpoint}, or name the run")
            name, checkpoint = str(run), name
    if exported:
        entry = _task_of_exported(name, task)
    else:
        entry = _task_of_run(Path(name), task) if has_config(name) else TASKS[task or "classification"]
    given = {"checkpoint": checkpoint} if img_size is None else {"checkpoint": checkpoint, "img_size": img_size}
    options = entry.load_predict_options()
    require(
        set(given) <= set(options.command_only),
        f"img_size does not apply to {entry.description}, which {name} is for: leave it out",
    )
    predictor = entry.load_task().load_predictor(name, fill_options(options, given, options.command_only))
    return predictor if exported else predictor.to(chosen)


def _task_of_exported(file: str, task: str | None) -> TaskEntry:
    """Return the task of an exported model, which must be the given one unless that is None."""
    from ..engine.exported_model import read_metadata
    from ..engine.exported_run import require_task

    metadata = read_metadata(file)
    require_task(file, metadata, task or metadata.task)
    return TASKS[metadata.task]


def _task_of_run(folder: Path, task: str | None) -> TaskEntry:
    """Return the task of a run: the one that it has stored or, if there is none, whose configuration it has."""
    from ..engine.runs import open_run, stored_task

    stored = stored_task(folder).get("name")
    if stored is not None:
        stored = str(stored)
        require(stored in TASKS, f"{folder} holds a run of the task {stored}, which is not known: update inlinevit")
        require(task in (None, stored), f"{folder} holds a {stored} run, not a {task} run: leave out task={task!r}")
        return TASKS[stored]
    if task is not None:
        return TASKS[task]
    fitting = []
    for entry in TASKS.values():
        with suppress(ValueError):
            open_run(entry.load_config(), str(folder))
            fitting.append(entry)
    require(len(fitting) <= 1, f"{folder} does not store its task: give it as task, {_ONE_OF_THEM}")
    # If none fits, loading it reports what is wrong.
    return fitting[0] if fitting else TASKS["classification"]


def _run_above(path: Path) -> Path | None:
    """Return the run that a checkpoint or a file of weights is in."""
    from ..engine.runs import has_config

    if not path.exists():
        return None
    return next((folder for folder in path.absolute().parents[:DEPTH] if has_config(str(folder))), None)


def _refuse_exported(path: Path) -> None:
    """Refuse programs of torch.export, whose files can hold pickled objects, and folders of exported models."""
    require(
        path.suffix != PROGRAM,
        f"{path} is a program of torch.export, which is not loaded here: name a .onnx or .xml file that `inlinevit "
        "export` has written, or the run that it is from",
    )
    found = next((file for file in path.glob("*.onnx")), None)
    require(found is None, f"{path} is a folder: name the exported model in it, {found}")

"""Exported models in place of training runs: `eval`, `predict` and `inlinevit.load` take either."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..utils.validation import require
from .config import AnyConfig, CommandOptions, EvalOptions, config_from_dict
from .exported import REMEDY, ExportedMetadata
from .exported_model import ExportedModel, read_metadata
from .runs import Parsed, Run, task_of


@dataclass
class ExportedRun(Run[AnyConfig]):
    """What an exported model says about the run that it is from.

    Attributes:
        folder: The file of the model.
        config: The configuration of the run, as far as predictions depend on it.
        exported: The metadata of the file.
    """

    exported: ExportedMetadata

    def weights(self, checkpoint: str | None) -> Path:
        """See Run.weights."""
        raise AssertionError("the weights of an exported model are in its file")

    def metadata(self, name: str, parse: Callable[[Any], Parsed]) -> Parsed:
        """See Run.metadata; from the file of the model."""
        content = {"classes.json": self.exported.label_names, "labels.json": self.exported.labels}[name]
        try:
            return parse(content)
        except (ValueError, TypeError, KeyError) as error:
            problem = " ".join(str(error).split())
            raise ValueError(f"{self.folder} has metadata that cannot be used ({problem}): {REMEDY}") from error


def open_exported(config_class: type[AnyConfig], file: str, metadata: ExportedMetadata) -> ExportedRun[AnyConfig]:
    """Return the run of an exported model, whose metadata are read.

    Raises:
        ValueError: It is for another task, or its metadata make no configuration.
    """
    task = task_of(config_class)
    require_task(file, metadata, task)
    inputs = metadata.preprocessing
    pixels = {name: vars(inputs)[name] for name in ("bands", "range", "mean", "std", "max_pixels")}
    plain: dict[str, Any] = {"model": metadata.model_config, "data": pixels}
    # Nothing is augmented, and settings of augmentation must not contradict the model.
    if metadata.task == "segmentation":
        plain["inference"] = metadata.inference
        plain["augment"] = {"crop_size": metadata.window_size, "photometric_distortion": False}
    else:
        plain["augment"] = {"auto_augment": None, **dict.fromkeys(("color_jitter", "mixup", "cutmix"), 0.0)}
        plain["augment"]["label_smoothing"] = 0.0
    try:
        config = config_from_dict(config_class, plain)
        channels = cast(Any, config).model.in_chans
        require(channels == metadata.input.channels, f"model.in_chans is {channels}, but the input has others")
    except (ValueError, TypeError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{file} has metadata that cannot be used ({problem}): {REMEDY}") from error
    return ExportedRun(Path(file), config, metadata)


def require_task(file: str, metadata: ExportedMetadata, task: str) -> None:
    """Refuse an exported model that is for another task."""
    require(
        metadata.task != "features",
        f"{file} is a backbone without a head, which predicts nothing: run it with its runtime (docs/export.md), or "
        "export the whole model without --features",
    )
    require(
        metadata.task == task,
        f"{file} is a model for {metadata.task}, not for {task}: `inlinevit --help` lists the commands of each task",
    )


def open_exported_to_evaluate(config_class: type[AnyConfig], file: str, options: EvalOptions) -> ExportedRun[AnyConfig]:
    """Return the run of an exported model for `eval`, which has to name the data."""
    run = open_exported(config_class, file, read_metadata(file))
    require(
        not options.data.overrides().keys().isdisjoint(("path", "eval_path")),
        f"{file} does not store the data of its run: name those to evaluate on with --data.path",
    )
    return run


def load_exported(
    config_class: type[AnyConfig], file: str, options: CommandOptions
) -> tuple[ExportedModel, ExportedRun[AnyConfig]]:
    """Open an exported model for `eval` or `predict`, and return it with its run.

    Raises:
        ValueError: It is damaged or for another task, or an option does not apply.
    """
    require(options.checkpoint is None, f"--checkpoint is for training runs, and {file} has its weights: leave it out")
    check_exported_device(file, options.device)
    require(
        not isinstance(options, EvalOptions) or options.precision == "no",
        f"--precision does not apply to {file}, whose precision was chosen when it was exported: leave it out",
    )
    model = ExportedModel(file)
    return model, open_exported(config_class, file, model.metadata)


def check_exported_device(file: str, device: str | None) -> None:
    """Refuse another device than the CPU; None = it is not given."""
    require(device in (None, "cpu"), f"{file} is an exported model, which runs on the CPU: leave out the device")

"""Train, time, evaluate and analyze the demo's models, and write the report."""

import json
import shlex
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from ...analysis.analyze import AnalysisSettings, Subject, analyze
from ...analysis.sections import analysis_sections
from ...benchmark.timing import interleave
from ...benchmark.train_loop import bare_step, first_batch
from ...engine.config import to_plain
from ...engine.evaluator import evaluate_model
from ...engine.setup import resolve_device
from ...engine.trainer import Trainer
from ...models.catalog import count_parameters
from ...report import STYLES, Report
from ...tasks.classification.config import ClassificationConfig
from ...tasks.classification.metrics import ClassificationEvaluation
from ...tasks.classification.sources import ArraySource
from ...tasks.classification.task import Classification
from ...utils.atomic import atomic_write_json
from ...utils.program import program_name
from .resolution import SIDES, explore_section, measure_resolutions, resolution_section
from .sections import TrainedModel, comparison_sections, settings_section

# Timed training steps of each model.
TIMED_ROUNDS = 25
STATE_FILE = "demo.json"
FIGURES = "figures"
# Sides of the images of the section on large images, in pixels.
IMAGE_SIDES = SIDES
# Images of the analysis.
ANALYSIS_SETTINGS = AnalysisSettings(images=200, confusion_images=50, batch_size=50)


def compare(folder: Path, configs: Mapping[str, ClassificationConfig], console: Console) -> Path:
    """Train models that differ in their attention, write a report that compares them, and return its path.

    Args:
        folder: Folder of the report.
        configs: Configurations by attention.
        console: Where to show the progress.
    """
    started = time.monotonic()
    # Checks the device and reads the data, so that errors occur before anything is written.
    for config in configs.values():
        resolve_device(config.run.device)
    tasks = {attention: Classification(config) for attention, config in configs.items()}
    settings = {attention: to_plain(config) for attention, config in configs.items()}
    prepare_folder(folder, settings, console)
    trainers = {}
    for number, (attention, task) in enumerate(tasks.items(), start=1):
        console.print(f"{number} of {len(tasks)}: training with {attention} attention")
        trainers[attention] = Trainer(task, configs[attention])
        trainers[attention].run()
    # Newly initialised models, on the same images.
    steps = {
        attention: bare_step(Trainer(task, configs[attention]), first_batch(trainers[attention]))
        for attention, task in tasks.items()
    }
    seconds = interleave(steps, rounds=TIMED_ROUNDS, console=console)
    models, analyses = {}, []
    for attention, task in tasks.items():
        trainer, config = trainers[attention], configs[attention]
        model = trainer.unwrapped_model.eval()
        evaluation, predictions = evaluate_trained(model, task, trainer.accelerator)
        metrics = (Path(config.run.output) / "metrics.jsonl").read_text()
        models[attention] = TrainedModel(
            parameters=count_parameters(model),
            evaluation=evaluation,
            predictions=predictions,
            history=[json.loads(line) for line in metrics.splitlines()],
            batch_size=config.data.batch_size,
            step_seconds=seconds[attention],
        )
        subject = Subject(STYLES[attention].name, attention, model, task.spec, task.num_classes)
        analyses.append(analyze(subject, task.eval_source, ANALYSIS_SETTINGS, console))
    device = resolve_device(next(iter(configs.values())).run.device)
    resolution = resolution_section(measure_resolutions(device, console, IMAGE_SIDES), IMAGE_SIDES)
    report = Report(
        "Three kinds of attention, side by side",
        "Vision transformers that differ only in their attention were trained on the same images, in the same order, "
        "for the same number of steps, and tested on other images.",
    )
    assert isinstance(task.eval_source, ArraySource)
    report.add(*comparison_sections(models, task.eval_source), resolution, *analysis_sections(analyses))
    explore = f"{program_name()} explore {shlex.quote(str(folder))}"
    report.add(settings_section(settings, len(task.train_source)), explore_section(explore))
    path = report.write(folder)
    report.save_figures(folder / FIGURES)
    atomic_write_json(folder / STATE_FILE, {"state": "finished", "settings": settings})
    console.print(f"Done in {(time.monotonic() - started) / 60:.1f} minutes. The report is in {path.resolve()}")
    console.print(f"Look at the attention of the models in your browser: {explore}", markup=False)
    return path


def prepare_folder(folder: Path, settings: dict[str, Any], console: Console) -> None:
    """Keep the folder of an interrupted demo with the same settings; remove the results of another demo."""
    file = folder / STATE_FILE
    before = read_state(file)
    if before == {"state": "running", "settings": settings}:
        console.print(f"{folder} has an interrupted demo, which resumes")
        return
    if before is not None:
        console.print(f"{folder} has another demo: it starts again, and the old results are removed")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} has other files than those of a demo: name a new folder with --output")
    # If the demo is killed while it clears the folder, the next one clears it again instead of resuming.
    atomic_write_json(file, {"state": "clearing", "settings": settings})
    for name in (*settings, FIGURES):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("report.html", "report.json"):
        (folder / name).unlink(missing_ok=True)
    atomic_write_json(file, {"state": "running", "settings": settings})


def read_state(file: Path) -> dict[str, Any] | None:
    """Return the state of an earlier demo; None if there is none, or the file is not one of a demo."""
    try:
        state = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return state if isinstance(state, dict) and set(state) == {"state", "settings"} else None


def evaluate_trained(
    model: nn.Module, task: Classification, accelerator: Accelerator
) -> tuple[ClassificationEvaluation, NDArray[np.int64]]:
    """Return the evaluation of a trained model and its predicted class for each test image, (images,)."""
    predictions: list[Tensor] = []
    hook = model.register_forward_hook(lambda _module, _images, logits: predictions.append(logits.argmax(dim=1).cpu()))
    evaluation = evaluate_model(model, task.make_evaluator(), accelerator, show_progress=True)
    hook.remove()
    return evaluation, torch.cat(predictions).numpy()

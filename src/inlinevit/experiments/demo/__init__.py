"""`inlinevit demo`: train softmax, linear and InLine attention side by side, in minutes and without a download."""

import os
from pathlib import Path

from ...engine.config import MOST_STEPS, config_from_dict
from ...recipes import load_recipe, merge
from ...tasks.classification.config import ClassificationConfig
from ...utils.console import new_console
from ...utils.validation import Range, check_value, require

__all__ = ["ATTENTIONS", "demo", "demo_config"]

ATTENTIONS = ("softmax", "linear", "inline")


def demo_config(
    attention: str,
    *,
    output: str = "runs/embedded",
    data: str = "embedded",
    seed: int = 0,
    steps: int = 900,
    device: str | None = None,
) -> ClassificationConfig:
    """Return the recipe "embedded" for one of ATTENTIONS; the demo's models differ in attention and output only."""
    changes = {
        "data": {"path": data},
        "model": {"kwargs": {"attention": attention}},
        "schedule": {"steps": steps, "warmup": steps // 10},
        "run": {
            "output": output,
            "seed": seed,
            "device": device,
            "eval_every": max(1, steps // 6),
            "log_every": max(1, steps // 30),
            "checkpoint_steps": max(1, steps // 6),
        },
    }
    return config_from_dict(ClassificationConfig, merge(load_recipe("embedded", "classification"), changes))


def demo(
    output: str = "runs/demo", data: str = "embedded", seed: int = 0, steps: int = 900, device: str | None = None
) -> Path:
    """Train a small softmax, linear and InLine vision transformer side by side, and write a report.

    They are trained on the same images in the same order, for the same number of steps. An interrupted demo resumes
    when it is run again; one that is finished, or that has other settings, starts again.

    Args:
        output: Folder of the results: report.html, report.json, figures/, and one folder per model.
        data: "embedded", the Fashion-MNIST images that come with this package; or fashion-mnist:FOLDER, with the
            folder of the four .gz files of the whole data set.
        seed: Seed of initial weights, data order and augmentation.
        steps: Training steps of each model.
        device: Where to compute, such as cpu or cuda; null = the best device there is.

    Returns:
        The path of report.html.
    """
    is_known = data == "embedded" or data.startswith("fashion-mnist:")
    require(is_known, f"data is {data!r}: it should be embedded, or fashion-mnist:FOLDER")
    require(os.environ.get("WORLD_SIZE", "1") == "1", "the demo runs in one process: start it without a launcher")
    check_value("steps", steps, int, Range(1, MOST_STEPS))
    require(bool(output.strip()), "output is empty: name a folder, or leave it out")
    folder = Path(output)
    configs = {
        attention: demo_config(
            attention, output=str(folder / attention), data=data, seed=seed, steps=steps, device=device
        )
        for attention in ATTENTIONS
    }
    console = new_console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"Three small vision transformers, {steps} training steps each: {', '.join(ATTENTIONS)} attention.")
    # Imported here, because it takes seconds, and the line above is printed at once.
    from .compare import compare

    return compare(folder, configs, console)

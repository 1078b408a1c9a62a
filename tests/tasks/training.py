"""Short training runs of detectors and segmentation models, by the command line."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml

from inlinevit.cli import main


def small_pvt(img_size: int, width: int) -> dict[str, Any]:
    """Arguments of a backbone with one block in each stage."""
    return {
        "img_size": img_size,
        "embed_dims": [width, 2 * width, 3 * width, 4 * width],
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 2, 2, 4],
        "mlp_ratios": [2, 2, 2, 2],
    }


def train(command: str, settings: dict[str, Any], data: Path, output: Path, *options: str) -> dict[str, Any]:
    """Train with these settings on the data of a folder, and return the results that the run has left."""
    recipe = output.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(settings))
    main([command, "train", "--config", str(recipe), "--data.path", str(data), "--run.output", str(output), *options])
    return json.loads((output / "results.json").read_text())


def assert_resumed_run_is_the_same(
    command: str, settings: dict[str, Any], data: Path, home: Path, step: int, *options: str
) -> None:
    """Train, resume from the checkpoint of a step in another folder, and compare the weights."""
    train(command, settings, data, home / "whole", *options)
    middle = home / "whole" / "checkpoints" / f"step-{step:08d}"
    train(command, settings, data, home / "resumed", *options, "--run.resume", str(middle))
    files = [home / name / "model.safetensors" for name in ("whole", "resumed")]
    whole, resumed = map(safetensors.torch.load_file, files)
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []

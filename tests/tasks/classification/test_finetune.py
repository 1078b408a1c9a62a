"""Fine-tuning as docs/finetuning.md shows it, from a file of weights instead of a download."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from inlinevit.cli import main
from tests import ROOT

pytestmark = pytest.mark.integration

PAGE = (ROOT / "docs" / "finetuning.md").read_text()
# The same commands in seconds.
SMALLER = "--model.kwargs.depths [1,1,1,1] --model.img_size 32 --schedule.epochs 2 --data.batch_size 4 --data.workers 0"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with photos of two classes, and weights in the cache of downloads."""
    generator = np.random.default_rng(0)
    for name, colour in (("photos/cat", 40), ("photos/dog", 200), ("new_photos", 200)):
        (tmp_path / name).mkdir(parents=True)
        for number in range(10):
            noise = generator.integers(-30, 30, (40, 50, 3))
            Image.fromarray((colour + noise).astype(np.uint8)).save(tmp_path / name / f"{number}.png")
    weights = timm.create_model("inline_pvt_tiny", depths=(1, 1, 1, 1)).state_dict()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    (tmp_path / "torch/hub/checkpoints").mkdir(parents=True)
    for file in ("torch/hub/checkpoints/inline_pvt_tiny.pth", "weights.pth"):
        torch.save(weights, tmp_path / file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*head is not loaded")
def test_the_commands_of_the_guide_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    assert [shlex.split(line)[1] for line in lines] == ["train", "eval", "predict", "train"]
    for line in lines:
        words = shlex.split(line.replace("weights.safetensors", "weights.pth"))[1:]
        main([*words, *(SMALLER.split() if words[0] == "train" else [])])
    output = capsys.readouterr()
    assert "done: top1" in output.out
    assert json.loads((place / "runs/finetune/classes.json").read_text()) == ["cat", "dog"]
    log = (place / "runs/finetune/train.log").read_text().splitlines()
    started, start, batch, optimizer, schedule, *epochs = log
    assert started.endswith("  started")
    assert start == (
        "inline_pvt_tiny for 2 classes from the published weights; photos: 16 images for training, 4 for evaluation "
        "(0.2 of each class, held out of training)"
    )
    assert batch == ("total batch 4 (4 × 1 process), 4 steps per epoch, 8 steps = 2 epochs; precision float32 on cpu")
    # A quarter of the recipe's batch, so a quarter of its rate.
    assert optimizer.startswith("adamw, learning rate 5e-05 (optimizer.lr 0.0002 × 4 / 16), layer decay 0.75 (down to ")
    assert schedule == "cosine schedule, warm-up from 2.5e-07 in 4 steps, down to 2.5e-07"
    assert [line.partition(" (")[0] for line in epochs] == ["epoch 1", "epoch 2"]
    assert all(line in output.err for line in (start, batch, optimizer, schedule))
    assert "from weights.pth; photos" in (place / "runs/from_file/train.log").read_text()


@pytest.mark.filterwarnings("ignore:.*head is not loaded")
def test_eval_uses_the_images_that_were_held_out(place: Path) -> None:
    main(["train", "--config", "finetune", "--data.path", "photos", *SMALLER.split()])
    main(["eval", "runs/finetune", "--output", "held_out"])
    main(["eval", "runs/finetune", "--data.path", "photos", "--output", "all"])
    numbers = {name: json.loads((place / name / "evaluation.json").read_text()) for name in ("held_out", "all")}
    trained = json.loads((place / "runs/finetune/results.json").read_text())["metrics"]
    assert numbers["held_out"]["top1"] == pytest.approx(trained["top1"])
    assert (numbers["held_out"]["images"], numbers["all"]["images"]) == (4, 20)

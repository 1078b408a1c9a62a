"""The cost of the training loop."""

import json

import pytest
import torch
import torch.nn.functional as F

from inlinevit import cli
from inlinevit.benchmark.timing import Quartiles
from inlinevit.benchmark.train_loop import ConstantModel, bare_step, measure_loop, summarize
from inlinevit.engine.config import RunConfig
from inlinevit.engine.trainer import Trainer
from inlinevit.tasks.classification.config import ClassificationConfig, ClassificationDataConfig, ModelConfig
from inlinevit.tasks.classification.task import Classification


def test_ratios():
    times = summarize(
        {
            "training": Quartiles(9, 10, 11),
            "data_only": Quartiles(1, 2, 3),
            "loop_on_tensors": Quartiles(8, 8.2, 9),
            "bare_on_tensors": Quartiles(7, 8, 9),
        }
    )
    assert times["times_faster_without_model"] == 5
    assert round(times["overhead_percent"], 6) == 2.5


def test_a_model_that_does_nothing_still_trains():
    model = ConstantModel(3)
    model(torch.zeros(5, 1, 8, 8)).sum().backward()
    assert model.logits.grad.tolist() == [5, 5, 5]


@pytest.mark.integration
def test_the_command_measures_a_recipe(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = "--data.batch_size 4 --data.workers 0 --model.in_chans 1 --model.img_size 28 --model.kwargs.depth 1"
    cli.main(["bench", "loop", "--steps", "2", "--json", *options.split()])
    numbers = json.loads(capsys.readouterr().out)
    for name in ("training", "data_only", "loop_on_tensors", "bare_on_tensors"):
        low, median, high = numbers[name]
        assert 0 < low <= median <= high
    ratio = numbers["training"][1] / numbers["data_only"][1]
    assert numbers["times_faster_without_model"] == pytest.approx(ratio)
    assert not any(tmp_path.iterdir())


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="at least 2"):
        measure_loop(ClassificationConfig(), steps=1)


def test_a_bare_step_sees_as_many_images_as_one_of_the_loop(monkeypatch):
    config = ClassificationConfig(
        data=ClassificationDataConfig(batch_size=2, workers=0),
        model=ModelConfig(img_size=28, in_chans=1, kwargs={"depth": 1}),
        run=RunConfig(grad_accum_steps=3),
    )
    losses, cross_entropy = [], F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *args, **kw: losses.append(1) or cross_entropy(*args, **kw))
    bare_step(Trainer(Classification(config), config), (torch.zeros(2, 1, 28, 28), torch.tensor([0, 1]), []))()
    assert len(losses) == 3

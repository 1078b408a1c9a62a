"""`--device` on every command that computes: honoured, or refused in a sentence."""

from pathlib import Path

import pytest

from inlinevit import cli

TINY = "inline_deit_tiny:depth=1,embed_dim=16,num_heads=2"
SMALL = (
    "--config embedded --schedule.steps 1 --schedule.warmup 0 --data.max_train_samples 64 "
    "--data.workers 0 --model.kwargs.depth 1 --model.kwargs.embed_dim 16 --model.kwargs.num_heads 2"
)


@pytest.mark.parametrize(
    "command",
    [
        f"train {SMALL} --run.output new",
        f"bench loop --steps 2 {SMALL}",
        f"analyze {TINY} --untrained --output new",
        "eval runs/none",
        "predict inline_deit_tiny photo.png",
    ],
)
def test_a_device_that_is_not_there(command, refused, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/none").mkdir(parents=True)
    if command.startswith("eval"):
        train(tmp_path / "runs/none")
        capsys.readouterr()
    code, line = refused(*command.split(), "--device", "cuda:77")
    assert code == 1
    assert "device 'cuda:77' cannot be used here" in line
    assert line.endswith("choose another one, such as cpu")
    assert not (tmp_path / "new").exists()


def train(output: Path, *options: str) -> None:
    cli.main(["train", *SMALL.split(), "--run.output", str(output), *options])


def test_the_demo_writes_nothing_for_a_device_that_is_not_there(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--output", str(tmp_path / "new"), "--device", "cuda:77"])
    assert "device 'cuda:77' cannot be used here" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.integration
def test_training_uses_the_device_and_may_resume_on_another_one(tmp_path, monkeypatch):
    from inlinevit.engine.trainer import Trainer

    devices = []
    train_step = Trainer.train_step

    def spied(self, *arguments):
        devices.append((str(self.accelerator.device), str(next(self.unwrapped_model.parameters()).device)))
        return train_step(self, *arguments)

    monkeypatch.setattr(Trainer, "train_step", spied)
    # Another name of the same device, which torch keeps.
    train(tmp_path / "run", "--device", "cpu:0")
    assert devices == [("cpu:0", "cpu")]
    assert "device: cpu:0" in (tmp_path / "run" / "config.yaml").read_text()
    # It is finished.
    train(tmp_path / "run", "--run.device", "cpu")
    train(tmp_path / "other")
    assert devices[1:] == [("cpu", "cpu")]

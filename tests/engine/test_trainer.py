"""The loop, run in this process on the toy job."""

import errno
import inspect
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from inlinevit.engine import trainer as loop
from inlinevit.engine.setup import enable_grad_checkpointing
from inlinevit.engine.trainer import Diverged, Stopped, Trainer
from inlinevit.utils import atomic as files
from tests.engine.running import Server, assert_same_run, final_tensors, metric_lines
from tests.engine.toy import MODELS, Mlp, ToySamples, make_trainer, settings


def steps_of(output: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*"))


def best_of(output: Path) -> int:
    return int(os.readlink(output / "checkpoints" / "best").removeprefix("step-"))


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in metric_lines(output) if "loss" in line]


def test_loop_is_short_and_knows_no_task() -> None:
    lines = inspect.getsource(loop).splitlines()
    assert len(lines) < 300
    imports = [line.split()[1] for line in lines if line.startswith(("import ", "from "))]
    assert ".task" in imports
    assert not any(name.startswith(("..tasks", "..models", "inlinevit", "timm", "torchvision")) for name in imports)


@pytest.mark.parametrize(("greater_is_better", "best"), [(False, 12), (True, 18)])
def test_last_and_best_checkpoints_are_kept(tmp_path: Path, greater_is_better: bool, best: int) -> None:
    metrics = [2.0, 1.0, 5.0, 5.0]
    output = tmp_path / "run"
    make_trainer(
        settings(output, toy__metrics=metrics, toy__greater_is_better=greater_is_better, run__keep_checkpoints=2)
    ).run()
    assert steps_of(output) == sorted({best, 20, 24})
    assert best_of(output) == best
    results = json.loads((output / "results.json").read_text())
    assert (results["step"], results["best_step"]) == (24, best)
    assert results["best"] == metrics[best // 6 - 1]
    assert results["metrics"]["error"] == 5.0


def test_metric_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    nan = float("nan")
    make_trainer(settings(tmp_path / "run", toy__metrics=[nan, 3.0, nan, 4.0])).run()
    assert best_of(tmp_path / "run") == 12


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_checkpoints_as_asked_for(tmp_path: Path, keep: int) -> None:
    make_trainer(settings(tmp_path / "run", run__keep_checkpoints=keep, toy__metrics=[4.0, 3.0, 2.0, 1.0])).run()
    assert steps_of(tmp_path / "run") == [18, 20, 24][-keep:]


def test_finished_run_does_nothing_when_run_again(tmp_path: Path) -> None:
    output = tmp_path / "run"
    first = make_trainer(settings(output)).run()
    before = final_tensors(output), metric_lines(output), (output / "results.json").read_text()
    trainer = make_trainer(settings(output))
    assert trainer.run() == first
    assert trainer.task.calls == 0
    after = final_tensors(output), metric_lines(output), (output / "results.json").read_text()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1:] == after[1:]


def test_resume_never_sets_the_old_run_aside(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with pytest.raises(Stopped):
        make_trainer(settings(output, toy__events={"21": "SIGTERM"})).run()
    (output / "mine.txt").write_text("mine")
    for number in (1, 2):
        with pytest.warns(UserWarning, match=rf"held a run: it is now .*run\.{number}"):
            make_trainer(settings(output, run__resume="never", run__seed=5)).run()
    assert (tmp_path / "run.1" / "mine.txt").read_text() == "mine"
    assert steps_of(tmp_path / "run.1")[-1] == 11
    assert_same_run(output, tmp_path / "run.2")


def test_resume_from_a_named_checkpoint(tmp_path: Path) -> None:
    make_trainer(settings(tmp_path / "reference", run__keep_checkpoints=9)).run()
    path = tmp_path / "reference" / "checkpoints" / "step-00000010"
    make_trainer(settings(tmp_path / "run", run__resume=str(path))).run()
    ours, theirs = final_tensors(tmp_path / "run"), final_tensors(tmp_path / "reference")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert metric_lines(tmp_path / "run")[0]["step"] == 12


def test_resume_from_an_earlier_checkpoint_of_the_same_run(tmp_path: Path) -> None:
    output = tmp_path / "run"
    make_trainer(settings(output, run__keep_checkpoints=9)).run()
    path = output / "checkpoints" / "step-00000010"
    # Another way from there on: it must not take up again where the first one ended.
    changes: dict[str, Any] = {"run__keep_checkpoints": 2, "optimizer__lr": 0.001}
    with pytest.raises(Stopped):
        make_trainer(settings(output, run__resume=str(path), toy__events={"5": "SIGTERM"}, **changes)).run()
    assert steps_of(output)[-1] == 13
    assert make_trainer(settings(output, **changes)).progress.step == 13
    assert max(line["step"] for line in metric_lines(output)) == 12


def test_settings_of_the_optimizer_are_not_those_of_the_checkpoint(tmp_path: Path) -> None:
    make_trainer(settings(tmp_path / "run", schedule__epochs=1)).run()
    path = tmp_path / "run" / "checkpoints" / "step-00000006"
    trainer = make_trainer(settings(tmp_path / "other", run__resume=str(path), optimizer__weight_decay=0.25))
    trainer.run()
    assert {group["weight_decay"] for group in trainer.optimizer.optimizer.param_groups} == {0.0, 0.25}


SCALES = {"fc1.*": 3.0, "fc2.*": 0.5}


def test_factors_of_learning_rates_have_no_order(tmp_path: Path) -> None:
    turned = dict(reversed(SCALES.items()))
    make_trainer(settings(tmp_path / "reference", run__keep_checkpoints=9, optimizer__lr_scales=SCALES)).run()
    path = str(tmp_path / "reference" / "checkpoints" / "step-00000010")
    make_trainer(settings(tmp_path / "run", run__resume=path, optimizer__lr_scales=turned)).run()
    ours, theirs = final_tensors(tmp_path / "run"), final_tensors(tmp_path / "reference")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("scales", [{}, {"fc1.*": 3.0}, {"fc1.weight": 3.0, "fc2.*": 0.5}])
def test_states_are_not_loaded_for_other_parameters(tmp_path: Path, scales: dict[str, float]) -> None:
    make_trainer(settings(tmp_path / "run", schedule__epochs=1, optimizer__lr_scales=SCALES)).run()
    path = str(tmp_path / "run" / "checkpoints" / "step-00000006")
    with pytest.raises(ValueError, match=r"is not that of this run's optimizer \(.*: resume with the settings it was"):
        make_trainer(settings(tmp_path / "other", run__resume=path, optimizer__lr_scales=scales)).run()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "manifest.json").unlink(), "is not a checkpoint: name a step-… folder"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "is damaged: model.safetensors has changed"),
    ],
)
def test_resume_from_what_is_no_checkpoint(tmp_path: Path, spoil: Any, message: str) -> None:
    make_trainer(settings(tmp_path / "run", schedule__epochs=1)).run()
    path = tmp_path / "run" / "checkpoints" / "step-00000006"
    spoil(path)
    with pytest.raises(ValueError, match=message):
        make_trainer(settings(tmp_path / "other", run__resume=str(path))).run()


def test_resume_without_averaged_weights(tmp_path: Path) -> None:
    make_trainer(settings(tmp_path / "run", schedule__epochs=1, run__ema_decay=None)).run()
    path = tmp_path / "run" / "checkpoints" / "step-00000006"
    with pytest.raises(ValueError, match=r"has no ema\.safetensors: resume with the settings"):
        make_trainer(settings(tmp_path / "other", run__resume=str(path))).run()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"optimizer__lr": 0.5}, "optimizer.lr was 0.02 and is 0.5"),
        ({"run__seed": 3}, "run.seed was 0 and is 3"),
        ({"schedule__epochs": 9}, "schedule.epochs was 4 and is 9"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, Any], name: str) -> None:
    with pytest.raises(Stopped):
        make_trainer(settings(tmp_path / "run", toy__events={"3": "SIGTERM"})).run()
    with pytest.raises(ValueError, match=rf"{name}.*choose another --run.output, or start over"):
        make_trainer(settings(tmp_path / "run", **change)).run()


@pytest.mark.parametrize("content", [None, b"", b"run: [", b"\xff\xfe"])
def test_settings_that_are_lost(tmp_path: Path, content: bytes | None) -> None:
    with pytest.raises(Stopped):
        make_trainer(settings(tmp_path / "run", toy__events={"3": "SIGTERM"})).run()
    if content is None:
        (tmp_path / "run" / "config.yaml").unlink()
    else:
        (tmp_path / "run" / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.yaml does not have the settings of the checkpoints beside it"):
        make_trainer(settings(tmp_path / "run")).run()


@pytest.mark.parametrize("output", ["file", "file/run"])
def test_results_have_no_place(tmp_path: Path, output: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=rf"{output} cannot be a folder of results \(.*\): name another one"):
        make_trainer(settings(tmp_path / output)).run()


def test_settings_that_change_nothing_are_free(reference: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        make_trainer(settings(tmp_path / "run", toy__events={"3": "SIGTERM"})).run()
    make_trainer(
        settings(tmp_path / "run", run__keep_checkpoints=1, run__checkpoint_steps=None, run__checkpoint_minutes=1.0)
    ).run()
    assert_same_run(tmp_path / "run", reference)


def test_data_of_another_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        make_trainer(settings(tmp_path / "run", toy__events={"3": "SIGTERM"})).run()
    with pytest.raises(ValueError, match="has 6 steps in an epoch and this run 12"):
        make_trainer(settings(tmp_path / "run", toy__samples=100)).run()


def test_too_few_data_for_a_step(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"one step of 128 samples: choose a smaller --data\.batch_size or --run\.grad"
    ):
        make_trainer(settings(tmp_path / "run", toy__batch_size=32, run__grad_accum_steps=4))


def test_checkpoints_by_time(tmp_path: Path) -> None:
    plain = settings(
        tmp_path / "run", run__checkpoint_steps=None, run__checkpoint_minutes=0.0, run__keep_checkpoints=100
    )
    make_trainer(plain).run()
    assert steps_of(tmp_path / "run") == list(range(1, 25))


def test_training_by_steps(tmp_path: Path) -> None:
    schedule = {"schedule__epochs": None, "schedule__steps": 15, "schedule__warmup": 2}
    changes: dict[str, Any] = {**schedule, "run__eval_every": 4}
    make_trainer(settings(tmp_path / "run", **changes, run__checkpoint_steps=None, run__keep_checkpoints=9)).run()
    lines = metric_lines(tmp_path / "run")
    assert [line["step"] for line in lines if "eval_error" in line] == [4, 8, 12, 15]
    # Those of the evaluations: epochs do not count.
    assert steps_of(tmp_path / "run") == [4, 8, 12, 15]


# Full disks


def write_on_a_full_disk(path: Path, content: bytes) -> None:
    path.write_bytes(content[:10])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_disk_full_while_a_checkpoint_is_written(reference: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with pytest.raises(Stopped):
        make_trainer(settings(output, toy__events={"9": "SIGTERM"})).run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inlinevit.engine.checkpoints.write_bytes", write_on_a_full_disk)
        with pytest.raises(
            OSError, match=r"^no space left on the disk for .*step-00000006: free some and run"
        ) as caught:
            make_trainer(settings(output)).run()
    assert caught.value.errno is None
    assert steps_of(output) == [5]
    assert not list((output / "checkpoints").glob(".unfinished*"))
    make_trainer(settings(output)).run()
    assert_same_run(output, reference)


@pytest.mark.integration
def test_system_refuses_to_write_more(server: Server, reference: Path, tmp_path: Path) -> None:
    """Not our own doing, as above: the system lets files grow to 2500 bytes, which is too little for the optimizer."""
    output = tmp_path / "run"
    with pytest.raises(Stopped):
        make_trainer(settings(output, toy__events={"9": "SIGTERM"})).run()
    assert (output / "checkpoints" / "step-00000005" / "optimizer.safetensors").stat().st_size > 2500
    forked = server.start(settings(output, toy__file_limit=2500))
    assert forked.wait() == 1, forked.printed
    assert "error: no space left on the disk for" in forked.printed
    assert "Traceback" not in forked.printed
    assert steps_of(output) == [5]
    make_trainer(settings(output)).run()
    assert_same_run(output, reference)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_disk_full_while_metrics_are_written(reference: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with pytest.raises(Stopped):
        make_trainer(settings(output, toy__events={"9": "SIGTERM"})).run()
    lines = (output / "metrics.jsonl").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inlinevit.engine.logger.RunLogger._drop_repeated_lines", use_the_full_device)
        with pytest.raises(OSError, match=r"^no space left on the disk for .*full: free some"):
            make_trainer(settings(output)).run()
    assert (output / "metrics.jsonl").read_text() == lines
    make_trainer(settings(output)).run()
    assert_same_run(output, reference)


def use_the_full_device(log: Any) -> None:
    log.file = Path("/dev/full")


def test_disk_full_at_the_end(reference: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"

    def write(path: Path, content: bytes) -> None:
        if "model.safetensors" in path.name:
            write_on_a_full_disk(path, content)
        written(path, content)

    written = files.write_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_bytes", write)
        with pytest.raises(OSError, match=r"^no space left on the disk for .*model\.safetensors: free some"):
            make_trainer(settings(output)).run()
    assert not list(output.glob("*model.safetensors*")) + list(output.glob(".model*"))
    make_trainer(settings(output)).run()
    assert_same_run(output, reference)


# NaN and infinity


@pytest.mark.parametrize(
    ("event", "message"),
    [("nan", "the loss is nan"), ("infinite gradient", r"the norm of the gradients is (nan|inf) \(loss")],
)
def test_run_stops_at_a_step_that_is_not_finite(tmp_path: Path, event: str, message: str) -> None:
    output = tmp_path / "run"
    # The 8th batch is the second one of step 4.
    with pytest.raises(Diverged, match=rf"{message}.* in step 4 \(learning rate .*, largest weight .*\): weights and"):
        make_trainer(settings(output, toy__events={"8": event}, run__log_every=1)).run()
    folder = output / "diverged-step-4-process-0"
    report = json.loads((folder / "report.json").read_text())
    assert report["step"] == 4
    # The 4th step of a warm-up of 6 begins after 3.
    assert report["lr"] == pytest.approx(5e-7 + (0.02 - 5e-7) * 3 / 6)
    assert report["weights_not_finite"] == []
    assert report["batch"][0]["shape"] == [4, 6]
    assert report["batch"][0]["finite"] is True
    inputs, labels = torch.load(folder / "batch.pt", weights_only=True)
    assert inputs.shape == (4, 6)
    assert labels.shape == (4,)
    model = Mlp(0.0, batch_norm=True)
    model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    assert report["largest_weight"] == max(float(value.abs().max()) for value in model.state_dict().values())


@pytest.mark.parametrize("log_every", [3, 4, 50])
def test_divergence_is_found_within_log_every_steps(tmp_path: Path, log_every: int) -> None:
    """The checkpoint of step 5 would have bad weights: it is not written."""
    output = tmp_path / "run"
    changes = {"run__log_every": log_every, "run__checkpoint_steps": None if log_every == 3 else 5}
    # The 7th batch is the first one of step 4; the 6th step ends the epoch.
    trainer = make_trainer(settings(output, toy__events={"7": "nan"}, **changes))
    with pytest.raises(
        Diverged, match=r"the loss is nan in step 4 \(learning rate .*, .* [1-9] of \d+ weights not finite"
    ):
        trainer.run()
    assert trainer.progress.step == (6 if log_every == 3 else 5)
    assert steps_of(output) == []
    folder = output / "diverged-step-4-process-0"
    report = json.loads((folder / "report.json").read_text())
    assert (report["step"], report["weights_after_step"]) == (4, trainer.progress.step)
    assert report["lr"] == pytest.approx(5e-7 + (0.02 - 5e-7) * 3 / 6)
    inputs, labels = torch.load(folder / "batch.pt", weights_only=True)
    expected = next(make_trainer(settings(tmp_path / "other")).data.batches(0, 6))
    assert torch.equal(inputs, expected[0])
    assert torch.equal(labels, expected[1])
    if log_every == 3:
        assert [line["step"] for line in metric_lines(output)] == [3]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """Without clipping, an infinite gradient shows in the weights first: the loss of its step is finite."""
    changes: dict[str, Any] = {"optimizer__clip_grad": None, "run__checkpoint_steps": 2}
    with pytest.raises(Diverged, match="a weight is NaN or infinite in step 4"):
        make_trainer(settings(tmp_path / "run", toy__events={"8": "infinite gradient"}, **changes)).run()
    assert steps_of(tmp_path / "run") == [2]


class CountReads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_from_the_device(tmp_path: Path) -> None:
    trainer = make_trainer(settings(tmp_path / "run", optimizer__name="sgd", run__log_every=50))
    batches = iter(list(trainer.data.batches(0, 0)))
    with CountReads() as counter:
        for step in range(3):
            numbers = trainer.train_step(step, batches)
        assert counter.reads == 0
        numbers.tolist()
        numbers.sum().item()
        assert counter.reads > 0


def test_each_step_draws_numbers_of_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(settings(tmp_path / "run"))
    batches = list(trainer.data.batches(0, 0))
    drawn = []
    for step in (0, 1, 0):
        trainer.train_step(step, iter(batches))
        drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[2]
    assert all(a != b for a, b in zip(drawn[0], drawn[1], strict=True))


# Averaged weights and precision


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_averaged_weights_are_what_is_evaluated(tmp_path: Path, precision: str) -> None:
    output = tmp_path / "run"
    trainer = make_trainer(settings(output, run__precision=precision))
    metrics = trainer.run()
    samples = ToySamples(7, (6,), augment=False)

    def error(weights: dict[str, torch.Tensor]) -> float:
        model = Mlp(0.0, batch_norm=True).eval()
        model.load_state_dict(weights)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(samples.inputs)
        return nn.functional.cross_entropy(logits.float(), samples.labels).item()

    tensors = final_tensors(output)
    average = {name[4:]: value for name, value in tensors.items() if name.startswith("ema ")}
    weights = {name[6:]: value for name, value in tensors.items() if name.startswith("model ")}
    # In half precision, how samples are put into batches shows in the last bits.
    tolerance = 1e-6 if precision == "no" else 1e-3
    assert metrics["error"] == pytest.approx(error(average), abs=tolerance)
    assert abs(metrics["error"] - error(weights)) > 10 * tolerance
    assert trainer.ema is not None
    assert trainer.ema.module is not trainer.unwrapped_model


def test_average_follows_its_decay(tmp_path: Path) -> None:
    trainer = make_trainer(settings(tmp_path / "run", run__ema_decay=0.9, schedule__epochs=1))
    seen: list[torch.Tensor] = []
    step = trainer.train_step

    def watched(*arguments: Any) -> float:
        loss = step(*arguments)
        seen.append(trainer.unwrapped_model.fc1.weight.detach().clone())  # type: ignore[union-attr]
        return loss

    trainer.train_step = watched  # type: ignore[method-assign]
    trainer.run()
    # timm's average begins to average with the third step.
    expected = seen[1]
    for weights in seen[2:]:
        expected = 0.9 * expected + 0.1 * weights
    torch.testing.assert_close(final_tensors(tmp_path / "run")["export fc1.weight"], expected)


def test_precision_changes_the_numbers_and_two_trainers_get_along(tmp_path: Path) -> None:
    """They share accelerate's state, which the second sets anew."""
    plain = {
        name: settings(tmp_path / name, run__precision=name, run__grad_accum_steps=grad_accum_steps)
        for name, grad_accum_steps in (("no", 2), ("bf16", 1))
    }
    for name in plain:
        make_trainer({**plain[name], "run": {**plain[name]["run"], "output": str(tmp_path / f"{name} alone")}}).run()
    for name in plain:
        make_trainer(plain[name]).run()
        assert_same_run(tmp_path / name, tmp_path / f"{name} alone")
    full, half = (final_tensors(tmp_path / name)["model fc1.weight"] for name in plain)
    assert not torch.equal(full, half)


@pytest.mark.parametrize("grad_accum_steps", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_accumulated_batches_count_as_one(tmp_path: Path, grad_accum_steps: int) -> None:
    """The loss of a step, and the weights after it, are those of one batch of all samples."""
    even = {"toy__dropout": 0.0, "toy__batch_norm": False, "toy__samples": 48}
    make_trainer(settings(tmp_path / "one", run__grad_accum_steps=1, toy__batch_size=8, **even)).run()
    size = 8 // grad_accum_steps
    make_trainer(settings(tmp_path / "run", run__grad_accum_steps=grad_accum_steps, toy__batch_size=size, **even)).run()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    ours, theirs = final_tensors(tmp_path / "run"), final_tensors(tmp_path / "one")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


def deit(output: Path, **changes: Any) -> dict[str, Any]:
    """A run of our smallest model."""
    return settings(output, toy__model="inline_deit_tiny", schedule__epochs=1, optimizer__lr=1e-3, **changes)


def test_checkpointed_gradients_are_the_same(tmp_path: Path) -> None:
    make_trainer(deit(tmp_path / "plain")).run()
    trainer = make_trainer(deit(tmp_path / "run", run__grad_checkpointing=True))
    assert any(getattr(module, "grad_checkpointing", False) for module in trainer.unwrapped_model.modules())
    trainer.run()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-6)


def test_model_that_cannot_checkpoint_gradients(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.grad_checkpointing: Mlp cannot do so, train it without"):
        make_trainer(settings(tmp_path / "run", run__grad_checkpointing=True))
    # timm's have the method, but it refuses.
    with pytest.raises(ValueError, match=r"run\.grad_checkpointing: VGG cannot do so, train it without"):
        enable_grad_checkpointing(timm.create_model("vgg11", device="meta"))


@pytest.mark.slow
def test_compiled_model_gives_the_same(tmp_path: Path) -> None:
    make_trainer(deit(tmp_path / "plain")).run()
    make_trainer(deit(tmp_path / "run", run__compile=True)).run()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    assert final_tensors(tmp_path / "run").keys() == final_tensors(tmp_path / "plain").keys()


def test_learning_rate_of_the_log_is_that_of_the_head(tmp_path: Path) -> None:
    make_trainer(deit(tmp_path / "run", optimizer__layer_decay=0.5, schedule__warmup=0, run__log_every=1)).run()
    assert metric_lines(tmp_path / "run")[0]["lr"] == pytest.approx(1e-3)


def test_loss_is_a_number_everywhere(tmp_path: Path) -> None:
    trainer: Trainer = make_trainer(settings(tmp_path / "run", run__log_every=1))
    trainer.run()
    assert len(losses(tmp_path / "run")) == 24
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "run"))
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


@pytest.mark.parametrize("decay", [None, 0.9])
def test_parameters_stay_where_they_are_defined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decay) -> None:
    """The coefficients of MHLA are in [0, 1] after each step, in the model and in its EMA copy."""
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    monkeypatch.setitem(MODELS, "mhla_deit_tiny", options)
    trainer = make_trainer(
        settings(
            tmp_path / "run", toy__model="mhla_deit_tiny", optimizer__lr=0.2, schedule__warmup=0, run__ema_decay=decay
        )
    )
    reached: list[tuple[float, float]] = []
    original = trainer.train_step

    def train_step(*args: Any) -> torch.Tensor:
        numbers = original(*args)
        mixing = trainer.unwrapped_model.stages[0].blocks[0].attn.mixing.detach()
        reached.append((float(mixing.min()), float(mixing.max())))
        return numbers

    monkeypatch.setattr(trainer, "train_step", train_step)
    trainer.run()
    assert len(reached) == 24
    assert all(least >= 0 and most <= 1 for least, most in reached)
    # Steps are so long that they would leave.
    assert reached[-1] == (0, 1)
    for name, tensor in final_tensors(tmp_path / "run").items():
        if name.endswith("mixing"):
            assert tensor.min() >= 0
            assert tensor.max() <= 1

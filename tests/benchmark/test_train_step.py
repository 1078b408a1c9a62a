"""The processor time of training steps."""

import time

import pytest
import torch
from rich.console import Console

from inlinevit.benchmark.report import print_results, write_report
from inlinevit.benchmark.results import Measurement, Results, read_results
from inlinevit.benchmark.tables import step_table
from inlinevit.benchmark.timing import Quartiles, interleave
from inlinevit.benchmark.train_step import make_model, make_step, measure_steps
from inlinevit.engine.config import config_from_dict
from inlinevit.recipes import load_recipe
from inlinevit.tasks.classification.config import ClassificationConfig

TINY = {"depth": 1, "embed_dim": 8, "num_heads": 2}


def test_attentions_are_measured_in_alternation_and_recorded(tmp_path):
    results = measure_steps("cifar10", ["inline", "softmax"], ["eager"], rounds=2, kwargs=TINY)
    names = [one.name for one in results.measurements]
    assert names == ["inline_deit_tiny:attention=inline", "inline_deit_tiny:attention=softmax"]
    for one in results.measurements:
        assert 0 < one.seconds.low <= one.seconds.median <= one.seconds.high
        assert one.first_seconds is None
        assert (one.size, one.batch, one.rounds) == (32, 64, 2)
    write_report(results, tmp_path, "step")
    assert read_results(tmp_path / "step.json")[0] == results


def test_a_step_changes_all_weights():
    config = config_from_dict(ClassificationConfig, load_recipe("cifar10", "classification"))
    config.model.kwargs |= TINY
    model = make_model(config, "inline")
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    make_step(config, model, torch.randn(4, 3, 32, 32), compiled=False)()
    assert [name for name, one in model.named_parameters() if torch.equal(one, before[name])] == []


def test_unknown_modes_are_refused():
    with pytest.raises(ValueError, match="there is no mode openvino: choose among eager, compiled"):
        measure_steps("cifar10", ["inline"], ["openvino"])


def made(attention: str, mode: str, milliseconds: float, first: float | None = None) -> Measurement:
    seconds = Quartiles(*[milliseconds / 1000] * 3)
    name = f"inline_deit_tiny:attention={attention}"
    return Measurement("a", name, mode, 32, 64, seconds, 5, 1e9, None, 1e11, first_seconds=first)


def test_the_table_says_when_compilation_pays(capsys):
    found = [
        made("inline", "eager", 90),
        made("inline", "compiled", 80, 50),
        made("softmax", "eager", 100),
        made("softmax", "compiled", 110, 30),
    ]
    machine = {"processor": "A Processor", "cores": 4, "memory": 2**33, "load": 0.5, "gemm_rate": 1e11}
    results = Results("step", {"recipe": "cifar10", "threads": 1, "backward": True}, machine, found, [])
    rows = [row[1:] for row in step_table(results).rows]
    assert rows[0] == ("eager", "90.0", "0.90", "–", "–")
    assert rows[1] == ("compiled", "80.0", "0.73", "50", "5,000")
    assert rows[3] == ("compiled", "110", "1.00", "30", "never")
    print_results(results, Console())
    assert "Training steps, float32, 1 thread of A Processor" in capsys.readouterr().out


def test_processor_time_does_not_count_waiting():
    times = interleave({"sleep": lambda: time.sleep(0.05)}, rounds=2, warmup=0, processor_time=True)
    assert max(times["sleep"]) < 0.04

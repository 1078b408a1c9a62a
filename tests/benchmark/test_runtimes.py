"""The runtimes that candidates are compared in."""

import inspect
import time

import pytest
import torch
from torch import nn

from inlinevit.benchmark import machine, runtimes
from inlinevit.benchmark.candidates import model_comparisons, parse_modes
from inlinevit.benchmark.measure import Conditions, measure
from inlinevit.benchmark.runtimes import MODES, Mode
from inlinevit.benchmark.studies import run_bench
from inlinevit.benchmark.timing import interleave
from inlinevit.benchmark.workload import Candidate, Comparison, draw_input, draw_weights
from inlinevit.export.blocks import convert_model
from inlinevit.models.inference import optimize_for_inference

QUICK = Conditions(threads=1, rounds=2, patience=0.1)
TINY = "inline_deit_tiny:embed_dim=16,depth=1,num_heads=2,num_classes=5"
OTHERS = [name for name, mode in MODES.items() if mode.packages]
# Exported models take images.
ANY_INPUT = [name for name in OTHERS if not name.startswith("exported")]
CPU = torch.device("cpu")

# They need the runtimes, which the fast tests hide (tests/conftest.py).
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    """Fast matrix products."""
    monkeypatch.setattr(machine, "GEMM_SIDE", 8)


class Transposed(nn.Module):
    """From (batch, channels, N) to (batch, N, channels)."""

    def forward(self, x):
        return x.transpose(1, 2)


def mlp(width=32, mode=""):
    """A module and its input: 16 tokens, or for modes that export an image of 16 patches, which become tokens."""
    layers = [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)]
    if mode in ANY_INPUT or not mode:
        return draw_weights(nn.Sequential(*layers)).eval(), draw_input(16, width, device=CPU)
    patches = [nn.Conv2d(3, width, 16, stride=16), nn.Flatten(2), Transposed()]
    return draw_weights(nn.Sequential(*patches, *layers)).eval(), draw_input(1, 3, 64, 64, device=CPU)


def mlp_candidate(name="mlp", width=32):
    return Candidate(name, width, lambda device: mlp(width))


def test_a_small_model_is_measured_in_all_other_runtimes(monkeypatch):
    recorded = []
    monkeypatch.setattr(runtimes, "convert_model", lambda *args: recorded.append(args) or convert_model(*args))
    results = measure("model", model_comparisons([TINY], [64], [1]), OTHERS, QUICK)
    assert results.notes == []
    found = [(one.mode, one.runtime, one.precision) for one in results.measurements]
    assert found == [
        ("openvino", "openvino", "float32"),
        ("openvino-int8", "openvino", "int8"),
        ("onnxruntime", "onnxruntime", "float32"),
        ("onnxruntime-int8", "onnxruntime", "int8"),
        ("exported-onnxruntime", "onnxruntime", "float32"),
        ("exported-onnxruntime-int8", "onnxruntime", "int8"),
        ("exported-openvino", "openvino", "float32"),
        ("exported-openvino-int8", "openvino", "int8"),
    ]
    # Once for the four modes that use the file.
    assert len(recorded) == 1
    for one in results.measurements:
        assert one.seconds.median > 0
        assert one.memory is None
        assert (one.cosine is None) == (one.precision == "float32")
    for one in results.measurements:
        assert one.cosine is None or one.cosine > MODES[one.mode].min_cosine


@pytest.mark.parametrize("mode", ANY_INPUT)
def test_modules_with_several_outputs(mode):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x), 2 * x

    module, x = draw_weights(Two()).eval(), draw_input(4, 8, device=CPU)
    first, second = MODES[mode].prepare(module, x, 1)()
    torch.testing.assert_close(second, 2 * x, rtol=0.05, atol=0.05)
    assert first.shape == (4, 8)


@pytest.mark.skipif(
    "dtype" not in inspect.signature(optimize_for_inference).parameters, reason="int8 is not part of the package yet"
)
def test_optimized_int8_is_close_to_float32():
    results = measure("model", model_comparisons([TINY], [32], [1]), ["optimized-int8"], QUICK)
    (one,) = results.measurements
    assert one.cosine > 0.99


@pytest.mark.parametrize(("mode", "packages"), [("openvino-int8", "openvino and nncf"), ("onnxruntime", "onnxruntime")])
def test_a_missing_package_is_reported_before_any_work(monkeypatch, mode, packages):
    absent = packages.split(" and ")
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None if name in absent else "found")

    def fail(device):
        raise AssertionError

    comparison = Comparison("t", 1, [Candidate("a", 1, fail)])
    with pytest.raises(ValueError, match=rf"mode {mode} needs {packages}: pip install 'inlinevit\[bench\]'"):
        measure("test", [comparison], ["eager", mode], QUICK)


def test_defaults_leave_out_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None)
    monkeypatch.setattr(runtimes, "optimize_for_inference", lambda module: module)
    options = {"models": [TINY], "sizes": [32], "batches": [1], "threads": 1, "rounds": 2, "patience": 0.1}
    monkeypatch.setitem(MODES, "compiled", MODES["eager"])
    results = run_bench("model", **options)
    assert [one.mode for one in results.measurements] == ["eager", "compiled", "optimized"]
    assert results.notes == ["mode openvino needs openvino: pip install 'inlinevit[bench]'"]
    with pytest.raises(ValueError, match="mode openvino needs openvino"):
        run_bench("model", modes=["openvino"], **options)


@pytest.mark.parametrize("mode", ["openvino", "optimized"])
def test_runtimes_without_gradients_are_refused_for_training(mode):
    with pytest.raises(ValueError, match=f"mode {mode} is for inference, not for --backward: leave it out"):
        run_bench("model", models=[TINY], sizes=[32], batches=[1], modes=[mode], backward=True)


def test_other_runtimes_run_on_the_cpu():
    assert runtimes.refusal("openvino", device="cuda", backward=False).startswith("mode openvino runs on the CPU")
    assert not runtimes.refusal("compiled", device="cuda", backward=True)


@pytest.mark.parametrize("mode", OTHERS)
def test_what_cannot_be_converted_is_left_out_with_a_note(mode):
    class Stubborn(nn.Linear):
        def forward(self, x):
            if torch.jit.is_tracing() or torch.compiler.is_compiling():
                raise TypeError("no\nthank you")
            return super().forward(x)

    candidate = Candidate("a", 4, lambda device: (draw_weights(Stubborn(4, 4)), draw_input(3, 4, device=device)))
    results = measure("test", [Comparison("t", 3, [candidate])], ["eager", mode], QUICK)
    assert [one.mode for one in results.measurements] == ["eager"]
    (note,) = results.notes
    assert note.startswith(f"t: a ({mode}) is left out: it cannot be converted to O")
    assert "\n" not in note


def test_a_runtime_with_other_outputs_is_refused(monkeypatch):
    def prepare(factor):
        return lambda module, x, threads: lambda: factor * module(x).roll(1, dims=-1)

    comparisons = [Comparison("t", 16, [mlp_candidate()])]
    monkeypatch.setitem(MODES, "openvino", Mode("openvino", prepare(1)))
    with pytest.raises(ValueError, match=r"mlp \(eager\) and mlp \(openvino\) should agree, but differ by"):
        measure("test", comparisons, ["eager", "openvino"], QUICK)
    for factor in (1, float("nan")):
        monkeypatch.setitem(MODES, "openvino-int8", Mode("openvino", prepare(factor), "int8"))
        # Whether or not float32 is measured, too.
        for modes in (["openvino-int8"], ["openvino-int8", "eager"]):
            with pytest.raises(ValueError, match=r"mlp \(eager\) and mlp \(openvino-int8\) should .* a cosine of"):
                measure("test", comparisons, modes, QUICK)


def test_models_may_name_their_modes():
    assert parse_modes(["a@eager", "b", "a@openvino-int8"]) == {"a": ["eager", "openvino-int8"], "b": None}
    first, second = model_comparisons(["resnet18@onnxruntime", TINY], [32], [1])[0].candidates
    assert (first.name, first.modes) == ("resnet18", ["onnxruntime"])
    assert (second.name, second.modes) == (TINY, None)
    results = measure("model", model_comparisons([f"{TINY}@eager"], [32], [1]), ["compiled"], QUICK)
    assert [(one.name, one.mode) for one in results.measurements] == [(TINY, "eager")]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["resnet18@egaer"], "there is no mode 'egaer': did you mean eager?"),
        (["resnet18", "resnet18@eager"], "resnet18 is also given without a mode"),
        (["resnet18@eager", "resnet18"], "resnet18 is also given with a mode"),
    ],
)
def test_wrong_modes_of_models_are_refused(models, message):
    with pytest.raises(ValueError, match=message):
        parse_modes(models)


def test_conversion_is_silent(capfd):
    for mode in OTHERS:
        module, x = mlp(mode=mode)
        MODES[mode].prepare(module, x, 1)()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("mode", OTHERS)
def test_no_thread_is_busy_between_calls(mode):
    """A spinning thread would take the core of the next candidate."""
    module, x = mlp(256, mode)
    call = MODES[mode].prepare(module, x, 2)
    idle = busy = 0.0
    for _ in range(50):
        call()
        before, started = time.process_time(), time.perf_counter()
        time.sleep(0.005)
        busy += time.process_time() - before
        idle += time.perf_counter() - started
    assert busy < 0.2 * idle


@pytest.mark.slow
@pytest.mark.parametrize("mode", OTHERS)
def test_the_time_of_a_candidate_does_not_depend_on_its_neighbour(mode):
    module, x = mlp(512, mode)
    eager, neighbour = (MODES[name].prepare(module, x, 2) for name in ("eager", mode))
    options = {"rounds": 100, "rehearse_below": 0.1}
    alone, beside = [], []
    # Alternating, so that other load affects both alike.
    for _ in range(3):
        alone += interleave({"eager": eager}, **options)["eager"]
        beside += interleave({"eager": eager, "neighbour": neighbour}, **options)["eager"]
    assert sorted(beside)[len(beside) // 4] < 1.5 * sorted(alone)[len(alone) // 4]

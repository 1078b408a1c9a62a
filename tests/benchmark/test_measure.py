"""What is compared can be compared: outputs agree, operations and memory are counted, limits are kept."""

from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from inlinevit.benchmark import machine, runtimes
from inlinevit.benchmark import measure as measure_module
from inlinevit.benchmark.candidates import OnGrid, layer_comparisons, model_comparisons
from inlinevit.benchmark.measure import TOLERANCE, Conditions, Limits, measure
from inlinevit.benchmark.results import Measurement, Results
from inlinevit.benchmark.runtimes import MODES, Mode
from inlinevit.benchmark.timing import Quartiles
from inlinevit.benchmark.workload import Candidate, Comparison, draw_input, draw_weights, nominal_flops
from inlinevit.layers import InLineAttention
from inlinevit.models import catalog

QUICK = Conditions(threads=1, rounds=2, patience=0.1)
TINY = "inline_deit_tiny:embed_dim=16,depth=2,num_heads=2,num_classes=5"


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    """Fast matrix products."""
    monkeypatch.setattr(machine, "GEMM_SIDE", 8)


def mode_of(wrap):
    """A mode that runs what `wrap` makes of a module."""

    def prepare(module, x, threads):
        wrapped = wrap(module)
        return lambda: wrapped(x)

    return Mode("other", prepare, has_gradients=True)


def linear_candidate(name, factor=1.0, group="", width=4):
    def make(device):
        layer = nn.Linear(width, width)
        draw_weights(layer)
        with torch.no_grad():
            layer.weight *= factor
        return layer, draw_input(3, width, device=device)

    return Candidate(name, width, make, group)


def test_all_candidates_are_measured_in_all_modes(monkeypatch):
    monkeypatch.setitem(MODES, "other", mode_of(lambda module: module))
    comparisons = [
        Comparison("first", 3, [linear_candidate("a"), linear_candidate("b", 2.0)]),
        Comparison("last", 3, []),
    ]
    results = measure("test", comparisons, ["eager", "other"], QUICK, colour="red")
    assert [(one.comparison, one.name, one.mode) for one in results.measurements] == [
        ("first", "a", "eager"),
        ("first", "a", "other"),
        ("first", "b", "eager"),
        ("first", "b", "other"),
    ]
    for one in results.measurements:
        assert 0 < one.seconds.low <= one.seconds.median <= one.seconds.high
        assert one.flops == 2 * 3 * 4 * 4
        assert one.memory == 3 * 4 * 4
        assert one.gemm_rate > 0
    assert results.settings["colour"] == "red"
    assert results.settings["threads"] == 1
    assert results.machine["gemm_rate"] > 0


def test_threads_are_pinned_and_given_back():
    seen = []

    class Recorder(nn.Linear):
        def forward(self, x):
            seen.append(torch.get_num_threads())
            return super().forward(x)

    before = torch.get_num_threads()
    candidate = Candidate("a", 4, lambda device: (Recorder(4, 4), draw_input(3, 4, device=device)))
    measure("test", [Comparison("t", 3, [candidate])], ["eager"], Conditions(threads=before + 1, rounds=2))
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before


def test_outputs_of_one_group_must_agree():
    measure(
        "test",
        [Comparison("t", 3, [linear_candidate("a", group="k"), linear_candidate("b", group="k")])],
        ["eager"],
        QUICK,
    )
    wrong = linear_candidate("b", 1 + 10 * TOLERANCE, group="k")
    with pytest.raises(ValueError, match=r"outputs of a \(eager\) and b \(eager\) should agree, but differ by 0\.00"):
        measure("test", [Comparison("t", 3, [linear_candidate("a", group="k"), wrong])], ["eager"], QUICK)


@pytest.mark.parametrize("wrong", [float("nan"), 2.0])
def test_a_mode_with_other_outputs_is_refused(monkeypatch, wrong):
    class Wrong(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return wrong * self.module(x)

    monkeypatch.setitem(MODES, "wrong", mode_of(Wrong))
    with pytest.raises(ValueError, match=r"a \(eager\) and a \(wrong\) should agree"):
        measure("test", [Comparison("t", 3, [linear_candidate("a")])], ["eager", "wrong"], QUICK)


def test_wrong_gradients_are_refused(monkeypatch):
    class WrongGradient(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            out = self.module(x)
            return 2 * out - out.detach()

    monkeypatch.setitem(MODES, "wrong", mode_of(WrongGradient))
    comparisons = [Comparison("t", 3, [linear_candidate("a")])]
    measure("test", comparisons, ["eager", "wrong"], QUICK)
    with pytest.raises(ValueError, match="should agree"):
        measure("test", comparisons, ["eager", "wrong"], Conditions(threads=1, rounds=2, backward=True))


def test_a_broken_path_is_refused(monkeypatch):
    comparisons = layer_comparisons(tokens=[16], dim=8, heads=2, batch=2)
    measure("layer", comparisons, ["eager"], QUICK)
    right = InLineAttention.attend_folded
    monkeypatch.setattr(
        InLineAttention,
        "attend_folded",
        lambda self, x, size, kernel_tokens: 1.01 * right(self, x, size, kernel_tokens),
    )
    with pytest.raises(ValueError, match=r"InLine.* and InLine.* should agree, but differ by"):
        measure("layer", comparisons, ["eager"], QUICK)


def test_a_path_that_does_not_apply_is_left_out_with_a_note():
    def refuse(device):
        layer = draw_weights(InLineAttention(8, 2, feature_map="relu"))
        layer.path = "folded"
        return OnGrid(layer, 3), draw_input(1, 9, 8, device=device)

    forced = Candidate("forced", 9, refuse, is_optional=True)
    results = measure("test", [Comparison("t", 1, [linear_candidate("a"), forced])], ["eager"], QUICK)
    assert [one.name for one in results.measurements] == ["a"]
    (note,) = results.notes
    assert note.startswith("t: forced is left out: path 'folded' is not possible here")
    with pytest.raises(ValueError, match="not possible"):
        measure("test", [Comparison("t", 1, [Candidate("forced", 9, refuse)])], ["eager"], QUICK)


def test_what_takes_too_long_or_too_much_memory_is_left_out(monkeypatch):
    limits = Limits(2.0, torch.device("cpu"), rate=100.0)
    candidate = linear_candidate("a")
    assert limits.exceeded(candidate, 90, 90) == ""
    assert limits.exceeded(candidate, 110, 110) == "a call would take about 2.2 s, and 2 s are allowed"
    assert "4.0 times the work" in limits.exceeded(candidate, 10, 40)
    monkeypatch.setattr(measure_module, "free_memory", lambda device: 10e9)
    limits.learn(candidate, 10, int(1e9))
    assert limits.exceeded(candidate, 60, 60) == ""
    assert limits.exceeded(candidate, 80, 80) == "a call would need about 8 GB of memory, and 7 GB are free for it"
    assert limits.exceeded(linear_candidate("b"), 80, 80) == ""


def test_if_all_is_left_out_the_reason_is_reported():
    comparisons = model_comparisons([TINY], [32], [1])
    with pytest.raises(ValueError, match=r"nothing could be measured: 32², batch 1: inline_deit.* would take about"):
        measure("model", comparisons, ["eager"], Conditions(longest_call=0.0))


def test_backward_counts_three_passes():
    comparisons = model_comparisons([TINY], [32], [1])
    forward = measure("model", comparisons, ["eager"], QUICK).measurements
    both = measure("model", comparisons, ["eager"], Conditions(threads=1, rounds=2, backward=True)).measurements
    assert both[0].flops == 3 * forward[0].flops
    assert both[0].memory > forward[0].memory


def test_stochastic_depth_and_dropout_are_off():
    comparisons = model_comparisons([f"{TINY},drop_path_rate=0.5,proj_drop_rate=0.5,drop_rate=0.5"], [32], [2])
    measure("model", comparisons, ["eager", "eager"], Conditions(threads=1, rounds=2, backward=True))


def test_optimized_takes_models_of_this_package_only(monkeypatch):
    taken = []
    monkeypatch.setattr(runtimes, "optimize_for_inference", lambda model: taken.append(type(model)) or model)
    results = measure("model", model_comparisons([TINY, "resnet18"], [32], [1]), ["eager", "optimized"], QUICK)
    names = [(one.name.partition(":")[0], one.mode) for one in results.measurements]
    assert names == [("inline_deit_tiny", "eager"), ("inline_deit_tiny", "optimized"), ("resnet18", "eager")]
    assert [kind.__name__ for kind in taken] == ["InLineDeiT"]


@pytest.mark.slow
def test_optimized_models_are_measured():
    comparisons = model_comparisons([TINY, "resnet18"], [32], [1])
    results = measure("model", comparisons, ["eager", "optimized"], QUICK)
    names = [(one.name.partition(":")[0], one.mode) for one in results.measurements]
    assert names == [("inline_deit_tiny", "eager"), ("inline_deit_tiny", "optimized"), ("resnet18", "eager")]


@pytest.mark.integration
def test_compiled_modules_agree_and_have_a_memory():
    results = measure("test", [Comparison("t", 3, [linear_candidate("a", width=64)])], ["eager", "compiled"], QUICK)
    assert [one.mode for one in results.measurements] == ["eager", "compiled"]
    assert [one.memory for one in results.measurements] == [3 * 64 * 4] * 2


def test_operations_are_those_of_the_catalog():
    model = timm.create_model("pvt_tiny", device="meta")
    flops = nominal_flops(model, torch.empty(2, 3, 224, 224))
    assert flops == pytest.approx(2 * 2e9 * catalog.measure_by_name("pvt_tiny")[1])


def test_operations_do_not_depend_on_the_path():
    x = torch.empty(1, 400, 32)
    counts = set()
    for path in (None, "explicit", "folded"):
        layer = InLineAttention(32, 2)
        layer.path = path
        counts.add(nominal_flops(OnGrid(layer, 20), x))
        assert layer.path == path
    assert len(counts) == 1


def test_weights_are_the_same_each_time_and_attention_counts(monkeypatch):
    model, again = (draw_weights(timm.create_model("inline_deit_tiny", depth=3)).eval() for _ in range(2))
    x = draw_input(1, 3, 224, 224, device=torch.device("cpu"))
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(expected, again(x))
        for module in model.modules():
            if isinstance(module, InLineAttention):
                # Queries a tenth too large: an error of attention alone.
                module.qkv.weight[: module.dim] *= 1.1
        assert (model(x) - expected).abs().max() > 100 * TOLERANCE * expected.abs().max()


def test_invalid_conditions_are_refused():
    with pytest.raises(ValueError, match="threads is 0: it should be at least 1"):
        Conditions(threads=0)
    with pytest.raises(ValueError, match="rounds is 1"):
        Conditions(rounds=1)
    with pytest.raises(ValueError, match="device is tpu: it should be cpu or cuda"):
        Conditions(device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="there is no GPU for device cuda: use device cpu"):
            Conditions(device="cuda")


def test_the_best_mode_of_each():
    def one(name, mode, median):
        return Measurement("t", name, mode, 1, 1, Quartiles(0, median, 9), 2, 1, 1, 1)

    found = [one("a", "eager", 3), one("a", "compiled", 2), one("b", "eager", 1), one("b", "compiled", 2)]
    found.append(replace(one("a", "openvino-int8", 1), precision="int8"))
    best = Results("test", {}, {}, found, []).best
    assert [(x.name, x.mode) for x in best] == [("a", "compiled"), ("b", "eager"), ("a", "openvino-int8")]

"""The benchmarks of `inlinevit bench`."""

import inspect
import re

import pytest

from inlinevit.benchmark import candidates, machine, studies
from inlinevit.benchmark.options import ALL_MODES, ATTENTION_MODELS, BENCHES, FAMILIES, OPTIONS_HELP
from inlinevit.benchmark.runtimes import MODES
from inlinevit.benchmark.studies import COMPARISONS, published_top1, run_bench
from inlinevit.layers import ATTENTIONS
from inlinevit.models.catalog import CATALOG
from tests import slow_except

TINY = "inline_deit_tiny:embed_dim=16,depth=1,num_heads=2,num_classes=5"


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    """Fast matrix products."""
    monkeypatch.setattr(machine, "GEMM_SIDE", 8)


@pytest.mark.parametrize("what", slow_except(BENCHES, "layer"))
def test_defaults_make_comparisons(what):
    bench = BENCHES[what]
    for options in (bench.options, {**bench.options, **bench.quick}):
        own = {name: value for name, value in options.items() if name != "modes"}
        assert set(own) == set(inspect.signature(COMPARISONS[what]).parameters)
        comparisons = COMPARISONS[what](**own)
        assert len({one.title for one in comparisons}) == len(comparisons)
        assert all(one.candidates for one in comparisons)
        assert set(options["modes"]) <= set(bench.modes) <= set(MODES)
    assert set(bench.quick) <= set(bench.options) <= set(OPTIONS_HELP)


def test_every_published_inline_model_is_in_a_family():
    models = [model for pairs in FAMILIES.values() for pair in pairs.items() for model in pair if model]
    assert len(models) == len(set(models))
    for name, facts in CATALOG.items():
        is_baseline = name.endswith("_deit_tiny") and not name.startswith("inline_")
        if facts.top1 is not None and not name.endswith("_384") and not is_baseline:
            assert name in models
    assert all(70 < published_top1(model) < 86 for model in models)


def test_models_are_compared_at_the_size_of_their_accuracy():
    comparisons = studies.accuracy_comparisons(["deit"], [1])
    sizes = {candidate.name: candidate.size for one in comparisons for candidate in one.candidates}
    expected = {
        "inline_deit_tiny": 224,
        "deit_tiny_patch16_224": 224,
        "inline_deit_small": 288,
        "inline_deit_base": 448,
    }
    assert sizes == expected


def test_the_window_study_has_one_comparison(monkeypatch):
    monkeypatch.setattr(candidates, "require_memory_for_model", lambda *_: None)
    (comparison,) = studies.window_comparisons([14, 7], [1])
    assert [candidate.name for candidate in comparison.candidates] == [
        "inline_swin_tiny:window_size=14",
        "inline_swin_tiny:window_size=7",
        "swin_tiny_patch4_window7_224:window_size=14",
        "swin_tiny_patch4_window7_224:window_size=7",
    ]


def test_options_override_what_is_quick_and_that_the_defaults():
    results = run_bench("model", quick=True, models=[TINY], sizes=[32], threads=1, rounds=2, modes=["eager"])
    assert results.settings["rounds"] == 2
    assert [one.batch for one in results.measurements] == BENCHES["model"].quick["batches"]
    assert {(one.name, one.size, one.mode) for one in results.measurements} == {(TINY, 32, "eager")}


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("model", {"modes": ["egaer"]}, "there is no mode 'egaer': did you mean eager?"),
        ("accuracy", {"families": ["swim"]}, "there is no family 'swim': did you mean swin?"),
        ("accuracy", {"families": ["resnet"]}, "choose among deit, pvt, swin, cswin"),
        ("window", {"windows": [0]}, "window is 0: it should be at least 1"),
        (
            "layer",
            {"modes": ["optimized"]},
            "mode optimized is for classifiers, not for layer: choose among eager",
        ),
        ("detection", {"modes": ["openvino"]}, "mode openvino is for classifiers, not for detection"),
        ("scaling", {"sizes": [100]}, "size 100 is not a multiple of 32: use 96 or 128"),
    ],
)
def test_wrong_options_are_refused(what, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run_bench(what, **options)


def test_all_attentions_are_measured():
    assert {name.removesuffix("_deit_tiny") for name in ATTENTION_MODELS} == set(ATTENTIONS)


def test_options_name_all_benches_and_modes():
    """The table of options loads without torch, so it is written apart from the functions."""
    assert list(COMPARISONS) == list(BENCHES)
    assert list(MODES) == ALL_MODES

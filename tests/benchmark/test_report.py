"""Tables, figures and files, made from the record in JSON."""

import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from inlinevit.benchmark import candidates
from inlinevit.benchmark.options import BENCHES
from inlinevit.benchmark.plots import MODE_STYLES, make_figure
from inlinevit.benchmark.report import conditions_sentence, make_blocks, make_markdown, print_results, write_report
from inlinevit.benchmark.results import Measurement, Results, is_inline, read_results
from inlinevit.benchmark.runtimes import MODES
from inlinevit.benchmark.studies import COMPARISONS
from inlinevit.benchmark.tables import (
    MOST_COLUMNS,
    accuracy_table,
    best_table,
    detection_table,
    exponent,
    exponents_table,
    full_table,
    ratio_table,
    summary_tables,
    three_digits,
)
from inlinevit.benchmark.timing import Quartiles
from inlinevit.report import Table, svg_bytes
from tests import slow_except

MACHINE = {"processor": "A Processor", "cores": 4, "memory": 2**33, "load": 0.5, "gemm_rate": 1e11}
SETTINGS = {"backward": False, "threads": 2, "revision": "abc"}


@pytest.fixture(autouse=True)
def no_models(monkeypatch):
    """Candidates are not made, so nothing needs to be known of their memory."""
    monkeypatch.setattr(candidates, "require_memory_for_model", lambda *_: None)


def made_up(what):
    """Results in which the time of a call is as many ms as there are kilotokens, and more for later candidates."""
    bench = BENCHES[what]
    measurements = []
    for comparison in COMPARISONS[what](**{name: value for name, value in bench.options.items() if name != "modes"}):
        for place, candidate in enumerate(comparison.candidates):
            for mode, factor in (("eager", 2), ("compiled", 1)):
                median = factor * (place + 1) * candidate.size**2 / 1e6
                measurements.append(
                    Measurement(
                        comparison=comparison.title,
                        name=candidate.name,
                        mode=mode,
                        size=candidate.size,
                        batch=comparison.batch,
                        seconds=Quartiles(0.9 * median, median, 1.1 * median),
                        rounds=7,
                        flops=median * 5e10,
                        memory=candidate.size**2,
                        gemm_rate=1e11,
                        width=candidate.width,
                    )
                )
    return Results(what, dict(SETTINGS), dict(MACHINE), measurements, ["something is left out: too large"])


def test_every_mode_is_drawn():
    assert MODE_STYLES.keys() == MODES.keys()
    assert all(style.name == mode for mode, style in MODE_STYLES.items())
    results = made_up("model")
    only, *_ = results.measurements
    results.measurements[:] = [replace(only, mode=mode) for mode in MODES]
    figure, _ = make_figure(results)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(MODES)


@pytest.mark.integration
@pytest.mark.parametrize("what", slow_except(BENCHES, "layer", "resolution", "detection"))
def test_all_can_be_written_and_read(what, tmp_path):
    results = made_up(what)
    page = write_report(results, tmp_path, "name")
    assert {path.name for path in tmp_path.iterdir()} == {"name.json", "name.html", "name.png", "name.svg"}
    read, facts = read_results(tmp_path / "name.json")
    assert read == results
    assert {"torch", "timm", "python"} <= set(facts["versions"])
    assert "something is left out: too large." in page.read_text()
    record = json.loads((tmp_path / "name.json").read_text())["sections"]["benchmark"]
    assert {"processor", "cores", "memory", "load", "gemm_rate"} <= set(record["machine"])
    assert record["settings"]["threads"] == 2
    assert len(record["measurements"][0]["seconds"]) == 3
    # The same figure and the same tables from the file.
    assert svg_bytes(make_figure(read)[0]) == (tmp_path / "name.svg").read_bytes()
    assert make_markdown(read, "a.svg") == make_markdown(results, "a.svg")


@pytest.mark.parametrize("what", slow_except(BENCHES, "layer", "resolution", "detection"))
def test_the_terminal_shows_every_cell(what, capsys):
    results = made_up(what)
    print_results(results, Console())
    output = capsys.readouterr().out
    for table in (block for block in make_blocks(results) if isinstance(block, Table)):
        for row in table.rows:
            for cell in row:
                assert cell in output
    assert "2 threads of A Processor" in output
    assert "something is left out: too large." in output


def test_the_best_mode_of_inline_is_beside_the_best_of_its_baseline():
    results = made_up("resolution")
    table = best_table(results)
    labels = ("inline_deit_tiny, ms", "deit_tiny_patch16_224, ms")
    assert table.headings == ("size", "batch", "precision", *labels, "speed-up")
    assert table.rows[0] == ("224²", "1", "float32", "50.2 (compiled)", "100 (compiled)", "2.00")
    assert summary_tables(results) == [table]


def test_int8_is_compared_with_int8():
    results = made_up("resolution")
    inline, softmax = results.measurements[1], results.measurements[3]
    fast = Quartiles(0.01, 0.02, 0.03)
    added = [
        replace(inline, mode="optimized-int8", precision="int8", seconds=fast, memory=None, cosine=0.9996),
        replace(softmax, mode="openvino-int8", precision="int8", seconds=Quartiles(0.03, 0.03, 0.03), cosine=0.99),
    ]
    results = replace(results, measurements=[*results.measurements[:4], *added])
    rows = best_table(results).rows
    assert rows[0][2:] == ("float32", "50.2 (compiled)", "100 (compiled)", "2.00")
    assert rows[1] == ("224²", "1", "int8", "20.0 (optimized-int8)", "30.0 (openvino-int8)", "1.50")
    full = full_table(results)
    assert [row[full.headings.index("cosine")] for row in full.rows[3:]] == ["–", "0.9996", "0.9900"]
    assert [row[full.headings.index("MB")] for row in full.rows[4:]] == ["–", "0.050"]
    assert [row[-1] for row in full.rows] == ["2.00", "1.00", "4.00", "2.00", "1.00", "1.50"]
    assert "float32 and int8" in conditions_sentence(results)
    make_figure(results)
    make_figure(replace(results, what="model"))


def test_without_a_baseline_models_are_compared_with_the_first():
    one = made_up("model").measurements[1]
    results = replace(made_up("model"), measurements=[one, replace(one, name="inline_deit_small")])
    (table,) = summary_tables(results)
    assert table == ratio_table(results)
    several = replace(results, measurements=[*results.measurements, replace(one, name="resnet18")])
    assert [table.headings[0] for table in summary_tables(several)] == ["size", "model"]
    assert best_table(several).headings[3:5] == ("InLine, ms", "resnet18, ms")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("inline_deit_tiny", True),
        ("InLine", True),
        ("inline_deit_tiny:attention=softmax", False),
        ("inline_swin_tiny:window_size=7", True),
        ("deit_tiny_patch16_224", False),
        ("pvt_tiny:attention=inline,depth=2", True),
    ],
)
def test_inline_models_are_known_by_their_names(name, expected):
    assert is_inline(name) == expected


def test_ratios_are_of_best_modes_to_the_firsts():
    results = made_up("resolution")
    table = ratio_table(results)
    assert table.headings == ("", "inline_deit_tiny", "deit_tiny_patch16_224")
    assert table.rows[0] == ("224², batch 1", "1.00 (compiled)", "2.00 (compiled)")
    # All modes, as multiples of the first's best.
    assert [row[-1] for row in full_table(results).rows[:4]] == ["2.00", "1.00", "4.00", "2.00"]


def test_a_candidate_that_was_left_out_has_a_dash():
    results = made_up("resolution")
    kept = [one for one in results.measurements if not (one.name.startswith("deit") and one.size == 1024)]
    table = ratio_table(replace(results, measurements=kept))
    assert table.rows[3] == ("1024², batch 1", "1.00 (compiled)", "–")
    make_figure(replace(results, measurements=kept))


def test_candidates_of_one_comparison_each_have_a_row_each():
    one = made_up("model").measurements[1]
    measurements = [replace(one, comparison="a", name="a"), replace(one, comparison="a", name="a, before")]
    results = Results("revision", SETTINGS, MACHINE, measurements, [])
    assert ratio_table(results).rows == [("a", "1.00 (compiled)"), ("a, before", "1.00 (compiled)")]
    make_figure(results)


def test_many_candidates_have_a_row_each():
    first, second = made_up("resolution").measurements[1], made_up("resolution").measurements[5]
    assert first.comparison != second.comparison
    names = [f"inline_deit_{place}" for place in range(MOST_COLUMNS + 1)]
    measurements = [replace(one, name=name) for one in (first, second) for name in names]
    table = ratio_table(replace(made_up("resolution"), measurements=measurements[:-1]))
    assert table.headings == ("model", first.comparison, second.comparison)
    assert table.rows[0] == (names[0], "1.00 (compiled)", "1.00 (compiled)")
    assert table.rows[-1] == (names[-1], "1.00 (compiled)", "–")
    assert len(table.rows) == len(names)


def test_detectors_have_cost_time_and_memory_in_a_row():
    results = made_up("detection")
    table = detection_table(results)
    _, backbone, gmacs, seconds, times, megabytes, memory = table.rows[2]
    assert backbone == "pvt_tiny:sr_ratios=[1,1,1,1]"
    assert (gmacs, seconds, times) == ("48", "1.92", "3.00")
    assert (megabytes, memory) == ("0.640", "1.000")
    assert {row[1] for row in full_table(results).rows} == {"800×1344"}


def test_records_without_a_width_are_of_squares(tmp_path):
    """As records were before there were other images."""
    record = asdict(made_up("model"))
    for one in record["measurements"]:
        assert one.pop("width") is None
    content = {"created": "", "versions": {}, "sections": {"benchmark": record}}
    (tmp_path / "a.json").write_text(json.dumps(content))
    results, _ = read_results(tmp_path / "a.json")
    assert [row[1] for row in full_table(results).rows[:1]] == ["224²"]


def test_accuracies_stand_beside_times():
    table = accuracy_table(made_up("accuracy"))
    (row,) = [row for row in table.rows if row[0] == "swin_tiny_patch4_window7_224"]
    assert row[3] == "81.3"
    assert row[-1] == "2.00"


def test_exponents():
    assert exponent([1, 10, 100], [5, 500, 50000]) == pytest.approx(2)
    assert exponent([1, 4], [3, 6]) == pytest.approx(0.5)
    assert exponent([1], [3]) is None
    # made_up(): time and memory in proportion to the tokens.
    for row in exponents_table(made_up("scaling")).rows:
        assert set(row[2:]) == {"1.00"}


def test_numbers_have_three_digits():
    numbers = {0.01234: "0.012", 1.234: "1.23", 12.34: "12.3", 123.4: "123", 1234.4: "1,234"}
    assert [three_digits(value) for value in numbers] == list(numbers.values())

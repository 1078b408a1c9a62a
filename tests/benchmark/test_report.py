"""Tables, figures and files, made from the record in JSON."""

import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from inlinevit.benchmark import candidates
from inlinevit.benchmark.options import BENCHES
from inlinevit.benchmark.plots import make_figure
from inlinevit.benchmark.report import make_blocks, make_markdown, print_results, write_report
from inlinevit.benchmark.results import Measurement, Results, read_results
from inlinevit.benchmark.studies import COMPARISONS
from inlinevit.benchmark.tables import (
    accuracy_table,
    detection_table,
    exponent,
    exponents_table,
    full_table,
    ratio_table,
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

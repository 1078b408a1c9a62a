"""Means, intervals, verdicts and tables of results made by hand; the page and its records."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from inlinevit.benchmark.results import Measurement, Results
from inlinevit.benchmark.timing import Quartiles
from inlinevit.experiments.reproduce.comparison import COMPARED, CORES
from inlinevit.experiments.reproduce.design import Cell, Claim, Study
from inlinevit.experiments.reproduce.document import (
    ALT,
    Records,
    attentions_table,
    generated_parts,
    make_figures,
    rewritten,
)
from inlinevit.experiments.reproduce.outcomes import Outcome
from inlinevit.experiments.reproduce.record import CellRecord, Record, completed, empty_record, read_record
from inlinevit.experiments.reproduce.statistics import Verdict, judge, mean_interval, t_quantile, welch_interval
from inlinevit.experiments.reproduce.studies import STUDIES
from inlinevit.experiments.reproduce.tables import (
    accuracy_words,
    cells_table,
    cells_tables,
    changes_table,
    claims_table,
    study_markdown,
    summary_markdown,
)
from inlinevit.report import svg_bytes
from tests import ROOT


def cell(*top1: float | None, parameters: int = 1234) -> CellRecord:
    """Runs of half a minute with these accuracies; None = it diverged, in step 10 + seed."""
    runs = {
        seed: Outcome(value, 1.0, seconds=60.0, cpu_seconds=30.0)
        if value is not None
        else Outcome(diverged_step=10 + seed, diverged_what="the loss is nan", seconds=6.0, cpu_seconds=3.0)
        for seed, value in enumerate(top1)
    }
    return CellRecord({}, parameters, runs)


# Published two-sided quantiles at 95 %.
@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (1000, 1.962)]
)
def test_quantiles_of_t(freedom: float, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, abs=6e-4)


def test_intervals() -> None:
    # A standard deviation of 1 over 3 seeds.
    assert mean_interval([59.0, 60.0, 61.0]) == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    assert mean_interval([59.0]) is None
    # Equal spreads: twice the degrees of freedom of one.
    assert welch_interval([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == pytest.approx(2.776 * math.sqrt(2 / 3), abs=1e-3)
    # One without spread: those of the other.
    assert welch_interval([1.0, 2.0, 3.0], [4.0, 4.0, 4.0]) == pytest.approx(4.303 * math.sqrt(1 / 3), abs=1e-3)
    assert welch_interval([1.0, 1.0], [2.0, 2.0]) == 0
    assert welch_interval([1.0], [2.0, 2.0]) is None


# Standard deviations of 1 and 2 over 3 seeds: the standard error is √(1/3 + 4/3), with 50/17 degrees of freedom.
WELCH = t_quantile(50 / 17) * math.sqrt(5 / 3)


@pytest.mark.parametrize(
    ("better", "worse", "verdict"),
    [
        (cell(59, 60, 61), cell(48, 50, 52, parameters=9), Verdict("holds", 10.0, WELCH)),
        (cell(48, 50, 52), cell(59, 60, 61, parameters=9), Verdict("does not hold", -10.0, WELCH)),
        (cell(50, 51, 52), cell(47, 49, 51, parameters=9), Verdict("within noise", 2.0, WELCH)),
        (cell(47, 49, 51), cell(50, 51, 52, parameters=9), Verdict("within noise", -2.0, WELCH)),
        # Models of one size are paired: their differences are 10, 10, 10, whatever the spread of each.
        (cell(50, 60, 70), cell(40, 50, 60), Verdict("holds", 10.0, 0.0, is_paired=True)),
        (cell(51, 52, 53), cell(50, 50, 50), Verdict("within noise", 2.0, 4.303 / math.sqrt(3), is_paired=True)),
        # Without the same seeds, they are not.
        (cell(50, 60, 70), cell(49, 50), Verdict("within noise", 10.5, welch_interval([50, 60, 70], [49, 50]))),
        (cell(50, 50), cell(50, 50), Verdict("within noise", 0.0, 0.0, is_paired=True)),
        (cell(60), cell(50, 51), Verdict("unknown", 9.5, None, "one seed has no spread")),
        (cell(60), cell(50), Verdict("unknown", 10.0, None, "one seed has no spread")),
        (cell(), cell(50, 51), Verdict("unknown", reason="runs are missing")),
        (cell(60, 61, 62), cell(None, 70, None), Verdict("holds", reason="B diverged in 2 of 3")),
        (cell(60, None, 62), cell(50, 51), Verdict("does not hold", reason="A diverged in 1 of 3")),
        (
            cell(None, None),
            cell(None, None, None),
            Verdict("both diverged", reason="A diverged in 2 of 2 and B diverged in 3 of 3"),
        ),
    ],
)
def test_verdict_on_a_pair(better: CellRecord, worse: CellRecord, verdict: Verdict) -> None:
    claim = Claim("", Cell("a", "A", {}), Cell("b", "B", {}))
    word, difference, noise, reason, is_paired = judge(claim, {"a": better, "b": worse})
    assert (word, reason, is_paired) == (verdict.word, verdict.reason, verdict.is_paired)
    assert difference == (None if verdict.difference is None else pytest.approx(verdict.difference))
    assert noise == (None if verdict.noise is None else pytest.approx(verdict.noise, abs=1e-3))


def small_record(small_studies: dict[str, Study]) -> Record:
    cells = {"softmax": cell(59, 60, 61), "linear": cell(48, 50, 52), "inline": cell(70, None)}
    settings = {"jobs": 2, "select": True, "seeds": dict.fromkeys(cells, 3)}
    cells["softmax"] = replace(
        cells["softmax"], lr=0.002, rates={0.001: 40.0, 0.002: 41.0, 0.004: None}, rate_seconds=9.0
    )
    facts = {
        "created": "2030-01-01T00:00:00+00:00",
        "versions": {"inlinevit": "1", "torch": "2", "timm": "3", "python": "4"},
        "machine": {"system": "Linux", "cores": 8, "threads": 1},
    }
    return Record(settings, cells, facts)


def test_accuracy_in_words() -> None:
    assert accuracy_words(cell(59, 60, 61)) == "60.00 ± 2.48 (59.00, 60.00, 61.00)"
    assert accuracy_words(cell(59)) == "59.00"
    assert accuracy_words(cell()) == "–"
    assert accuracy_words(cell(None)) == "diverged in 1 of 1 seeds (step 10)"
    assert accuracy_words(cell(70, None, None)) == "diverged in 2 of 3 seeds (steps 11, 12); the others: 70.00"


def test_tables(small_studies: dict[str, Study]) -> None:
    record = small_record(small_studies)
    (table,) = cells_tables(small_studies["first"], record)
    assert list(table.rows) == [
        ("softmax", "3", "60.00 ± 2.48 (59.00, 60.00, 61.00)", "0.002", "1,234", "0.5"),
        ("linear", "3", "50.00 ± 4.97 (48.00, 50.00, 52.00)", "–", "1,234", "0.5"),
    ]
    assert cells_tables(small_studies["second"], record)[0].rows[1][1] == "2 of 3"
    # Differences of 11, 10 and 9.
    claims = claims_table(small_studies["first"], record)
    assert list(claims.rows) == [("softmax wins", "+10.00", "± 2.48, paired", "holds")]


def test_changes_with_the_length(small_studies: dict[str, Study]) -> None:
    record, former = small_record(small_studies), small_record(small_studies)
    former.cells["softmax"] = cell(50, 51, 49)
    row = ("softmax wins", "+0.00 ± 6.57", "within noise", "+10.00 ± 2.48", "holds")
    assert list(changes_table(record, former).rows) == [(*row, "yes")]
    former.cells["linear"] = replace(former.cells["linear"], options={"depth": 9})
    assert changes_table(record, former).rows[0][-1] == "yes, another model"
    record.cells["linear"] = cell()
    assert changes_table(record, former).rows[0][-1] == "–, another model"
    del former.cells["linear"]
    assert not changes_table(record, former).rows


def test_hours_count_each_run_once(small_studies: dict[str, Study]) -> None:
    record = small_record(small_studies)
    assert record.core_hours == pytest.approx((7 * 30 + 3 + 9) / 3600)
    text = summary_markdown(record)
    assert "8 runs of 9 are finished, and 1 of them diverged" in text
    assert "took 0.1 core-hours" in text


def test_a_table_has_times_of_one_processor(small_studies: dict[str, Study]) -> None:
    record = small_record(small_studies)
    processors = {"softmax": ("Xeon", "EPYC", "EPYC"), "linear": ("Xeon",) * 3, "inline": ("EPYC",) * 2}
    for key, names in processors.items():
        found = record.cells[key]
        found.runs = {seed: replace(run, processor=names[seed]) for seed, run in found.runs.items()}
    assert record.processors() == ["Xeon", "EPYC"]
    assert record.processors(["softmax", "none"]) == ["EPYC", "Xeon"]
    (first,), (second,) = (cells_tables(small_studies[name], record) for name in ("first", "second"))
    assert [table.headings[-1] for table in (first, second)] == [f"CPU minutes per run, {x}" for x in ("Xeon", "EPYC")]
    rows = cells_table([small_studies["first"].cells[1], small_studies["second"].cells[1]], record, "").rows
    assert [row[-1] for row in rows] == ["0.5", "–"]
    text = summary_markdown(record)
    assert "8 cores of Xeon or EPYC, with" in text
    assert "processor times of one of these processors alone" in text


def test_record_is_read_as_it_was_written(small_studies: dict[str, Study], tmp_path: Path) -> None:
    record = small_record(small_studies)
    record.write(tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == record
    assert read_record(tmp_path / "record.json").cells["softmax"].rates == {0.001: 40.0, 0.002: 41.0, 0.004: None}
    assert '"diverged_step": 11' in (tmp_path / "record.json").read_text()


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reproduce_page", ROOT / "tools" / "reproduce_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_agrees_with_its_records() -> None:
    tool = load_tool()
    records = tool.read_records(tool.DOCS)
    for name, parts in generated_parts(records).items():
        page = (tool.DOCS / name).read_text()
        assert rewritten(page, parts) == page, f"{name}: run make results"
    page = (tool.DOCS / "studies.md").read_text()
    for name, study in STUDIES.items():
        assert f"### {study.title}\n\n<!-- reproduce-{name} -->" in page
        assert all(f"| {one.label} |" in page for one in study.cells)
    guide = (tool.DOCS / "choosing_attention.md").read_text()
    for name in ALT:
        is_shown = f"(reproduce/{name}.svg)" in guide
        assert (
            is_shown
            == (tool.DOCS / "reproduce" / f"{name}.svg").exists()
            == (name in make_figures(records.studies, records.times))
        )


def filled_record() -> Record:
    """Return a record in which every attention was compared, with accuracies that tell them apart."""
    record = empty_record()
    for cells in COMPARED.values():
        for place, one in enumerate(cells.values()):
            record.cells[one.key] = replace(cell(50.0 + place, 51.0 + place), parameters=1000 + place)
    return record


def test_cells_that_are_newer_than_a_record_are_without_runs() -> None:
    record = filled_record()
    gone = STUDIES["maps"].cells[-1]
    del record.cells[gone.key], record.settings["seeds"][gone.key]
    full = completed(record)
    assert full.cells.keys() == empty_record().cells.keys()
    assert full.cells[gone.key].runs == {}
    assert full.settings["seeds"][gone.key] == 1
    assert all(full.cells[key] is one for key, one in record.cells.items())
    assert f"| {gone.label} | 0 of 1 |" in study_markdown("maps", full)


def bench_results() -> Results:
    """Return times of two models at two resolutions."""
    found = [
        Measurement(f"{size}²", name, "eager", size, 1, Quartiles(0.9 * ms, ms, 1.1 * ms), 9, 1e9, None, 1e11)
        for name, ms in (("inline_deit_tiny", 0.02), ("softmax_deit_tiny", 0.03))
        for size in (224, 640)
    ]
    return Results("attentions", {}, {}, found, [])


def test_table_and_figures_of_all_attentions() -> None:
    record, times = filled_record(), bench_results()
    rows = {row[0]: row for row in attentions_table(record, times).rows}
    assert list(rows) == [label for label, _ in CORES.values()]
    assert rows["softmax"] == (
        "softmax",
        "50.5 ± 6.4",
        "50.5 ± 6.4",
        "–",
        "–",
        "5,717,416",
        "30.0",
        "30.0",
        "yes",
        "yes",
    )
    assert rows["linear"][-4:-2] == ("–", "–")
    figures = make_figures(record, times)
    assert list(figures) == list(ALT)
    time_axes, parameter_axes = (figure.axes for figure in figures.values())
    assert [axes.get_title() for axes in time_axes] == ["224²", "640²"]
    assert {text.get_text() for text in time_axes[0].texts} == {"InLine", "softmax"}
    assert {text.get_text() for text in parameter_axes[1].texts} == {label for label, _ in CORES.values()}
    assert all(svg_bytes(figure).startswith(b"<?xml") for figure in figures.values())
    assert make_figures(empty_record(), times) == {}


def test_tool_takes_a_new_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_tool()
    docs = tmp_path / "docs"
    (docs / "reproduce").mkdir(parents=True)
    for page in ("studies.md", "choosing_attention.md"):
        (docs / page).write_text((tool.DOCS / page).read_text())
    (docs / "reproduce" / "results-1000-steps.json").write_text(
        (tool.DOCS / "reproduce" / "results-1000-steps.json").read_text()
    )
    monkeypatch.setattr(tool, "DOCS", docs)
    record = filled_record()
    record.cells["softmax"] = cell(12.34, 12.34, 12.34)
    record.write(tmp_path / "new.json")
    monkeypatch.setattr(sys, "argv", ["reproduce_page.py", str(tmp_path / "new.json")])
    tool.main()
    assert read_record(docs / "reproduce" / "results.json") == record
    assert "| softmax | 3 | 12.34 ± 0.00 (12.34, 12.34, 12.34) |" in (docs / "studies.md").read_text()
    assert "![Accuracy on CIFAR-10 over parameters" in (docs / "choosing_attention.md").read_text()
    assert (docs / "reproduce" / "accuracy-parameters.svg").exists()


def test_page_keeps_what_stands_between_the_tables() -> None:
    former = load_tool().read_records(load_tool().DOCS).former
    records = Records(empty_record(), former)
    for name, parts in generated_parts(records).items():
        page = "".join(f"<!-- {part} -->\nformer table\n<!-- /{part} -->\nremark\n" for part in parts)
        new = rewritten(page, parts)
        assert new.count("remark\n") == len(parts)
        assert "former table" not in new
        assert rewritten(new, parts) == new
        assert ("No run of this length is recorded yet" in new) == (name == "studies.md")
    with pytest.raises(ValueError, match="should have <!-- reproduce-maps -->"):
        rewritten(page.replace("reproduce-maps", "maps"), parts)

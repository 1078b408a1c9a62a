"""Means, spreads, verdicts and tables of results made by hand; the page and its record."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from inlinevit.experiments.reproduce.cells import Outcome
from inlinevit.experiments.reproduce.record import CellRecord, Record, Verdict, judge, read_record
from inlinevit.experiments.reproduce.studies import STUDIES, Cell, Claim, Study
from inlinevit.experiments.reproduce.tables import (
    accuracy_words,
    cells_table,
    claims_table,
    rewritten,
    summary_markdown,
)
from tests import ROOT


def cell(*top1: float | None) -> CellRecord:
    """Runs of a minute with these accuracies; None = it diverged, in step 10 + seed."""
    runs = {
        seed: Outcome(value, 1.0, seconds=60.0, cpu_seconds=30.0)
        if value is not None
        else Outcome(diverged_step=10 + seed, diverged_what="the loss is nan", seconds=6.0, cpu_seconds=3.0)
        for seed, value in enumerate(top1)
    }
    return CellRecord({}, 1234, runs)


@pytest.mark.parametrize(
    ("better", "worse", "verdict"),
    [
        # Standard deviations of 1 and 2 over 3 seeds: two standard errors are 2 √(1/3 + 4/3).
        (cell(59, 60, 61), cell(48, 50, 52), Verdict("holds", 10.0, 2 * math.sqrt(5 / 3))),
        (cell(48, 50, 52), cell(59, 60, 61), Verdict("does not hold", -10.0, 2 * math.sqrt(5 / 3))),
        (cell(50, 51, 52), cell(47, 49, 51), Verdict("within noise", 2.0, 2 * math.sqrt(5 / 3))),
        (cell(47, 49, 51), cell(50, 51, 52), Verdict("within noise", -2.0, 2 * math.sqrt(5 / 3))),
        (cell(50, 50), cell(50, 50), Verdict("within noise", 0.0, 0.0)),
        (cell(60), cell(50, 51), Verdict("unknown", 9.5, None, "one seed has no spread")),
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
    word, difference, noise, reason = judge(claim, {"a": better, "b": worse})
    assert (word, reason) == (verdict.word, verdict.reason)
    assert difference == (None if verdict.difference is None else pytest.approx(verdict.difference))
    assert noise == (None if verdict.noise is None else pytest.approx(verdict.noise))


def small_record(small_studies: dict[str, Study]) -> Record:
    cells = {"softmax": cell(59, 60, 61), "linear": cell(48, 50, 52), "inline": cell(70, None)}
    settings = {"steps": 1000, "batch_size": 64, "jobs": 2, "seeds": {"first": 3, "second": 3}}
    facts = {
        "created": "2030-01-01T00:00:00+00:00",
        "versions": {"inlinevit": "1", "torch": "2", "timm": "3", "python": "4"},
        "machine": {"system": "Linux", "cores": 8, "threads": 1},
    }
    return Record(settings, cells, facts)


def test_accuracy_in_words() -> None:
    assert accuracy_words(cell(59, 60, 61)) == "60.00 ± 1.00 (59.00, 60.00, 61.00)"
    assert accuracy_words(cell(59)) == "59.00"
    assert accuracy_words(cell()) == "–"
    assert accuracy_words(cell(None)) == "diverged in 1 of 1 seeds (step 10)"
    assert accuracy_words(cell(70, None, None)) == "diverged in 2 of 3 seeds (steps 11, 12); the others: 70.00"


def test_tables(small_studies: dict[str, Study]) -> None:
    record = small_record(small_studies)
    assert list(cells_table("first", record).rows) == [
        ("softmax", "3", "60.00 ± 1.00 (59.00, 60.00, 61.00)", "1,234", "1.0"),
        ("linear", "3", "50.00 ± 2.00 (48.00, 50.00, 52.00)", "1,234", "1.0"),
    ]
    assert cells_table("second", record).rows[1][1] == "2 of 3"
    assert list(claims_table(small_studies["first"], record).rows) == [("softmax wins", "+10.00", "2.58", "holds")]


def test_hours_count_each_run_once(small_studies: dict[str, Study]) -> None:
    record = small_record(small_studies)
    assert record.core_hours == pytest.approx((7 * 30 + 3) / 3600)
    text = summary_markdown(record)
    assert "8 runs of 9 are finished, and 1 of them diverged" in text
    assert "took 0.1 core-hours" in text


def test_record_is_read_as_it_was_written(small_studies: dict[str, Study], tmp_path: Path) -> None:
    record = small_record(small_studies)
    record.write(tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == record
    assert '"diverged_step": 11' in (tmp_path / "record.json").read_text()


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reproduce_page", ROOT / "tools" / "reproduce_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_agrees_with_its_record() -> None:
    tool = load_tool()
    page = tool.PAGE.read_text()
    assert rewritten(page, read_record(tool.RECORD)) == page, "run make results"
    for name, study in STUDIES.items():
        assert f"### {study.title}\n\n<!-- reproduce-{name} -->" in page
        assert all(f"| {one.label} |" in page for one in study.cells)


def test_tool_takes_a_new_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_tool()
    record = read_record(tool.RECORD)
    (tmp_path / "results.md").write_text(tool.PAGE.read_text())
    monkeypatch.setattr(tool, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(tool, "RECORD", tmp_path / "kept" / "results.json")
    record.cells["softmax"] = cell(12.34, 12.34, 12.34)
    record.write(tmp_path / "new.json")
    monkeypatch.setattr(sys, "argv", ["reproduce_page.py", str(tmp_path / "new.json")])
    tool.main()
    assert read_record(tmp_path / "kept" / "results.json") == record
    assert "| softmax | 3 | 12.34 ± 0.00 (12.34, 12.34, 12.34) |" in (tmp_path / "results.md").read_text()


def test_page_keeps_what_stands_between_the_tables() -> None:
    record = read_record(load_tool().RECORD)
    names = ["reproduce", *(f"reproduce-{name}" for name in STUDIES)]
    page = "".join(f"<!-- {name} -->\nformer table\n<!-- /{name} -->\nremark\n" for name in names)
    new = rewritten(page, record)
    assert new.count("remark\n") == len(names)
    assert "former table" not in new
    assert rewritten(new, record) == new
    with pytest.raises(ValueError, match="should have <!-- reproduce-maps -->"):
        rewritten(page.replace("reproduce-maps", "maps"), record)

"""The tools that make docs/performance.md."""

import importlib.util
import json
import shlex
import subprocess
import sys

import pytest

from inlinevit.benchmark.report import write_report
from inlinevit.benchmark.results import Measurement, Results
from inlinevit.benchmark.timing import Quartiles
from inlinevit.cli.bench import make_study_parser
from tests import ROOT


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page_tool = load_tool("performance_page")
record_tool = load_tool("record_performance")


def test_the_page_agrees_with_its_records():
    text, records = page_tool.PAGE.read_text(), page_tool.record_paths(page_tool.PAGE)
    assert page_tool.rewritten(text, records) == text, "run make bench"
    for path in records:
        assert path.with_suffix(".svg").exists(), "run make bench"


def test_the_page_has_a_place_for_each_record():
    text = page_tool.PAGE.read_text()
    for name in record_tool.COMMANDS:
        assert f"<!-- {name} -->" in text
        assert f"<!-- /{name} -->" in text


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page with one record."""
    one = Measurement("224², batch 1", "resnet18", "eager", 224, 1, Quartiles(0.1, 0.2, 0.3), 5, 1e9, 1000, 1e11)
    machine = {"processor": "A Processor", "cores": 4, "memory": 2**33, "load": 0.5, "gemm_rate": 1e11}
    results = Results("model", {"backward": False, "threads": 3}, machine, [one], [])
    write_report(results, tmp_path / "speed", "some-models")
    path = tmp_path / "speed.md"
    path.write_text(
        "Before\n<!-- machine -->\n<!-- /machine -->\n<!-- some-models -->\nold\n<!-- /some-models -->\nAfter\n"
    )
    monkeypatch.setattr(page_tool, "PAGE", path)
    return path


def test_tables_go_between_the_marks_and_the_rest_stays(page):
    (page.parent / "speed" / "some-models.svg").unlink()
    page_tool.main()
    text = page.read_text()
    assert text.startswith("Before\n<!-- machine -->\n")
    assert text.endswith("<!-- /some-models -->\nAfter\n")
    assert "old" not in text
    assert "| resnet18 | 224² | 1 | eager | 200 | 100 – 300 | 5.00 |" in text
    assert "(speed/some-models.svg)" in text
    assert "A Processor, 4 cores" in text
    assert (page.parent / "speed" / "some-models.svg").exists()
    page_tool.main()
    assert page.read_text() == text


def test_a_record_without_a_place_is_refused(page):
    page.write_text("<!-- machine -->\n<!-- /machine -->\n")
    with pytest.raises(ValueError, match="should have <!-- some-models -->"):
        page_tool.main()


@pytest.mark.parametrize("name", record_tool.COMMANDS)
def test_commands_of_records_are_understood(name):
    words = shlex.split(record_tool.COMMANDS[name])
    if words[:3] == ["-m", "inlinevit", "bench"]:
        make_study_parser(words[3]).parse_args([*words[4:], "--threads", "2", "--output", "a", "--name", name])
    else:
        assert (ROOT / words[0]).exists()


def test_records_are_kept_unless_asked(monkeypatch, tmp_path, capsys):
    calls = []

    def run(words, cwd, check):
        calls.append(words[words.index("--name") + 1])
        (tmp_path / "raw").mkdir(exist_ok=True)
        (tmp_path / "raw" / f"{calls[-1]}.json").write_text("new")

    monkeypatch.setattr(record_tool, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(record_tool, "RAW", tmp_path / "raw")
    monkeypatch.setattr(record_tool.subprocess, "run", run)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "window.json").write_text("old")
    monkeypatch.setattr(sys, "argv", ["record_performance.py"])
    record_tool.main()
    assert calls == [name for name in record_tool.COMMANDS if name != "window"]
    assert (tmp_path / "records" / "window.json").read_text() == "old"
    monkeypatch.setattr(sys, "argv", ["record_performance.py", "window", "--again"])
    record_tool.main()
    assert calls[-1] == "window"
    assert (tmp_path / "records" / "window.json").read_text() == "new"
    monkeypatch.setattr(sys, "argv", ["record_performance.py", "windows"])
    with pytest.raises(SystemExit):
        record_tool.main()


@pytest.mark.slow
def test_the_working_tree_is_measured_against_a_revision(tmp_path):
    """In a process of its own, because it registers the older models with timm."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    options = "HEAD --modules inline_deit --size 32 --modes eager --rounds 2 --threads 1 --name test --output"
    command = [sys.executable, ROOT / "tools" / "against_revision.py", *options.split(), tmp_path]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    record = json.loads((tmp_path / "test.json").read_text())["sections"]["benchmark"]
    assert [one["name"] for one in record["measurements"]] == ["inline_deit_tiny", "inline_deit_tiny, before"]
    assert record["settings"]["revision"] == "HEAD"

"""The tools that make docs/performance.md and the table of docs/huge_images.md."""

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
goals_tool = load_tool("performance_goals")
record_tool = load_tool("record_performance")
streaming_tool = load_tool("record_streaming")


def test_the_page_agrees_with_its_records():
    text, records = page_tool.PAGE.read_text(), page_tool.record_paths(page_tool.PAGE)
    assert page_tool.rewritten(text, records) == text, "run make bench"
    readme = page_tool.README.read_text()
    assert page_tool.rewritten_readme(readme, records) == readme, "run make bench"
    for path in records:
        assert path.with_suffix(".svg").exists(), "run make bench"


def test_the_page_of_huge_images_agrees_with_its_record():
    record = json.loads(streaming_tool.RECORD.read_text())
    assert record.keys() == streaming_tool.CASES.keys()
    assert streaming_tool.make_table(record) in streaming_tool.PAGE.read_text()
    assert streaming_tool.make_curves(record) == streaming_tool.CURVES.read_bytes()


def test_the_page_has_a_place_for_each_record():
    text = page_tool.PAGE.read_text()
    for name in record_tool.COMMANDS:
        assert f"<!-- {name} -->" in text
        assert f"<!-- /{name} -->" in text


MARKS = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in ("machine", "goals", "plain"))


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page with one record."""
    one = Measurement("224², batch 1", "resnet18", "eager", 224, 1, Quartiles(0.1, 0.2, 0.3), 5, 1e9, 1000, 1e11)
    machine = {"processor": "A Processor", "cores": 4, "memory": 2**33, "load": 0.5, "gemm_rate": 1e11}
    results = Results("model", {"backward": False, "threads": 3}, machine, [one], [])
    write_report(results, tmp_path / "speed", "some-models")
    path = tmp_path / "speed.md"
    path.write_text(f"Before\n{MARKS}<!-- some-models -->\nold\n<!-- /some-models -->\nAfter\n")
    monkeypatch.setattr(page_tool, "PAGE", path)
    monkeypatch.setattr(page_tool, "README", tmp_path / "README.md")
    page_tool.README.write_text("Before\n<!-- speed -->\n<!-- /speed -->\nAfter\n")
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
    readme = page_tool.README.read_text()
    assert "| PVT-S at 224² / 512² | – / – |" in readme
    assert readme.endswith("<!-- /speed -->\nAfter\n")
    page_tool.main()
    assert page.read_text() == text


def test_a_record_without_a_place_is_refused(page):
    page.write_text(MARKS)
    with pytest.raises(ValueError, match="should have <!-- some-models -->"):
        page_tool.main()


@pytest.mark.parametrize("name", record_tool.COMMANDS)
def test_commands_of_records_are_understood(name):
    words = shlex.split(record_tool.COMMANDS[name].command)
    if words[:3] == ["-m", "inlinevit", "bench"]:
        make_study_parser(words[3]).parse_args([*words[4:], "--threads", "2", "--output", "a", "--name", name])
    else:
        assert (ROOT / words[0]).exists()


def timed(name, mode, milliseconds, size=224, precision="float32"):
    seconds = Quartiles(*[milliseconds / 1000] * 3)
    title = f"{size}², batch 1"
    return Measurement(title, name, mode, size, 1, seconds, 5, 1e9, 1000, 1e11, precision=precision)


def results_of(*measurements):
    return Results("resolution", {"backward": False, "threads": 2}, {}, list(measurements), [])


def test_goals_compare_the_best_modes_of_both_in_one_precision():
    inline, softmax = "inline_deit_tiny", "deit_tiny_patch16_224"
    float32 = results_of(
        timed(inline, "eager", 20),
        timed(inline, "optimized", 10),
        timed(softmax, "eager", 30),
        timed(softmax, "openvino", 15),
        timed(inline, "eager", 20, size=384),
        timed(softmax, "openvino", 30, size=384),
    )
    int8 = results_of(
        timed(inline, "optimized", 10),
        timed(inline, "optimized-int8", 5, precision="int8"),
        timed(softmax, "openvino-int8", 5.5, precision="int8"),
    )
    rows = goals_tool.goals_table({"resolution": float32, "resolution-int8": int8}).rows
    by_title = {row[0]: row for row in rows}
    assert len(by_title) == len(goals_tool.GOALS)
    best = by_title["DeiT-T over the best softmax, float32, one image"]
    assert best[4] == "1.50 / 1.50 / – / –"
    assert best[5] == "missed: 384² by 9 %, not recorded at 640², not recorded at 1024²"
    assert by_title["DeiT-T over softmax, plain `model(x)` of both, one image"][4].startswith("1.50 / – /")
    assert by_title["DeiT-T over the best softmax, int8, one image"][4].startswith("1.10 / ")
    assert by_title["InLine-DeiT-T in int8 over itself in float32, one image"][4].startswith("2.00 / ")
    assert by_title["the same, eight images"][5] == "not recorded"


def test_the_cost_of_a_layer_should_be_below_its_bar():
    times = {196: (10, 5), 4096: (11, 10), 16384: (100, 100)}
    found = [
        timed(name, "eager", milliseconds, size=tokens)
        for tokens, pair in times.items()
        for name, milliseconds in zip(("InLine", "projections"), pair, strict=True)
    ]
    (row,) = [row for row in goals_tool.goals_table({"layer": results_of(*found)}).rows if row[6] == "layer"]
    assert row[2].startswith("≤ ")
    assert row[4:6] == ("2.00 / 1.10 / 1.00", "missed: 196 tokens by 25 %")


def test_every_goal_has_a_record_that_can_be_made():
    assert {goal.record for goal in goals_tool.GOALS} <= set(record_tool.COMMANDS)


def test_plain_calls_are_those_without_other_runtimes():
    found = results_of(
        timed("inline_deit_tiny", "eager", 20),
        timed("inline_deit_tiny", "optimized", 10),
        timed("deit_tiny_patch16_224", "eager", 30),
        timed("deit_tiny_patch16_224", "openvino", 15),
    )
    section = page_tool.plain_section({"resolution": found})
    assert "| 224² | 1 | float32 | 20.0 (eager) | 30.0 (eager) | 1.50 |" in section
    assert page_tool.plain_section({}) == "Not recorded yet.\n"


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
    revision = record_tool.BEFORE_KERNELS
    if subprocess.run(["git", "cat-file", "-e", revision], cwd=ROOT, capture_output=True).returncode != 0:
        pytest.skip("not a git checkout with its history")
    options = f"{revision} --modules inline_deit --size 32 --modes eager --rounds 2 --threads 1 --name test --output"
    command = [sys.executable, ROOT / "tools" / "against_revision.py", *options.split(), tmp_path]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    record = json.loads((tmp_path / "test.json").read_text())["sections"]["benchmark"]
    assert [one["name"] for one in record["measurements"]] == ["inline_deit_tiny", "inline_deit_tiny, before"]
    assert record["settings"]["revision"] == revision

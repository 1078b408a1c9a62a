"""A short run of the fuzzers, what they have found before, and proof that they would see it."""

import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import fuzz
import pytest
from fuzzing import contract
from fuzzing.contract import ACCEPTED, REFUSED, Outcome, Watch, judge
from fuzzing.mutate import change_bytes, change_tree, write_nested
from fuzzing.targets import TARGETS, dangerous_pickle, tiny_model

from tests import ROOT

CORPUS = Path(__file__).parent / "corpus"
# Inputs of a short run: as many as a few seconds allow. `make fuzz` gives 10,000 to each.
INPUTS = {
    "weights": 100,
    "safetensors": 150,
    "checkpoint": 150,
    "labels": 150,
    "recipe": 12,
    "coco": 500,
    "images": 400,
    "regions": 400,
}


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    return Watch(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", TARGETS)
def test_good_inputs_are_accepted(name: str, tmp_path: Path) -> None:
    target = TARGETS[name](tmp_path)
    path = tmp_path / f"input{target.ending}"
    for content in target.good():
        path.write_bytes(content)
        outcome = judge(target.run, path)
        assert outcome.kind == ACCEPTED, outcome.detail


@pytest.mark.integration
@pytest.mark.parametrize("name", TARGETS)
def test_broken_inputs_are_accepted_or_refused(name: str, tmp_path: Path, watch: Watch) -> None:
    target = TARGETS[name](tmp_path)
    path, row = tmp_path / f"input{target.ending}", fuzz.Row(name)
    for content in target.good():
        path.write_bytes(content)
        judge(target.run, path)
    for index in range(INPUTS[name]):
        path.write_bytes(fuzz.input_of(target, name, 7, index))
        outcome = judge(target.run, path, watch, tmp_path / "marker")
        assert not outcome.is_finding, f"input {index}: {outcome.kind}: {outcome.detail}"
        row.add(outcome)
    # Inputs that are all refused, or all accepted, would show little.
    assert row.accepted > 0
    assert row.refused > row.inputs // 3


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*/*")), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_what_was_found_before_is_refused(file: Path, tmp_path: Path, watch: Watch) -> None:
    target = TARGETS[file.parent.name](tmp_path)
    path = tmp_path / f"input{target.ending}"
    path.write_bytes(file.read_bytes())
    outcome = judge(target.run, path, watch, tmp_path / "marker")
    assert outcome.kind == REFUSED, outcome.detail


@pytest.mark.parametrize("name", TARGETS)
def test_a_seed_makes_the_same_inputs(name: str, tmp_path: Path) -> None:
    first, second = ([fuzz.input_of(target, name, 3, i) for i in range(6)] for target in [TARGETS[name](tmp_path)] * 2)
    assert first == second
    assert len(set(first)) > 3


# ------------------------------------------------------------------------------------------------- the watch watches


def raises(error: BaseException):
    def run(path: Path) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("it is wrong: mend it"), REFUSED),
        (FileNotFoundError("there is no file: name one"), REFUSED),
        (TypeError("unhashable type"), "crash: TypeError"),
        (RecursionError("too deep"), "crash: RecursionError"),
        (MemoryError(), "crash: MemoryError"),
        (SystemExit(1), "crash: SystemExit"),
        (AssertionError("no result"), "wrong result"),
        (ValueError("one\ntwo"), "message of several lines"),
        (ValueError(""), "message empty"),
        (ValueError("x" * 5000), "message longer than 1500 characters"),
        (ValueError("re-run with weights_only=False"), "message advice to run code"),
    ],
    ids=repr,
)
def test_errors_are_judged(error: BaseException, kind: str, tmp_path: Path) -> None:
    assert judge(raises(error), tmp_path).kind == kind


def write_elsewhere(path: Path) -> None:
    Path(os.devnull).open("w").close()


def run_in_secret(path: Path) -> None:
    try:
        os.system("true")
    except BaseException as error:
        raise ValueError("nothing happened: go on") from error


@pytest.mark.parametrize(
    "run",
    [
        lambda path: os.system("true"),
        lambda path: subprocess.run(["true"], check=False),
        lambda path: __import__("pickle").loads(dangerous_pickle(path)),
        lambda path: __import__("socket").create_connection(("127.0.0.1", 9)),
        lambda path: __import__("this_is_not_installed"),
        write_elsewhere,
        run_in_secret,
        lambda path: (path / "marker").touch(),
    ],
    ids=["system", "subprocess", "pickle", "socket", "import", "write", "hidden", "marker"],
)
def test_code_that_runs_is_seen(run, tmp_path: Path, watch: Watch) -> None:
    assert judge(run, tmp_path, watch, tmp_path / "marker").kind == "code"


def test_code_of_a_real_file_is_seen_where_it_is_read_without_care(tmp_path: Path, watch: Watch) -> None:
    import torch

    path = tmp_path / "input.pth"
    path.write_bytes(next(seed for seed in TARGETS["weights"](tmp_path).seeds if b"touch" in seed))  # type: ignore[attr-defined]
    outcome = judge(lambda path: torch.load(path, weights_only=False), path, watch, tmp_path / "marker")
    assert outcome.kind == "code"


def test_slow_and_large_inputs_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(path: Path) -> None:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass

    monkeypatch.setattr(contract, "MOST_SECONDS", 0.01)
    assert judge(busy, tmp_path).kind == "slow"


def test_a_refused_file_that_changes_the_model_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TARGETS["weights"](tmp_path)

    def careless(model, path: Path) -> None:
        model.norm.weight.data.add_(1)
        raise ValueError("too late: begin again")

    monkeypatch.setattr("fuzzing.targets.load_checkpoint", careless)
    assert judge(target.run, tmp_path).kind == "wrong result"


# ------------------------------------------------------------------------------------------------- the runner


def worker(code: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.integration
def test_workers_that_die_or_hang_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    first = """import json, os, time; print(json.dumps([0, "refused", ""]), flush=True); """
    found = list(fuzz.outcomes(worker(first + "os.abort()")))
    assert [outcome.kind for outcome in found] == [REFUSED, "death by signal 6"]
    monkeypatch.setattr(fuzz, "PATIENCE", 3.0)
    found = list(fuzz.outcomes(worker(first + "time.sleep(60)")))
    assert [outcome.kind for outcome in found] == [REFUSED, "hang"]
    assert [outcome.kind for outcome in fuzz.outcomes(worker(first))] == [REFUSED]
    with pytest.raises(RuntimeError, match="a worker has failed"):
        list(fuzz.outcomes(worker("1 / 0")))


@pytest.mark.slow
def test_the_command_prints_a_table(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "--inputs", "5", "--findings", str(tmp_path), "labels"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "| target | inputs | accepted | refused | crashes | code runs | seconds |" in done.stdout
    assert "| labels | 5 |" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_findings_are_saved(tmp_path: Path) -> None:
    fuzz.keep("labels", 3, Outcome("crash: TypeError", "Traceback \ud800"), Path("input.yaml"), tmp_path, 0)
    (text,) = (tmp_path / "labels").glob("*.txt")
    assert text.read_text().startswith("crash: TypeError\nTraceback")
    assert text.with_suffix(".yaml").read_bytes() == fuzz.input_of(TARGETS["labels"](tmp_path), "labels", 0, 3)


def test_changes_change_something() -> None:
    content, tree = bytes(range(200)), {"a": [1, {"b": 2}], "c": "x"}
    changed = [change_bytes(content, Random(seed), [content], [b"token"]) for seed in range(200)]
    assert sum(one != content for one in changed) > 180
    assert any(b"token" in one for one in changed)
    trees = [change_tree(tree, Random(seed)) for seed in range(200)]
    assert sum(one != tree for one in trees) > 150
    assert tree == {"a": [1, {"b": 2}], "c": "x"}
    assert write_nested('{"a": "@list-3"}') == '{"a": [[[1]]]}'


def test_the_model_of_the_fuzzers_has_all_kinds_of_weights() -> None:
    names = set(tiny_model().state_dict())
    assert {"stages.0.cls_token", "stages.0.pos_embed", "head.weight", "stages.0.patch_embed.proj.weight"} <= names

"""The table of studies, the order of its runs, and the recipes that are rows of it."""

import shlex

import pytest

from inlinevit.cli.train import parse_config
from inlinevit.engine.config import flattened, to_plain
from inlinevit.experiments.reproduce import describe_studies
from inlinevit.experiments.reproduce.studies import (
    SOFTMAX,
    STUDIES,
    WINDOWED,
    Cell,
    Study,
    cell_config,
    cells_of,
    plan,
)
from inlinevit.experiments.reproduce.tables import train_command
from inlinevit.recipes import HOME
from inlinevit.tasks.classification.model import build_model
from tests import slow_except

CELLS = cells_of(STUDIES.values())


def test_first_seeds_come_first_and_nothing_twice(small_studies: dict[str, Study]) -> None:
    names = [run.name for run in plan({"first": 1, "second": 2})]
    assert names == ["softmax-seed0", "linear-seed0", "inline-seed0", "softmax-seed1", "inline-seed1"]
    assert [run.name for run in plan({"first": 2})][2:] == ["softmax-seed1", "linear-seed1"]


def test_cells_of_one_key_are_the_same() -> None:
    """Studies that share a key share its runs."""
    for study in STUDIES.values():
        for cell in study.cells:
            assert cell in CELLS
    assert len(CELLS) == 27
    assert len(plan({name: study.seeds for name, study in STUDIES.items()})) == 70


def test_claims_speak_of_cells_of_their_study() -> None:
    for study in STUDIES.values():
        assert all(cell in study.cells for claim in study.claims for cell in (claim.better, claim.worse))


@pytest.mark.parametrize("cell", slow_except(CELLS, *CELLS[::9]), ids=[cell.key for cell in CELLS])
def test_a_command_trains_each_row_alone(cell: Cell) -> None:
    words = shlex.split(train_command(cell, seed=1))
    assert words[:2] == ["inlinevit", "train"]
    assert parse_config(words[2:]) == cell_config(cell, seed=1)


@pytest.mark.parametrize("cell", [SOFTMAX, WINDOWED[16, True]], ids=["reproduce", "reproduce_16x16"])
def test_recipes_are_rows(cell: Cell) -> None:
    assert parse_config(["--config", cell.recipe]) == cell_config(cell)
    assert f'row "{cell.label}"' in (HOME / "classification" / f"{cell.recipe}.yaml").read_text()


def test_runs_of_one_model_differ_in_its_options_only() -> None:
    first, *others = [flattened(to_plain(cell_config(cell))) for cell in CELLS if cell.recipe == CELLS[0].recipe]
    for other in others:
        changed = {name for name in first.keys() | other.keys() if first.get(name) != other.get(name)}
        own = ("model.kwargs.attention", "model.kwargs.attn_kwargs", "run.output")
        assert all(name.startswith(own) for name in changed)


@pytest.mark.parametrize("cell", CELLS, ids=[cell.key for cell in CELLS])
def test_every_cell_has_a_model(cell: Cell) -> None:
    model = build_model(cell_config(cell).model, num_classes=10)
    assert sum(parameter.numel() for parameter in model.parameters()) > 10_000


def test_description_names_all() -> None:
    text = describe_studies()
    assert all(f"{name}: {study.title}" in text for name, study in STUDIES.items())
    assert all(f"/{cell.key}, " in text for cell in CELLS)
    assert "27 different cells, 70 runs of 1000 steps" in text

"""The table of studies, the order of its runs, and the recipes that are rows of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inlinevit.cli.train import parse_config
from inlinevit.engine.config import flattened, to_plain
from inlinevit.experiments.reproduce import describe_studies, studies
from inlinevit.experiments.reproduce.ablations import SOFTMAX, WINDOWED
from inlinevit.experiments.reproduce.comparison import COMPARED, COMPILED, CORES, NOTHING
from inlinevit.experiments.reproduce.design import Cell, Run, Study
from inlinevit.experiments.reproduce.estimate import SECONDS_PER_STEP, run_hours
from inlinevit.experiments.reproduce.record import recipe_digest
from inlinevit.experiments.reproduce.studies import (
    STUDIES,
    cells_of,
    choose_studies,
    plan,
    rate_runs,
    recipe_of,
    run_config,
    seeds_by_cell,
    steps_of,
)
from inlinevit.layers import ATTENTIONS
from inlinevit.recipes import HOME
from inlinevit.tasks.classification.model import build_model
from inlinevit.utils.seeding import set_seed
from tests import slow_except

CELLS = cells_of(STUDIES.values())


def test_first_seeds_come_first_and_nothing_twice(small_studies: dict[str, Study]) -> None:
    names = [run.name for run in plan(small_studies)]
    assert names == ["softmax-seed0", "linear-seed0", "inline-seed0", "softmax-seed1", "inline-seed1"]
    first = {"first": small_studies["first"]}
    assert [run.name for run in plan(first, 2)][2:] == ["softmax-seed1", "linear-seed1"]


def test_cells_of_one_key_are_the_same() -> None:
    """Studies that share a key share its runs."""
    for study in STUDIES.values():
        for cell in study.cells:
            assert cell in CELLS


def test_rows_of_claims_have_three_seeds_and_others_one() -> None:
    counts = seeds_by_cell(STUDIES)
    for study in STUDIES.values():
        assert all(counts[cell.key] >= 3 for claim in study.claims for cell in (claim.better, claim.worse))
    assert counts["inline-exp"] == 1
    # A part of a study keeps its seeds, although the claim is left out.
    assert seeds_by_cell(choose_studies(["injectivity/linear-relu"])) == {"linear-relu": 3}


def test_claims_speak_of_cells_of_their_study() -> None:
    for study in STUDIES.values():
        assert all(cell in study.cells for claim in study.claims for cell in (claim.better, claim.worse))


def test_patterns_choose_cells() -> None:
    chosen = choose_studies(["comparison/c16-plain-*", "recall/*-inline"])
    assert [cell.key for cell in chosen["comparison"].cells] == [f"c16-plain-{name}" for name in CORES]
    assert all(cell.kwargs["attention"] == "inline" for cell in chosen["recall"].cells)
    assert len(chosen["recall"].cells) == 5


@pytest.mark.parametrize(
    "cell", [SOFTMAX, WINDOWED[16, True], COMPARED["plain"]["softmax"]], ids=lambda cell: cell.recipe
)
def test_recipes_are_rows(cell: Cell) -> None:
    assert parse_config(["--config", cell.recipe]) == run_config(Run(cell, 0))
    assert f'row "{cell.label}"' in (HOME / "classification" / f"{cell.recipe}.yaml").read_text()


def test_runs_of_one_model_differ_in_its_options_only() -> None:
    for recipe in {cell.recipe for cell in CELLS}:
        cells = [cell for cell in CELLS if cell.recipe == recipe][::5]
        first, *others = [flattened(to_plain(run_config(Run(cell, 0)))) for cell in cells]
        for other in others:
            changed = {name for name in first.keys() | other.keys() if first.get(name) != other.get(name)}
            kwargs = ("attention", "attn_kwargs", "window_size")
            own = (*(f"model.kwargs.{name}" for name in kwargs), "run.compile", "run.output")
            sizes = ("data.path", "data.batch_size", "model.img_size", "model.kwargs.num_heads")
            assert all(name.startswith((*own, *(sizes if cells[0].is_generated else ()))) for name in changed)


@pytest.mark.parametrize("available", [True, False])
def test_rows_with_many_operators_are_compiled_where_there_is_a_compiler(
    available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(COMPILED) < set(CORES)
    monkeypatch.setattr(studies, "has_compiler", lambda: available)
    for name, cell in COMPARED["common"].items():
        assert run_config(Run(cell, 0)).run.compile == (available and name in COMPILED)
    # The results of a machine without a compiler are those of the same recipe.
    cell = COMPARED["plain"]["mala"]
    assert recipe_digest(cell) == recipe_digest(replace(cell, changes={}))


def test_runs_on_cifar10_have_five_epochs() -> None:
    for cell in CELLS:
        if not cell.is_generated:
            assert steps_of(Run(cell, 0)) == 5 * (50_000 // recipe_of(cell)["data"]["batch_size"])


@pytest.mark.parametrize("cell", slow_except(CELLS, *CELLS[::4]), ids=[cell.key for cell in CELLS])
def test_every_cell_has_a_model(cell: Cell) -> None:
    model = build_model(run_config(Run(cell, 0)).model, num_classes=10)
    assert sum(parameter.numel() for parameter in model.parameters()) > 10_000


def test_models_of_one_size_start_from_the_same_weights() -> None:
    """Only then are runs paired by seed."""

    def initial(cell: Cell) -> dict[str, Tensor]:
        set_seed(3)
        return build_model(run_config(Run(cell, 0)).model, num_classes=10).state_dict()

    claims = [*STUDIES["injectivity"].claims, *STUDIES["softmax"].claims, *STUDIES["comparison"].claims[:7]]
    cells = {cell.key: cell for claim in claims for cell in (claim.better, claim.worse)}
    weights = {key: initial(cell) for key, cell in cells.items()}
    sizes = {key: sum(value.numel() for value in state.values()) for key, state in weights.items()}
    paired = 0
    for claim in claims:
        first, second = claim.better.key, claim.worse.key
        if {first, second} <= weights.keys() and sizes[first] == sizes[second]:
            paired += 1
            assert weights[first].keys() == weights[second].keys()
            assert all(torch.equal(value, weights[second][name]) for name, value in weights[first].items())
    # The four pairs of injectivity, and softmax with unit queries, at least.
    assert paired >= 5


def test_every_attention_is_compared() -> None:
    # Enhanced attention is linear attention with a convolution in the MLP: a row of "baselines".
    assert {*CORES, "enhanced"} == set(ATTENTIONS)


def test_cores_are_compared_with_the_same_surroundings() -> None:
    for name in CORES:
        plain, common = (COMPARED[word][name].kwargs["attn_kwargs"] for word in ("plain", "common"))
        assert {key: plain[key] for key in NOTHING} == NOTHING
        assert {key for key in plain if plain[key] != common[key]} == {"gate", "lepe"}
        assert (common["gate"], common["lepe"]) == (True, 3)


def test_rates_are_chosen_without_test_images(tmp_path: Path) -> None:
    (tmp_path / "train.tar").touch()
    runs = rate_runs([SOFTMAX, STUDIES["recall"].cells[0]])
    assert [run.name for run in runs[:3]] == ["rates/softmax-lr0.001", "rates/softmax-lr0.002", "rates/softmax-lr0.004"]
    config = run_config(runs[2], data=str(tmp_path))
    assert (config.data.path, config.data.eval_share) == (str(tmp_path / "train.tar"), 0.1)
    assert (config.optimizer.lr, config.schedule.min_lr, config.schedule.steps) == (0.004, 4e-5, 488)
    assert run_config(runs[0], data="folder").data.path == "folder/train"
    assert run_config(runs[3]).data.eval_split == "val"
    assert steps_of(runs[3]) == 1000
    assert run_config(Run(runs[3].cell, 0)).data.eval_split == "test"


def test_description_names_all() -> None:
    text = describe_studies()
    assert all(f"{name}: {study.title}" in text for name, study in STUDIES.items())
    assert all(f"/{cell.key}, " in text for cell in CELLS)
    runs = plan(STUDIES)
    assert f"{len(CELLS)} different cells, {len(runs)} runs of 2,000 or 3,905 steps" in text
    assert f"{3 * len(CELLS)} shorter ones" in text
    assert "200 steps; about" in describe_studies(["softmax"], steps=200, select=False)


def test_estimates_follow_steps_images_and_finished_runs(tmp_path: Path) -> None:
    assert set(SECONDS_PER_STEP) == {cell.recipe for cell in CELLS}
    run = Run(SOFTMAX, 0)
    full = run_hours(run, tmp_path)
    assert full == pytest.approx(SECONDS_PER_STEP["reproduce"] * (steps_of(run) + 60) / 3600)
    (tmp_path / "softmax-seed3").mkdir()
    metrics = {"metrics": {"top1": 50.0, "loss": 1.0}}
    (tmp_path / "softmax-seed3" / "results.json").write_text(json.dumps(metrics))
    (tmp_path / "softmax-seed3" / "time.json").write_text(f'{{"seconds": 1.0, "cpu_seconds": {3600 * 2 * full}}}')
    assert run_hours(run, tmp_path) == pytest.approx(2 * full)
    small, large = (STUDIES["connectivity"].cells[place] for place in (0, -1))
    # Four times as many tokens, a quarter of the images.
    assert run_hours(Run(small, 0), tmp_path) == pytest.approx(run_hours(Run(large, 0), tmp_path))

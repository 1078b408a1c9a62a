"""The recipes of every task, through the parser of its command."""

import pytest

from inlinevit.engine.config import flattened, to_plain
from inlinevit.recipes import HOME, describe_recipe, recipe_names
from inlinevit.tasks import TASKS
from tests.tasks.recipes import parse_recipe, stated_settings


@pytest.mark.parametrize("task", TASKS)
def test_recipes_are_understood_and_described(task: str) -> None:
    names = recipe_names(task)
    assert TASKS[task].recipe in names
    for name in names:
        settings = stated_settings(task, name)
        fields = flattened(to_plain(parse_recipe(task, name)))
        # Arguments of models are free.
        assert {field for field in settings if ".kwargs" not in field} <= set(fields), name
        assert describe_recipe(HOME / task / f"{name}.yaml"), name
        assert settings["run.output"].startswith("runs/"), name


@pytest.mark.parametrize("task", TASKS)
def test_options_override_a_recipe(task: str) -> None:
    name = TASKS[task].recipe
    before = parse_recipe(task, name)
    config = parse_recipe(task, name, "--data.path", "images", "--run.seed", "50")
    assert (config.data.path, config.run.seed) == ("images", 50)
    assert (config.schedule, config.model) == (before.schedule, before.model)

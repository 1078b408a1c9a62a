"""Recipes of any task, for the tests that hold them against tables of settings."""

from functools import cache
from typing import Any

from inlinevit.cli.train import parse_config
from inlinevit.engine.config import flattened
from inlinevit.recipes import load_recipe


@cache
def parse_recipe(task: str, name: str, *overrides: str) -> Any:
    """A recipe, as `inlinevit … train` reads it."""
    return parse_config(["--config", name, *overrides], task=task)


@cache
def stated_settings(task: str, name: str) -> dict[str, Any]:
    """The fields of a recipe with those of its bases, in their order."""
    return flattened(load_recipe(name, task))


def model_title(backbone: str) -> str:
    """What descriptions of recipes call a backbone: InLine-PVT-T."""
    _, family, size = backbone.split("_")
    return f"InLine-{ {'pvt': 'PVT', 'swin': 'Swin'}[family] }-{size[0].upper()}"

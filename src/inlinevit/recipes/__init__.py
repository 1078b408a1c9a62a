"""The shipped recipes, by task and name, and how a recipe is read.

A recipe is a YAML file with fields of the configuration of a training run. `base: NAME` starts from another recipe, a
file beside it or a shipped one of the same task; sections and `model.kwargs` are merged field by field. The first line
of a recipe is a comment that describes it. Names with a leading underscore are only bases of others.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tasks import TASKS
from ..utils.files import parse_yaml, read_text, read_yaml
from ..utils.validation import did_you_mean, require

HOME = Path(__file__).parent
# The tasks that have recipes, and the commands that take them.
COMMANDS = {task.name: f"inlinevit {task.command_line('train')}" for task in TASKS.values()}
LIST = "`inlinevit recipes` lists the shipped ones"
# (section, field) of files that belong to a recipe: their paths are relative to the recipe that names them. Data and
# results do not belong to it: their paths are relative to the working directory, as on the command line.
COMPANION_FILES = (("data", "labels"),)


@dataclass(frozen=True)
class RecipeFile:
    """One file of a recipe: itself, its base, the base of that, ….

    Attributes:
        file: Where it was read from.
        content: What it says, without `base`; anything, as its form is not checked here.
    """

    file: Path
    content: Any


def recipe_names(task: str) -> list[str]:
    """Return the names of the shipped recipes of a task."""
    return sorted(file.stem for file in (HOME / task).glob("*.yaml") if not file.stem.startswith("_"))


def describe_recipe(file: Path) -> str:
    """Return the first line of a recipe, which is a comment."""
    return read_text(file).partition("\n")[0].removeprefix("#").strip()


def find_recipe(name: str, task: str) -> Path:
    """Return the file of a recipe.

    Args:
        name: A path, if there is such a file, or if it has a separator or ends in .yaml; else the name of a shipped
            recipe of the task.
        task: One of COMMANDS.

    Raises:
        ValueError: There is no such recipe.
    """
    file = Path(name)
    if os.path.exists(file) and not file.is_dir():
        return file
    if os.sep in name or name.endswith((".yaml", ".yml")):
        beside = [str(path) for path in file.parent.glob("*.yaml")]
        near = did_you_mean(name, beside) or did_you_mean(file.stem, recipe_names(task)) or LIST
        raise ValueError(f"there is no recipe file {name}: {near}")
    if name in recipe_names(task):
        return HOME / task / f"{name}.yaml"
    for other, command in COMMANDS.items():
        require(other == task or name not in recipe_names(other), f"{name} is a recipe for `{command}`: {LIST}")
    raise ValueError(f"there is no recipe called {name!r} for {task}: {did_you_mean(name, recipe_names(task)) or LIST}")


def find_base(name: Any, file: Path, task: str) -> Path:
    """Return the file of the base of a recipe: one beside it, or a shipped one.

    Args:
        name: What the recipe says.
        file: The recipe.
        task: One of COMMANDS.
    """
    is_name = isinstance(name, str) and bool(name) and Path(name).name == name
    require(is_name, f"base is {name!r:.80}: it should be the name of a recipe, without folder and .yaml")
    places = [file.parent / f"{name}.yaml", HOME / task / f"{name}.yaml"]
    known = [*recipe_names(task), *(path.stem for path in file.parent.glob("*.yaml"))]
    for place in places:
        if place.is_file():
            return place
    raise ValueError(f"there is no recipe called {name!r} to be its base: {did_you_mean(name, known) or LIST}")


def read_recipe_files(file: Path, task: str) -> list[RecipeFile]:
    """Read a recipe and its bases, itself first.

    Args:
        file: The recipe; a pipe is read once.
        task: One of COMMANDS.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is not valid YAML, its base does not exist, or it is its own base.
    """
    files: list[RecipeFile] = []
    seen: list[str] = []
    place: Path | None = file
    while place is not None:
        real = os.path.realpath(place)
        require(real not in seen, f"{place} is its own base: {' → '.join([*(one.file.stem for one in files), '…'])}")
        seen.append(real)
        is_pipe = stat.S_ISFIFO(os.stat(place).st_mode)
        content = parse_yaml(place.read_text(encoding="utf-8")) if is_pipe else read_yaml(place)
        base = content.pop("base", None) if isinstance(content, dict) else None
        files.append(RecipeFile(place, content if is_pipe else with_companions(content, place.absolute().parent)))
        place = None if base is None else find_base(base, place, task)
    return files


def with_companions(content: Any, folder: Path) -> Any:
    """Return a recipe in which the paths of its companion files start from its folder."""
    for section, field in COMPANION_FILES:
        fields = content.get(section) if isinstance(content, dict) else None
        if isinstance(fields, dict) and isinstance(fields.get(field), str):
            content = {**content, section: {**fields, field: str(folder / fields[field])}}
    return content


def merge_recipe_files(files: Sequence[RecipeFile]) -> dict[str, Any]:
    """Merge a recipe with its bases; what is nearer to the recipe wins.

    Args:
        files: The recipe, its base, the base of that, …; each is a dict.
    """
    merged: dict[str, Any] = {}
    for one in reversed(files):
        require(isinstance(one.content, dict), f"{one.file} does not hold fields")
        merged = merge(merged, one.content)
    return merged


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a dict with changes; dicts inside it are merged, too."""
    merged = dict(base)
    for name, value in changes.items():
        before = merged.get(name)
        merged[name] = merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def load_recipe(name: str, task: str) -> dict[str, Any]:
    """Return the fields of a recipe with those of its bases.

    Args:
        name: See find_recipe.
        task: One of COMMANDS.
    """
    return merge_recipe_files(read_recipe_files(find_recipe(name, task), task))

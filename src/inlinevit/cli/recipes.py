"""`inlinevit recipes`: the shipped recipes."""

from jsonargparse import ArgumentParser, Namespace

from ..recipes import COMMANDS, HOME, LIST, describe_recipe, load_recipe, recipe_names
from ..utils.validation import did_you_mean, require
from .commands import Command
from .parsing import new_parser


def make_parser() -> ArgumentParser:
    """Return the parser of `inlinevit recipes`."""
    description = "List the recipes that --config takes by name, or print one of them with all of its fields."
    parser = new_parser("recipes", description, "[NAME] [--task TASK]")
    parser.add_argument("name", nargs="?", type=str, default=None, metavar="NAME", help="print this recipe")
    parser.add_argument("--task", choices=tuple(COMMANDS), default=None, help="list the recipes of one task")
    return parser


def run(settings: Namespace) -> None:
    """Print the names of recipes, or a recipe."""
    tasks = {name: task for task in COMMANDS for name in recipe_names(task) if settings.task in (None, task)}
    if settings.name is None:
        print_list(tasks)
        return
    remedy = did_you_mean(settings.name, tasks) or LIST
    require(settings.name in tasks, f"there is no recipe called {settings.name!r}: {remedy}")
    print_recipe(settings.name, tasks[settings.name])


def print_list(tasks: dict[str, str]) -> None:
    """Print the names of recipes with their tasks and descriptions.

    Args:
        tasks: The task of each recipe, by its name.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "name", "task", "description", caption="--config NAME takes them; `inlinevit recipes NAME` prints one"
    )
    table.columns[0].no_wrap = True
    for name, task in tasks.items():
        table.add_row(name, task, Text(describe_recipe(HOME / task / f"{name}.yaml")))
    Console().print(table)


def print_recipe(name: str, task: str) -> None:
    """Print a recipe with the fields of its bases, as YAML that --config takes."""
    import yaml

    print(f"# {describe_recipe(HOME / task / f'{name}.yaml')}\n# {COMMANDS[task]} --config {name}")
    print(yaml.safe_dump(load_recipe(name, task), sort_keys=False), end="")


COMMAND = Command(make_parser, run)

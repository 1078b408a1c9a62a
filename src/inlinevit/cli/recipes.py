"""`inlinevit recipes`: the shipped recipes."""

from jsonargparse import ArgumentParser, Namespace

from ..recipes import COMMANDS, HOME, LIST, describe_recipe, load_recipe, recipe_names
from ..utils.validation import did_you_mean, require
from .parsing import new_parser


def make_parser() -> ArgumentParser:
    """Return the parser of `inlinevit recipes`."""
    description = "List the recipes that --config takes by name, or print one of them with all of its fields."
    parser = new_parser("recipes", description, "[NAME] [--task TASK]")
    parser.add_argument("name", nargs="?", type=str, default=None, metavar="NAME", help="print this recipe")
    parser.add_argument("--task", choices=tuple(COMMANDS), default=None, help="list the recipes of one task")
    return parser


def run(settings: Namespace) -> None:
    """Print the names and descriptions of recipes, task by task, or a recipe as YAML that --config takes."""
    tasks = {name: task for task in COMMANDS for name in recipe_names(task) if settings.task in (None, task)}
    about = {name: describe_recipe(HOME / task / f"{name}.yaml") for name, task in tasks.items()}
    if settings.name is not None:
        import yaml

        name, remedy = settings.name, did_you_mean(settings.name, tasks) or LIST
        require(name in tasks, f"there is no recipe called {name!r}: {remedy}")
        print(f"# {about[name]}\n# {COMMANDS[tasks[name]]} --config {name}")
        print(yaml.safe_dump(load_recipe(name, tasks[name]), sort_keys=False), end="")
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ..utils.console import new_console

    console = new_console()
    # A table per task: most names are short, and leave the descriptions more of a terminal of 80 columns.
    for task in dict.fromkeys(tasks.values()):
        table = Table(
            "name",
            "description",
            title=f"{task}: {COMMANDS[task]} --config NAME",
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
        )
        table.columns[0].no_wrap = True
        for name in recipe_names(task):
            table.add_row(name, Text(about[name]))
        console.print(table)
    console.print("`inlinevit recipes NAME` prints one with all of its fields", highlight=False)

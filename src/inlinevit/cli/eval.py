"""`inlinevit [TASK] eval`: evaluate a model."""

from functools import partial

from jsonargparse import ArgumentParser, Namespace

from ..tasks import TaskEntry
from .commands import Command
from .parsing import add_model, add_options, new_parser, to_config


def make_parser(entry: TaskEntry) -> ArgumentParser:
    """Return the parser: a model, and the task's EvalOptions."""
    usage = f"{'MODEL' if entry.needs_model else '[MODEL]'} [options]"
    parser = new_parser(entry.command_line("eval"), f"Evaluate a model for {entry.description}.", usage)
    if entry.needs_model:
        add_model(parser, entry)
    else:
        about = "folder of a training run"
        parser.add_argument("model", nargs="?", type=str, default=None, metavar="MODEL", help=about)
    add_options(parser, entry.load_eval_options())
    return parser


def run(entry: TaskEntry, settings: Namespace) -> None:
    """Evaluate a model."""
    from ..engine.evaluator import eval_command

    eval_command(entry.load_task(), settings.model, to_config(settings, entry.load_eval_options()))


def make_command(entry: TaskEntry) -> Command:
    """Return the command of a task."""
    return Command(partial(make_parser, entry), partial(run, entry))

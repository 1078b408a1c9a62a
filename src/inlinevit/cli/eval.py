"""`inlinevit [TASK] eval`: evaluate a model."""

from jsonargparse import ArgumentParser, Namespace

from ..tasks import TaskEntry
from .parsing import add_import, add_model, add_options, new_parser, to_config


def make_parser(entry: TaskEntry) -> ArgumentParser:
    """Return the parser: a model, and the task's EvalOptions."""
    usage = f"{'MODEL' if entry.needs_model else '[MODEL]'} [options]"
    parser = new_parser(entry.command_line("eval"), f"Evaluate a model for {entry.description}.", usage)
    add_model(parser, entry, nargs=None if entry.needs_model else "?")
    add_import(parser)
    add_options(parser, entry.load_eval_options())
    return parser


def run(entry: TaskEntry, settings: Namespace) -> None:
    """Evaluate a model."""
    from ..engine.evaluator import eval_command

    eval_command(entry.load_task(), settings.model, to_config(settings, entry.load_eval_options()))

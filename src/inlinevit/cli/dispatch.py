"""From the words of a command line to the command that they name, and to an exit code."""

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import NoReturn

from .. import __version__
from ..utils.modules import import_modules
from .commands import Command, Entry, resolve
from .errors import TRACEBACK, report_error, show_warning


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; this is what `inlinevit` on the command line calls.

    Args:
        arguments: The words after `inlinevit`; None = those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = show_warning
    options: list[str] = []
    try:
        prefix, target, rest = resolve(words)
        if not isinstance(target, Command):
            options = list(target)
            overview = overview_parser(prefix, target)
            overview.parse_args(rest) if words else overview.print_help()
            return
        parser = target.make_parser()
        options = option_names(parser)
        settings = parser.instantiate(parser.parse_args(list(rest)))
        import_modules(getattr(parser, "imports", ()))
        code = target.run(settings)
    except BrokenPipeError:
        # The reader of the output has closed it. Python must not try to write the rest when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        sys.exit(report_error(error, options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    if code:
        sys.exit(code)


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Return what the user could have meant by a wrong option: data.path, …."""
    return [option.lstrip("-") for action in parser._actions for option in action.option_strings]


class OverviewParser(argparse.ArgumentParser):
    """A parser that raises what is wrong with a command line instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """See argparse.ArgumentParser.error."""
        raise argparse.ArgumentError(None, message)


def overview_parser(prefix: Sequence[str], commands: Mapping[str, Entry]) -> argparse.ArgumentParser:
    """Return the parser for what does not name a command: help, version, mistakes.

    Args:
        prefix: The words that the commands come after, such as ["detect"].
        commands: What can come next.
    """
    name = " ".join(("inlinevit", *prefix))
    parser = OverviewParser(
        prog=name,
        usage=f"{name} COMMAND [options]",
        description="Vision transformers with InLine attention." if not prefix else None,
        epilog=f"`{name} COMMAND --help` lists the options of a command. "
        f"Set {TRACEBACK}=1 to see where an error comes from.",
        exit_on_error=False,
    )
    if not prefix:
        parser.add_argument("--version", action="version", version=f"inlinevit {__version__}")
    subparsers = parser.add_subparsers(required=True, title="commands", metavar="COMMAND", parser_class=OverviewParser)
    for command, entry in commands.items():
        subparsers.add_parser(command, help=entry.help)
    return parser

"""`inlinevit reproduce`: the paper's ablations, all attentions compared, and diagnostics."""

import shutil
import textwrap

from jsonargparse import ArgumentParser, Namespace

from ..experiments.reproduce import describe_studies, reproduce
from ..utils.validation import require
from .parsing import add_options, new_parser

# Options that --list uses.
LISTED = ("studies", "output", "seeds", "steps", "select")


def make_parser() -> ArgumentParser:
    """Return the parser: the arguments of reproduce(), and --list."""
    description = (
        "Train the paper's ablations and a comparison of all attentions on CIFAR-10, and two diagnostics on generated "
        "images; print which claims hold."
    )
    parser = new_parser("reproduce", description, "[STUDY[/CELL]...] [options]")
    about = "names of studies, or some of their cells as STUDY/CELL, where * stands for any letters; all by default"
    parser.add_argument("studies", nargs="*", type=str, metavar="STUDY", default=[], help=about)
    help_list = "list the studies and their cells with the expected processor time, and train nothing"
    parser.add_argument("--list", action="store_true", help=help_list)
    add_options(parser, reproduce, skip=["studies"])
    return parser


def run(settings: Namespace) -> int:
    """Train what is missing of the studies, or list them."""
    options = vars(settings)
    if not options.pop("list"):
        return reproduce(**options)
    defaults = make_parser().get_defaults()
    unused = [name for name, value in options.items() if name not in LISTED and value != defaults[name]]
    require(not unused, f"--list trains nothing, so --{' and --'.join(unused)} would have no effect: leave it out")
    text = describe_studies(**{name: options[name] for name in LISTED})
    print(wrap_lines(text, shutil.get_terminal_size().columns))
    return 0


def wrap_lines(text: str, width: int) -> str:
    """Return a text whose lines have at most `width` characters: what is too long continues on indented lines."""
    wrapped = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        # Names are copied from here: they are not broken.
        wrapped.append(
            textwrap.fill(
                line,
                width,
                subsequent_indent=f"{indent}    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(wrapped)

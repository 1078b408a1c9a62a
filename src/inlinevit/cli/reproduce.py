"""`inlinevit reproduce`: the paper's ablations, all attentions compared, and diagnostics."""

from jsonargparse import ArgumentParser, Namespace

from ..experiments.reproduce import describe_studies, reproduce
from ..utils.validation import require
from .parsing import add_import, add_options, new_parser

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
    add_import(parser)
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
    print(describe_studies(**{name: options[name] for name in LISTED}))
    return 0

"""`inlinevit reproduce`: the paper's ablations on CIFAR-10."""

from jsonargparse import ArgumentParser, Namespace

from ..experiments.reproduce import describe_studies, reproduce
from ..utils.validation import require
from .parsing import add_import, add_options, new_parser


def make_parser() -> ArgumentParser:
    """Return the parser: the arguments of reproduce(), and --list."""
    description = "Train the paper's ablations on CIFAR-10, and print which of its claims hold."
    parser = new_parser("reproduce", description, "[STUDY[/CELL]...] [options]")
    about = "names of studies, or single cells as STUDY/CELL; all studies by default"
    parser.add_argument("studies", nargs="*", type=str, metavar="STUDY", default=[], help=about)
    parser.add_argument("--list", action="store_true", help="list the studies and their cells, and train nothing")
    add_import(parser)
    add_options(parser, reproduce, skip=["studies"])
    return parser


def run(settings: Namespace) -> int:
    """Train what is missing of the paper's ablations, or list them."""
    options = vars(settings)
    if not options.pop("list"):
        return reproduce(**options)
    defaults = make_parser().get_defaults()
    unused = [name for name, value in options.items() if name != "studies" and value != defaults[name]]
    require(not unused, f"--list trains nothing, so --{' and --'.join(unused)} would have no effect: leave it out")
    print(describe_studies(settings.studies))
    return 0

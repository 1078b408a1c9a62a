"""`inlinevit reproduce`: the paper's ablations on CIFAR-10."""

from jsonargparse import ArgumentParser, Namespace

from ..utils.validation import require
from .commands import Command
from .parsing import add_options, new_parser


def reproduce(
    studies: list[str],
    data: str | None = None,
    output: str = "runs/reproduce",
    jobs: int | None = None,
    seeds: int | None = None,
    steps: int = 1000,
) -> int:
    """Train what is missing of some studies, print their tables, and write all results to OUTPUT/results.json.

    Args:
        studies: Names of studies; none = all.
        data: Folder of CIFAR-10's train.tar and test.tar, or of the folders train and test; null = show the results
            and train nothing.
        output: Folder of the results, with a folder for each run.
        jobs: Runs at a time, each in a process with one thread; null = one for each core.
        seeds: How often each cell is trained; null = as each study specifies.
        steps: Training steps of each run.

    Returns:
        The exit code: 1 if a run failed for another reason than that it diverged, else 0.
    """
    from ..experiments import reproduce as experiment

    return experiment.reproduce(studies, data, output, jobs, seeds, steps)


def make_parser() -> ArgumentParser:
    """Return the parser: the arguments of reproduce()."""
    description = "Train the paper's ablations on CIFAR-10, and print which of its claims hold."
    parser = new_parser("reproduce", description, "[STUDY...] [options]")
    about = "names of studies; all by default"
    parser.add_argument("studies", nargs="*", type=str, metavar="STUDY", default=[], help=about)
    parser.add_argument("--list", action="store_true", help="list the studies and their cells, and train nothing")
    add_options(parser, reproduce, skip=["studies"])
    return parser


def run(settings: Namespace) -> int:
    """Train what is missing of the paper's ablations, or list them."""
    options = vars(settings)
    if options.pop("list"):
        from ..experiments.reproduce import describe_studies

        defaults = make_parser().get_defaults()
        unused = [name for name, value in options.items() if name != "studies" and value != defaults[name]]
        require(not unused, f"--list trains nothing, so --{' and --'.join(unused)} would have no effect: leave it out")
        print(describe_studies(settings.studies))
        return 0
    return reproduce(**options)


COMMAND = Command(make_parser, run)

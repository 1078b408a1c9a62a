"""`inlinevit bench`: speed and memory."""

import json
from argparse import SUPPRESS
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from ..benchmark.options import BENCHES, OPTIONS_HELP
from ..tasks.classification.config import ClassificationConfig
from ..utils.validation import require
from .commands import Command, Entry
from .parsing import add_import, add_options, add_recipe, new_parser, to_config

# Options that `inlinevit bench loop` does not use, because it neither evaluates nor writes anything.
UNUSED_BY_LOOP = (
    "output",
    "resume",
    "checkpoint_minutes",
    "checkpoint_steps",
    "keep_checkpoints",
    "eval_every",
    "log_every",
    "trackers",
)


def make_study_parser(name: str) -> ArgumentParser:
    """Return the parser of one of BENCHES: its own options, and those that all have."""
    bench = BENCHES[name]
    parser = new_parser(f"bench {name}", f"Measure {bench.help}.")
    add_import(parser)
    own = parser.add_argument_group(f"options of {name}")
    for option, value in bench.options.items():
        default = " ".join(map(str, value)) if isinstance(value, list) else value
        kind: dict[str, Any] = {"nargs": "+", "type": type(value[0])} if isinstance(value, list) else {"type": int}
        about = f"{OPTIONS_HELP[option]}; {default} by default"
        own.add_argument(f"--{option}", **kind, default=SUPPRESS, help=about)
    measuring = parser.add_argument_group("measurement")
    measuring.add_argument("--backward", action="store_true", help="forward and backward instead of forward alone")
    measuring.add_argument("--threads", type=int, default=SUPPRESS, help="threads of torch; as it chooses by default")
    measuring.add_argument("--rounds", type=int, default=SUPPRESS, help="most calls of each candidate; 50 by default")
    about = "seconds after which no further round of a comparison begins; 30 by default"
    measuring.add_argument("--patience", type=float, default=SUPPRESS, help=about)
    modes = (bench.options | bench.quick)["modes"]
    about = f"fewer of all, within a minute; modes: {', '.join(modes)}"
    measuring.add_argument("--quick", action="store_true", help=about)
    measuring.add_argument("--device", type=str, default="cpu", help="cpu or cuda")
    results = parser.add_argument_group("results")
    results.add_argument("--output", type=str, default=None, help="folder for JSON, report and drawings")
    results.add_argument("--name", type=str, default=name, help="name of the files in it")
    return parser


def run_study(what: str, settings: Namespace) -> None:
    """Measure one of BENCHES."""
    from ..benchmark.report import print_results, write_report
    from ..benchmark.studies import run_bench
    from ..engine.outputs import check_output_folder
    from ..utils.console import new_console

    options = vars(settings)
    output, name = options.pop("output"), options.pop("name")
    require(output is not None or name == what, "--name is for the files in --output: name that folder, too")
    require(name not in ("", ".", "..") and Path(name).name == name, f"--name is {name!r}: it should be a plain name")
    if output is not None:
        check_output_folder(output, [f"{name}.{ending}" for ending in ("html", "json", "png", "svg")])
    results = run_bench(what, **options)
    print_results(results, new_console())
    if output is not None:
        print(f"the report is {write_report(results, Path(output), name)}")


def make_loop_parser() -> ArgumentParser:
    """Return the parser of `inlinevit bench loop`."""
    description = "Measure the training loop with the model and the data of a recipe."
    parser = new_parser("bench loop", description, "[--config RECIPE] [options]")
    add_import(parser)
    add_recipe(parser, "classification", "embedded")
    parser.add_argument("--steps", type=int, default=30, help="steps of each kind, interleaved")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_options(parser, ClassificationConfig)
    return parser


def run_loop(settings: Namespace) -> None:
    """Measure the training loop."""
    from rich.table import Table

    from ..benchmark.train_loop import measure_loop
    from ..utils.console import new_console

    config = to_config(settings, ClassificationConfig)
    # A recipe may set them without an effect; an option may not.
    recipes = [word for name in settings.config or [] for word in ("--config", str(name))]
    parser = make_loop_parser()
    recipe = to_config(parser.instantiate(parser.parse_args(recipes)), ClassificationConfig)
    unused = [f"--run.{name}" for name in UNUSED_BY_LOOP if vars(config.run)[name] != vars(recipe.run)[name]]
    require(not unused, f"bench loop writes nothing, so {' and '.join(unused)} would have no effect: leave it out")
    numbers = measure_loop(config, settings.steps)
    if settings.json:
        print(json.dumps(numbers, indent=2))
        return
    table = Table("a step", "ms, quartiles", title=f"{numbers['threads']} threads")
    for name in ("training", "data_only", "loop_on_tensors", "bare_on_tensors"):
        table.add_row(name, "  ".join(f"{1000 * seconds:.1f}" for seconds in numbers[name]))
    new_console().print(table)
    print(f"without a model, the loop is {numbers['times_faster_without_model']:.1f} times as fast")
    print(f"on tensors, the loop takes {numbers['overhead_percent']:.1f} % longer than a bare step")


COMMANDS = {
    **{
        name: Entry(bench.help, partial(Command, partial(make_study_parser, name), partial(run_study, name)))
        for name, bench in BENCHES.items()
    },
    "loop": Entry("what the training loop and data loading cost", partial(Command, make_loop_parser, run_loop)),
}

"""The command line: `inlinevit COMMAND`."""

import errno
import fnmatch
import json
import os
import re
import signal
import sys
import warnings
from argparse import SUPPRESS, ArgumentError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar, cast

from . import __version__
from .tasks import TASKS, TaskEntry
from .utils.files import read_yaml

try:
    from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"{error}: the command line needs pip install 'inlinevit[cli]'") from error

if TYPE_CHECKING:
    from .engine.config import TrainConfig
    from .engine.task import Task
    from .tasks.classification.config import ClassificationConfig
    from .tasks.detection.config import DetectionConfig
    from .tasks.segmentation.config import SegmentationConfig

AnyConfig = TypeVar("AnyConfig")

# The comments under the fields of configuration classes are the help of the options.
set_parsing_settings(docstring_parse_attribute_docstrings=True)

TRACEBACK = "INLINEVIT_TRACEBACK"
# Packages that not everybody needs, and what to install for them.
EXTRAS = {
    "accelerate": "train",
    "jinja2": "train",
    "matplotlib": "train",
    "torchmetrics": "train",
    "yaml": "train",
    "pycocotools": "detection",
    "segmentation_models_pytorch": "segmentation",
}

# What `inlinevit bench loop` has no use for, because it neither evaluates nor writes anything.
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


class Command(NamedTuple):
    """What `inlinevit NAME` does. Rooms are imported when their command is called: some take seconds.

    Attributes:
        help: In a few words.
        make_parser: Its arguments.
        run: From its parsed arguments to an exit code (None = 0).
    """

    help: str
    make_parser: Callable[[], ArgumentParser]
    run: Callable[[Namespace], int | None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; this is what `inlinevit` on the command line calls."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        overview_parser().print_help()
        return
    warnings.showwarning = show_warning
    parser: ArgumentParser | None = None
    try:
        if words[0] not in COMMANDS:
            overview_parser().parse_args(words)
            return
        command = COMMANDS[words[0]]
        parser = command.make_parser()
        code = command.run(parser.instantiate(parser.parse_args(words[1:])))
    except BrokenPipeError:
        # Whoever reads the output has seen enough. Python must not try to write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        sys.exit(complain(error, options_of(parser, words[1:])))
    except KeyboardInterrupt:
        sys.exit("interrupted")
    if code:
        sys.exit(code)


def overview_parser() -> ArgumentParser:
    """The parser for what is no command: help, version, mistakes."""
    parser = ArgumentParser(
        prog="inlinevit",
        description="Vision transformers with InLine attention.",
        epilog=f"Set {TRACEBACK}=1 to see where an error comes from.",
        version=__version__,
        exit_on_error=False,
    )
    subcommands = parser.add_subcommands(required=True, dest="command")
    for name, command in COMMANDS.items():
        subcommands.add_subcommand(name, new_parser(name), help=command.help)
    return parser


def new_parser(name: str, description: str = "") -> ArgumentParser:
    """A parser for `inlinevit NAME` that leaves it to `main` to say what is wrong."""
    return ArgumentParser(prog=f"inlinevit {name}", description=description, exit_on_error=False)


def options_of(parser: ArgumentParser | None, words: Sequence[str]) -> list[str]:
    """What the user could have meant in `words`: options such as data.path, or parts of the command."""
    if parser is None:
        return list(COMMANDS)
    parts = parser._subcommands_action.choices if parser._subcommands_action else {}
    if words and words[0] in parts:
        return options_of(parts[words[0]], words[1:])
    return [*parts, *(option.lstrip("-") for action in parser._actions for option in action.option_strings)]


def complain(error: Exception, options: list[str]) -> int:
    """Say what is wrong in a sentence and return the exit code; what is no mistake of the user's goes on.

    Args:
        error: What has happened.
        options: Options that the user could have meant.
    """
    message = " ".join(str(error).split()).removesuffix(".")
    if isinstance(error, ArgumentError):
        return say(f"error: {message}{hint(message, options)}", 2)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return say(f"error: no space left on the disk ({message}): free some and run the same command again", 1)
    if isinstance(error, OSError) and error.errno is not None:
        return say(f"error: {error.filename or 'a file'} cannot be used ({error.strerror}): check the path", 1)
    if isinstance(error, ValueError | OSError):
        return say(f"error: {message}", 1)
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get((error.name or "").partition(".")[0])):
        return say(f"error: {message}: pip install 'inlinevit[{extra}]'", 1)
    if isinstance(error, RuntimeError) and re.search(r"Connection (closed|reset) by peer", message):
        return say("error: another process has ended before this one: see what that one says", 1)
    # Imported by those commands that train, and only they can end so.
    loop: Any = sys.modules.get("inlinevit.engine.trainer")
    if loop is not None and isinstance(error, loop.Stopped):
        return say(message, 128 + error.signal_number)
    if loop is not None and isinstance(error, loop.RunEnded):
        return say(f"error: {message}", 1)
    raise error


def say(message: str, code: int) -> int:
    """Print a message to stderr, with the number of the process where there are several; returns the code."""
    rank = os.environ.get("RANK", "0")
    print(message if rank == "0" else f"process {rank}: {message}", file=sys.stderr)
    return code


def hint(message: str, options: list[str]) -> str:
    """What the user could have meant, for a message of the parser's."""
    from .utils.validation import did_you_mean

    if missing := re.search(r"File does not exist: '(.*?)'", message):
        folder = Path(missing[1]).parent
        near = did_you_mean(missing[1], [str(path) for path in folder.glob("*.yaml")])
        return f": {near or 'the recipes are in the folder recipes/ of the repository'}"
    if wrong := re.search(r"(?:[Oo]ption '|arguments: --|invalid choice: ')([\w.]+)", message):
        near = did_you_mean(wrong[1], options)
    elif wrong := re.search(r"Literal\[(.*)\]\. Got value: (\S+)", message):
        near = did_you_mean(wrong[2], re.findall(r"'(.*?)'", wrong[1]))
    else:
        near = ""
    return f": {near or 'see --help'}"


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as one line."""
    print(f"warning: {message}", file=sys.stderr)


def models_parser() -> ArgumentParser:
    """The arguments of `inlinevit models`."""
    parser = new_parser("models", "List all models with their size, cost and accuracy.")
    parser.add_argument(
        "--task",
        choices=("classification", "detection", "segmentation"),
        default="classification",
        help="what to list: classifiers, or whole models for another task on our backbones and on their softmax rivals",
    )
    parser.add_argument("--filter", default="*", help="show the models whose name matches, such as '*swin*'")
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", dest="format", action="store_const", const="json", help="print JSON")
    formats.add_argument("--markdown", dest="format", action="store_const", const="markdown", help="print Markdown")
    return parser


def show_models(settings: Namespace) -> None:
    """Print the models whose name matches, as a table, as "json" or as "markdown"."""
    tasks = {"classification": classifiers_listed, "detection": detectors_listed, "segmentation": segmenters_listed}
    listed = tasks[settings.task]()
    names = [name for name in listed.facts if fnmatch.fnmatch(name, settings.filter)]
    if not names:
        words = "inlinevit models" if settings.task == "classification" else f"inlinevit models --task {settings.task}"
        raise ValueError(f"no model matches {settings.filter!r}: `{words}` lists all of them")
    if settings.format == "json":
        print(json.dumps([{"name": name, **asdict(listed.facts[name])} for name in names], indent=2))
    elif settings.format == "markdown":
        rows = [listed.headings, ["---"] * len(listed.headings), *map(listed.cells, names)]
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    else:
        table = Table(*listed.headings, caption=listed.caption)
        for column in table.columns[1:]:
            column.justify = "right"
        for name in names:
            table.add_row(*listed.cells(name))
        Console().print(table)


class Listed(NamedTuple):
    """What `inlinevit models` lists.

    Attributes:
        facts: By name, a dataclass each.
        headings: Of the table.
        cells: From a name to its row.
        caption: What the figures are.
    """

    facts: Mapping[str, Any]
    headings: Sequence[str]
    cells: Callable[[str], Sequence[str]]
    caption: str


def classifiers_listed() -> Listed:
    """All classifiers of ours."""
    from .models.catalog import CATALOG, HEADINGS, cells

    return Listed(CATALOG, HEADINGS, cells, "GMACs for one image; top-1 as published, on ImageNet-1K")


def detectors_listed() -> Listed:
    """Detectors by backbone, each InLine one above its softmax counterpart."""
    from .tasks.detection.cost import DETECTOR_CATALOG, HEADINGS, cells

    caption = "Millions of parameters and GMACs of whole detectors: 80 categories, one image of 1280×800"
    return Listed(DETECTOR_CATALOG, HEADINGS, cells, caption)


def segmenters_listed() -> Listed:
    """Models that label pixels by backbone, each InLine one above its softmax counterpart."""
    from .tasks.segmentation.cost import HEADINGS, SEGMENTER_CATALOG, cells

    caption = "Millions of parameters and GMACs of whole models: 150 classes, one image of 2048×512"
    return Listed(SEGMENTER_CATALOG, HEADINGS, cells, caption)


class RecipeFile(ActionConfigFile):
    """`--config FILE`: the file is checked before the parser reads it, which some YAML would keep busy for ever."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """See argparse.Action."""
        # What a shell makes of <(…) can be read but once.
        if isinstance(values, str) and os.path.isfile(values):
            try:
                require_sections(read_yaml(values), [action.dest for action in parser._actions])
            except ValueError as error:
                raise ArgumentError(self, f"{values} is not a valid recipe ({error})") from error
        super().__call__(parser, namespace, values, option_string)


def require_sections(recipe: Any, options: Sequence[str], section: str = "") -> None:
    """Refuse a recipe in which something else stands where fields are expected.

    Args:
        recipe: What was read.
        options: What the command can be told: data.path, ….
        section: Which part of it this is, such as "data."; "" = all of it.

    Raises:
        ValueError: The message does not name the file.
    """
    if not isinstance(recipe, dict):
        example = next(option for option in options if option.startswith(section) and "." in option)
        raise ValueError(
            f"{recipe!r:.80} stands for {section.removesuffix('.') or 'all of it'}: write fields there, such as "
            f"{example.removeprefix(section)}"
        )
    for key, value in recipe.items():
        if any(option.startswith(f"{section}{key}.") for option in options):
            require_sections(value, options, f"{section}{key}.")


def recipe_parser(name: str, description: str, config: type["TrainConfig"], example: str) -> ArgumentParser:
    """The arguments of a training command: a recipe, and the fields of a configuration."""
    parser = new_parser(name, f"{description} Options override the recipe.")
    parser.add_argument("--config", action=RecipeFile, help=f"a recipe, such as {example}")
    parser.add_class_arguments(config)
    return parser


def to_config(settings: Namespace, kind: type[AnyConfig]) -> AnyConfig:
    """What was parsed, as one object."""
    return kind(**{field.name: settings[field.name] for field in fields(cast(Any, kind))})


def run_training(task: "Task", config: "TrainConfig") -> None:
    """Train to the end, and tell what came out."""
    from .engine.trainer import Trainer

    trainer = Trainer(task, config)
    metrics = trainer.run()
    if trainer.accelerator.is_main_process:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(f"done: {numbers}; weights and results are in {config.run.output}")
    trainer.accelerator.end_training()


def entry_parser(entry: TaskEntry, what: str) -> ArgumentParser:
    """The arguments of train, eval or predict of a task."""
    name = f"{entry.command} {what}".strip()
    if what == "train":
        return recipe_parser(name, f"Train a model: {entry.description}.", entry.load_config(), entry.recipe)
    parser = new_parser(name, f"{what.capitalize()}: {entry.description}.")
    help = "folder of a training run" + (", or name of a model" if entry.accepts_names else "")
    if what == "eval":
        if entry.needs_model:
            parser.add_argument("model", type=str, help=help)
        else:
            parser.add_argument("model", nargs="?", type=str, default=None, help=help)
        parser.add_class_arguments(entry.load_eval_options())
    else:
        parser.add_argument("model", type=str, help=help)
        parser.add_argument("images", nargs="+", type=str, help="images, folders of them, or patterns such as '*.jpg'")
        parser.add_class_arguments(entry.load_predict_options())
    return parser


def run_entry(entry: TaskEntry, what: str, settings: Namespace) -> int | None:
    """Train, evaluate or predict."""
    from .engine.evaluator import evaluate_command
    from .engine.predictor import predict_command

    task = entry.load_task()
    if what == "train":
        config = to_config(settings, entry.load_config())
        run_training(task(config), config)
        return None
    if what == "eval":
        evaluate_command(task, settings.model, to_config(settings, entry.load_eval_options()))
        return None
    return predict_command(task, settings.model, settings.images, to_config(settings, entry.load_predict_options()))


def parse_task_config(task: str, arguments: Sequence[str]) -> Any:
    """The configuration that `train` of a task would use."""
    parser = entry_parser(TASKS[task], "train")
    return to_config(parser.instantiate(parser.parse_args(list(arguments))), TASKS[task].load_config())


def parse_config(arguments: Sequence[str]) -> "ClassificationConfig":
    """The configuration that `inlinevit train` would use."""
    return parse_task_config("classification", arguments)


def parse_detection_config(arguments: Sequence[str]) -> "DetectionConfig":
    """The configuration that `inlinevit detect train` would use."""
    return parse_task_config("detection", arguments)


def parse_segmentation_config(arguments: Sequence[str]) -> "SegmentationConfig":
    """The configuration that `inlinevit segment train` would use."""
    return parse_task_config("segmentation", arguments)


def task_command(entry: TaskEntry) -> Command:
    """The command of a task: train, eval or predict."""

    def make_parser() -> ArgumentParser:
        parser = new_parser(entry.command, f"{entry.description.capitalize()}.")
        parsers = parser.add_subcommands(required=True, dest="what")
        for what in ("train", "eval", "predict"):
            parsers.add_subcommand(what, entry_parser(entry, what), help=f"{what} a model")
        return parser

    return Command(
        f"{entry.description}: train, eval, predict",
        make_parser,
        lambda settings: run_entry(entry, settings.what, settings[settings.what]),
    )


def plain_command(entry: TaskEntry, what: str) -> Command:
    """Train, eval or predict of the task without a command of its own."""
    return Command(
        f"{what} a classifier", lambda: entry_parser(entry, what), lambda settings: run_entry(entry, what, settings)
    )


def demo_parser() -> ArgumentParser:
    """The arguments of `inlinevit demo`: those of its function."""
    from .experiments.demo import demo

    parser = new_parser("demo", "Train softmax, linear and InLine attention side by side, and write a report.")
    parser.add_function_arguments(demo)
    return parser


def run_demo(settings: Namespace) -> None:
    """Run the demo."""
    from .experiments.demo import demo

    demo(**vars(settings))


def analyze_parser() -> ArgumentParser:
    """The arguments of `inlinevit analyze`: those of analyze_command."""
    from .analysis.analyze import analyze_command

    parser = new_parser("analyze", "Look inside models: confusion, locality, masking and maps of their attention.")
    parser.add_argument("models", nargs="+", type=str, help="folders of training runs, or names of models")
    parser.add_function_arguments(analyze_command, skip={"models", "untrained"})
    parser.add_argument(
        "--untrained",
        action="store_true",
        help="take random weights; names may have options then, such as inline_deit_tiny:attention=linear",
    )
    return parser


def analyze(settings: Namespace) -> None:
    """Look inside models."""
    from .analysis.analyze import analyze_command

    analyze_command(**vars(settings))


def figure1_parser() -> ArgumentParser:
    """The arguments of `inlinevit figure1`: those of its function."""
    from .analysis.figure1 import figure1

    parser = new_parser("figure1", "Redraw the paper's first figure from numbers computed on the spot.")
    parser.add_function_arguments(figure1)
    return parser


def run_figure1(settings: Namespace) -> None:
    """Redraw the paper's first figure."""
    from .analysis.figure1 import figure1

    figure1(**vars(settings))


def bench_parser() -> ArgumentParser:
    """The arguments of `inlinevit bench`: what to measure, each with options of its own."""
    from .benchmark.studies import BENCHES

    parser = new_parser("bench", "Measure speed and memory, side by side in one process.")
    parsers = parser.add_subcommands(required=True, dest="what")
    for name, one in BENCHES.items():
        parsers.add_subcommand(name, bench_study_parser(name), help=one.help)
    parsers.add_subcommand("loop", bench_loop_parser(), help="what the training loop and data loading cost")
    return parser


def bench_study_parser(name: str) -> ArgumentParser:
    """The arguments of one of BENCHES: those of its own, and those that all have."""
    from .benchmark.studies import BENCHES, OPTIONS_HELP

    one = BENCHES[name]
    parser = new_parser(f"bench {name}", f"Measure {one.help}.")
    for option, value in one.options.items():
        plain = " ".join(map(str, value)) if isinstance(value, list) else value
        several: dict[str, Any] = {"nargs": "+", "type": type(value[0])} if isinstance(value, list) else {"type": int}
        parser.add_argument(
            f"--{option}", **several, default=SUPPRESS, help=f"{OPTIONS_HELP[option]}; {plain} by default"
        )
    parser.add_argument("--backward", action="store_true", help="forward and backward instead of forward alone")
    parser.add_argument("--threads", type=int, default=SUPPRESS, help="threads of torch; as it chooses by default")
    parser.add_argument(
        "--rounds", type=int, default=SUPPRESS, help="how often each has its turn, at most; 50 by default"
    )
    parser.add_argument("--quick", action="store_true", help="fewer of all and nothing compiled, in a minute")
    parser.add_argument("--device", type=str, default="cpu", help="cpu or cuda")
    parser.add_argument("--output", type=str, default=None, help="folder for JSON, report and drawings")
    parser.add_argument("--name", type=str, default=name, help="name of the files in it")
    return parser


def bench_loop_parser() -> ArgumentParser:
    """The arguments of `inlinevit bench loop`."""
    from .tasks.classification.config import ClassificationConfig

    parser = new_parser("bench loop", "Measure the training loop with the model and the data of a recipe.")
    parser.add_argument("--config", action=RecipeFile, help="a recipe, such as recipes/embedded.yaml")
    parser.add_argument("--steps", type=int, default=30, help="steps of each kind, taken in turns")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_class_arguments(ClassificationConfig)
    return parser


def bench(settings: Namespace) -> None:
    """Measure speed and memory."""
    from .benchmark.report import print_results, write_report
    from .benchmark.studies import run_bench
    from .engine.outputs import check_output_folder
    from .utils.validation import require

    options = vars(settings[settings.what])
    if settings.what == "loop":
        return bench_loop(settings.loop)
    output, name = options.pop("output"), options.pop("name")
    require(output is not None or name == settings.what, "--name is for the files in --output: name that folder, too")
    require(name not in ("", ".", "..") and Path(name).name == name, f"--name is {name!r}: it should be a plain name")
    if output is not None:
        check_output_folder(output, [f"{name}.{ending}" for ending in ("html", "json", "png", "svg")])
    results = run_bench(settings.what, **options)
    print_results(results, Console())
    if output is not None:
        print(f"the report is {write_report(results, Path(output), name)}")


def bench_loop(settings: Namespace) -> None:
    """Measure the training loop."""
    from .benchmark.train_loop import measure_loop
    from .tasks.classification.config import ClassificationConfig
    from .utils.validation import require

    config = to_config(settings, ClassificationConfig)
    # What a recipe says of them is passed over; an option would have no effect.
    recipes = [word for file in settings.config or [] for word in ("--config", str(file))]
    parser = bench_loop_parser()
    recipe = to_config(parser.instantiate(parser.parse_args(recipes)), ClassificationConfig)
    unused = [f"--run.{name}" for name in UNUSED_BY_LOOP if vars(config.run)[name] != vars(recipe.run)[name]]
    require(not unused, f"bench loop writes nothing, so {' and '.join(unused)} would have no effect: leave it out")
    numbers = measure_loop(config, settings.steps).summary()
    if settings.json:
        print(json.dumps(numbers, indent=2))
        return
    table = Table("a step", "ms, quartiles", title=f"{numbers['threads']} threads")
    for name in ("training", "data_only", "loop_on_tensors", "bare_on_tensors"):
        table.add_row(name, "  ".join(f"{1000 * seconds:.1f}" for seconds in numbers[name]))
    Console().print(table)
    print(f"without a model, the loop is {numbers['times_faster_without_model']:.1f} times as fast")
    print(f"on tensors, the loop takes {numbers['overhead_percent']:.1f} % longer than a bare step")


def reproduce_parser() -> ArgumentParser:
    """The arguments of `inlinevit reproduce`: those of its function."""
    from .experiments.reproduce import reproduce

    parser = new_parser("reproduce", "Train the paper's ablations on CIFAR-10, and tell what holds of its claims.")
    parser.add_argument("studies", nargs="*", type=str, metavar="STUDY", default=[], help="names; all by default")
    parser.add_function_arguments(reproduce, skip={"studies"})
    parser.add_argument("--list", action="store_true", help="list the studies and their cells, and train nothing")
    return parser


def run_reproduce(settings: Namespace) -> int:
    """Train what is missing of the paper's ablations."""
    from .experiments.reproduce import describe_studies, reproduce
    from .utils.validation import require

    options = vars(settings)
    if options.pop("list"):
        defaults = reproduce_parser().get_defaults()
        unused = [name for name, value in options.items() if name != "studies" and value != defaults[name]]
        require(not unused, f"--list trains nothing, so --{' and --'.join(unused)} would have no effect: leave it out")
        print(describe_studies(settings.studies))
        return 0
    return reproduce(**options)


COMMANDS = {
    "demo": Command("see in minutes what InLine attention is worth", demo_parser, run_demo),
    "models": Command("list all models with their size, cost and accuracy", models_parser, show_models),
    **{what: plain_command(TASKS["classification"], what) for what in ("train", "eval", "predict")},
    **{entry.command: task_command(entry) for entry in TASKS.values() if entry.command},
    "analyze": Command("see inside models where attention goes", analyze_parser, analyze),
    "figure1": Command("redraw the paper's first figure", figure1_parser, run_figure1),
    "bench": Command("measure speed", bench_parser, bench),
    "reproduce": Command("the paper's ablations on CIFAR-10", reproduce_parser, run_reproduce),
}

"""Configuration of a training run, whatever its task. Recipes and options on the command line are these classes."""

import typing
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

from ..utils.files import read_yaml
from ..utils.validation import Range, check_fields, check_value, did_you_mean, require, shorten

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

AnyConfig = TypeVar("AnyConfig")

# Larger values are mistakes; docs/training.md lists these limits.
MOST_STEPS = 10**9
MOST_IMAGES = 10**12
MOST_WORKERS = 1024
# Ranges of several settings.
COUNT = Range(1, MOST_STEPS)
NOT_NEGATIVE = Range(0, inf)
BELOW_ONE = Range(0, 1, below_most=True)
BANDS = Range(0, 1023)
BITS = Range(8, 32)
SCALES = Range(1e-6, 1e6)
PIXEL_LIMITS = Range(1, 10**12)


@dataclass
class OptimizerConfig:
    """How weights are updated."""

    name: str = "adamw"
    """Any of timm's optimizers."""
    lr: float = 5e-4
    """Learning rate for a total batch of lr_base_size; the rate used grows in proportion to the total batch."""
    lr_base_size: int = 512
    """The total batch that the learning rates are given for; 0 = they are absolute."""
    weight_decay: float = 0.05
    """Not for norms, biases, positions, class tokens and relative position tables."""
    betas: tuple[float, float] = (0.9, 0.999)
    """For optimizers that have two; with the default, those outside of Adam's family keep their own."""
    eps: float = 1e-8
    """For optimizers that have one; with the default, those outside of Adam's family keep their own."""
    momentum: float = 0.9
    """For optimizers that have one."""
    layer_decay: float | None = None
    """Learning rates fall by this factor from layer to layer, from the head down to the first one."""
    lr_scales: dict[str, float] = field(default_factory=dict)
    """Factors of the learning rate for parameters whose names match a pattern, as in {"head.*": 10}."""
    clip_grad: float | None = None
    """Largest norm of the gradients."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "optimizer",
            lr=NOT_NEGATIVE,
            lr_base_size=Range(0, MOST_STEPS),
            weight_decay=NOT_NEGATIVE,
            betas=BELOW_ONE,
            eps=Range(0, 1),
            momentum=BELOW_ONE,
            layer_decay=Range(0, 1, above_least=True),
            lr_scales=SCALES,
            clip_grad=Range(0, inf, above_least=True),
        )


# Length of a schedule that gives none.
DEFAULT_EPOCHS = 300


@dataclass
class ScheduleConfig:
    """Length of the training and schedule of the learning rate, in epochs, or in steps if `steps` is given."""

    name: str = "cosine"
    """Any of timm's schedules that are functions of the step: cosine, tanh, poly, step, multistep."""
    epochs: int | None = None
    """Length of the schedule, without cool-down; 300 if neither epochs nor steps are given."""
    steps: int | None = None
    """Train for this many steps instead of epochs; every other length here, and run.eval_every, then counts steps."""
    warmup: float = 20
    """Length of the warm-up, in which the learning rate rises."""
    cooldown: int = 0
    """Length of the end with the lowest learning rate."""
    min_lr: float = 5e-6
    """Learning rate at the end; it grows with the total batch as the learning rate does."""
    warmup_lr: float = 5e-7
    """Learning rate at the beginning; it grows with the total batch as the learning rate does."""
    milestones: list[int] = field(default_factory=list)
    """For multistep, where the rate falls; for step, the first number is how often."""
    decay_rate: float = 0.1
    """For step and multistep, the factor by which the rate falls; for poly, the power."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "schedule",
            epochs=COUNT,
            steps=COUNT,
            warmup=Range(0, MOST_STEPS),
            cooldown=Range(0, MOST_STEPS),
            min_lr=NOT_NEGATIVE,
            warmup_lr=NOT_NEGATIVE,
            milestones=COUNT,
            decay_rate=Range(0, 100, above_least=True),
        )
        require(
            self.steps is None or self.epochs is None,
            f"schedule.epochs is {self.epochs} and schedule.steps is {self.steps}, but only one of them can be "
            "the length: set the other to null, and give warmup in the unit of the length",
        )
        require(
            self.warmup <= self.length,
            f"schedule.warmup is {self.warmup:g}: it should be from 0 to {self.length}, the length of the schedule",
        )

    @property
    def length(self) -> int:
        """Length in epochs, or in steps if `steps` is given."""
        return self.steps or self.epochs or DEFAULT_EPOCHS


@dataclass
class RunConfig:
    """Where a run writes its results, and how it uses the machine."""

    output: str = "runs/latest"
    """Folder of the results: config.yaml, train.log, metrics.jsonl, checkpoints, model.safetensors."""
    seed: int = 0
    """Determines initial weights, shuffling of the data and augmentation."""
    resume: str = "auto"
    """"auto" resumes from the newest good checkpoint in `output`, if there is one; "never" starts over; or the folder
    of a checkpoint: checkpoints of later steps in `output` are then replaced."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints; there is always one at an evaluation and, unless the schedule counts steps, at the
    end of an epoch. Several processes look at the clock every log_every steps."""
    checkpoint_steps: int | None = None
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Number of the last checkpoints to keep, besides the best."""
    device: str | None = None
    """Where one process computes, such as cpu or cuda:1; null = the best device there is. Several processes have a
    device each."""
    eval_every: int | None = None
    """Epochs (or steps, if the schedule counts steps) between evaluations; null = after each epoch."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision: no, bf16 or fp16."""
    grad_accum_steps: int = 1
    """Batches whose gradients are accumulated for a step."""
    compile: bool = False
    """Compile the model with torch.compile."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them: slower, but needs less memory."""
    ema_decay: float | None = None
    """Also keep an exponential moving average of the weights with this decay per step, and evaluate and export it."""
    ema_batch_size: int = 0
    """The total batch that ema_decay is given for: the decay used is its power (total batch / ema_batch_size); 0 = it
    is used as it is."""
    deterministic: bool = False
    """On a GPU, choose algorithms that give the same bits each time, at some cost; a CPU does so anyway."""
    sync_batch_norm: bool = False
    """Compute batch norms over the images of all processes: for models that have some, and few images per process."""
    fsdp: bool = False
    """Shard parameters, gradients and optimizer states over the processes."""
    trackers: list[str] = field(default_factory=list)
    """Trackers of accelerate: tensorboard, wandb, ...."""
    attention_modules: dict[str, str] = field(default_factory=dict)
    """A record that the run writes: its attentions of other packages, and the modules that registered them. They are
    not imported because they stand here: that is what --import is for."""
    log_every: int = 50
    """Steps between lines in metrics.jsonl. Losses are read from the GPU this often, and so NaN is noticed; 1 stops
    before the weights change, but waits for the GPU in every step."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "run",
            seed=Range(0, 2**63),
            checkpoint_minutes=Range(0, MOST_STEPS),
            checkpoint_steps=COUNT,
            keep_checkpoints=COUNT,
            eval_every=COUNT,
            grad_accum_steps=COUNT,
            ema_decay=BELOW_ONE,
            ema_batch_size=Range(0, MOST_STEPS),
            log_every=COUNT,
        )
        require(
            self.ema_decay is None or not self.fsdp,
            "run.fsdp cannot average sharded weights: set --run.ema_decay null, or train without --run.fsdp",
        )
        require(
            not self.fsdp or self.precision != "fp16",
            "run.fsdp does not scale losses as fp16 needs it: use run.precision bf16",
        )


@dataclass
class ParallelConfig:
    """How several processes share the work, besides taking different images."""

    sequence: int = 1
    """Processes that share each image: every one of them holds rows of its maps. The number of all processes is a
    multiple of it. For classification with models of this library."""
    timeout_minutes: float = 30.0
    """How long processes wait for each other before the run ends."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "parallel",
            sequence=Range(1, MOST_WORKERS),
            timeout_minutes=Range(0, MOST_STEPS, above_least=True),
        )


@dataclass(kw_only=True)
class PixelConfig:
    """Which bands and values of images a model gets: docs/images.md. The data config of a task is derived from it."""

    bands: list[int] | None = None
    """Which bands of the images, in this order, from 0 on, such as [3, 2, 1]; null = all, if there are as many as
    model.in_chans."""
    range: Literal["auto", "type"] | int | tuple[float, float] = "auto"
    """Which values become black and white: two numbers; how many bits are used, such as 12; type = the range of the
    type; auto = by the type and, for 16 bits, by the bits that the training images use."""
    mean: list[float] | None = None
    """Mean of each band, where 1 is white; null = of one or three bands what the model was made for, of others that of
    training images."""
    std: list[float] | None = None
    """Standard deviation of each band; null = as for mean."""
    max_pixels: int | None = None
    """Images with more pixels are refused; null = 89,478,485, Pillow's limit."""

    def check_pixels(self) -> None:
        """Refuse bands, ranges, means and limits that make no sense."""
        check_pixel_range(self.range)
        check_value("data.bands", self.bands, list[int] | None, BANDS)
        check_value("data.max_pixels", self.max_pixels, int | None, PIXEL_LIMITS)
        require(self.bands != [], "data.bands is empty: name at least one band, or leave it out")
        require(
            (self.mean is None) == (self.std is None),
            "data.mean and data.std belong together: give both, one number for each band, or none",
        )
        require(all(value > 0 for value in self.std or ()), "data.std should be above 0")

    def check_channels(self, channels: int) -> None:
        """Refuse bands, means and standard deviations that do not fit to the channels of the model."""
        bands = channels if self.bands is None else len(self.bands)
        require(
            bands == channels or (bands, channels) == (1, 3),
            f"data.bands has {bands} bands, but model.in_chans is {channels}: set --model.in_chans {bands}, or choose "
            "others",
        )
        for name in ("mean", "std"):
            values = vars(self)[name]
            require(
                values is None or len(values) == channels,
                f"data.{name} has {len(values or ())} numbers, but model.in_chans is {channels}: give one for each",
            )


def check_pixel_range(value: Any) -> None:
    """Refuse a range that is neither a word, nor a number of bits, nor two numbers that rise."""
    if isinstance(value, int):
        check_value("data.range", value, int, BITS)
    elif not isinstance(value, str | None):
        check_value("data.range", value, tuple[float, float])
        require(value[0] < value[1], f"data.range is {list(value)}: it should rise from black to white")


@dataclass(kw_only=True)
class PixelOptions:
    """Which bands and values of images a model gets, where they differ from those of the training run."""

    bands: list[int] | None = None
    """Which bands of the images, in this order, from 0 on; null = as in the run."""
    range: Literal["auto", "type"] | int | tuple[float, float] | None = None
    """Which values become black and white: two numbers; how many bits are used; type = the range of the type; auto = by
    the type and, for 16 bits, by the bits that an image uses; null = as in the run."""
    max_pixels: int | None = None
    """Images with more pixels are refused; null = as in the run, or 89,478,485 (segment predict: 400,000,000)."""

    def overrides(self) -> dict[str, Any]:
        """Return the fields that differ from those of the run."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __post_init__(self) -> None:
        PixelConfig(**{name: vars(self)[name] for name in ("bands", "max_pixels")}).check_pixels()
        check_pixel_range(self.range)


@dataclass
class SourceOptions:
    """Data to evaluate on, where they differ from those of the training run."""

    path: str | None = None
    """The data; null = as in the run."""
    eval_split: str | None = None
    """The split to evaluate on; null = as in the run."""
    workers: int | None = None
    """Processes that read images; null = as in the run."""


@dataclass
class DataOptions(PixelOptions, SourceOptions):
    """Data to evaluate on, and what the values of their images mean, where they differ from the training run."""

    # Fields that name other data: the rest of the run's data config does not apply to these.
    source_fields: ClassVar[tuple[str, ...]] = ()

    def applied_to(self, run: Any, default: Any) -> Any:
        """Return the data config of a run, or a default if there is no run or the options name other data, with these.

        The checks of the config refuse bad values. Bands and ranges are those of the model, whatever the data.
        """
        overrides = self.overrides()
        is_elsewhere = run is None or bool(overrides.keys() & set(self.source_fields))
        if is_elsewhere and run is not None:
            default = replace(default, **{one.name: vars(run)[one.name] for one in fields(PixelConfig)})
        return replace(default if is_elsewhere else run, **overrides)


@dataclass(kw_only=True)
class CommandOptions:
    """Options of `eval` and `predict`."""

    # Options that say which model is loaded, and where results are written: a Predictor that is called has neither.
    command_only: ClassVar[tuple[str, ...]] = ("checkpoint", "device", "format", "output", "resume")

    checkpoint: str | None = None
    """"best" or a checkpoint of the run; null = the final weights."""
    device: str | None = None
    """Where to compute, such as cpu or cuda; null = the best device there is."""
    data: PixelOptions = field(default_factory=PixelOptions)


@dataclass(kw_only=True)
class EvalOptions(CommandOptions):
    """Options of `eval`; a task adds its own."""

    data: DataOptions = field(default_factory=DataOptions)
    output: str | None = None
    """Folder for evaluation.json, evaluation.html, per_class.csv, predictions.csv and further files; null = only print
    tables."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision: no, bf16 or fp16."""


@dataclass(kw_only=True)
class PredictOptions(CommandOptions):
    """Options of `predict`; a task adds its own."""

    resume: Literal["auto", "never"] = "auto"
    """"auto" continues a job that was stopped, if there are partial results of the same settings beside the output;
    "never" starts over."""


@dataclass(kw_only=True)
class ClassPredictOptions(PredictOptions):
    """Options of `predict` for tasks that predict classes of images."""

    # Formats that the name of a file can end with.
    file_formats: ClassVar[tuple[str, ...]] = ("json", "jsonl", "csv", "parquet")

    format: Literal["auto", "table", "json", "jsonl", "csv", "parquet"] = "auto"
    """Format of the results; "auto" = that of the extension of `output` (.json, .jsonl, .csv, .parquet), else a
    table."""
    output: str | None = None
    """File for the results; null = print them."""
    batch_size: int = 32
    """Images in a batch."""

    def __post_init__(self) -> None:
        check_value("batch_size", self.batch_size, int, Range(1, MOST_IMAGES))

    def chosen_format(self) -> str:
        """Return the format of the results, where "auto" is replaced."""
        if self.format != "auto":
            return self.format
        extension = Path(self.output or "").suffix.lower().removeprefix(".")
        return extension if extension in self.file_formats else "table"


@dataclass(kw_only=True)
class DrawingPredictOptions(PredictOptions):
    """Options of `predict` for tasks that draw their results."""

    output: str
    """Folder for the drawings and predictions.json."""


def fill_options(kind: Any, given: Mapping[str, Any], known: Sequence[str]) -> Any:
    """Return options with values given by name; those of a section are given as a dict.

    Args:
        kind: A dataclass. If results would be written to files, the caller writes none: output is empty.
        given: The values.
        known: The names that may be given.

    Raises:
        TypeError: There is no such option.
        ValueError: A value is wrong.
    """
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {"output": ""} if issubclass(kind, DrawingPredictOptions) else {}
    for name, value in given.items():
        if name not in known:
            near = did_you_mean(name, known) or f"the options are {', '.join(known)}"
            raise TypeError(f"there is no option {name}: {near}")
        section = hints[name]
        if is_dataclass(section) and not isinstance(value, cast(type, section)):
            names = [one.name for one in fields(section)]
            if not isinstance(value, Mapping):
                raise TypeError(f"{name} is {shorten(value)}: give a dict with some of {', '.join(names)}")
            value = fill_options(section, value, names)
        values[name] = value
    return kind(**values)


@dataclass
class TrainConfig:
    """Configuration of the training loop. A task adds its data and its model.

    Its sections are optimizer (OptimizerConfig), schedule (ScheduleConfig), run (RunConfig) and parallel
    (ParallelConfig).
    """

    # Settings that may change when a run is resumed, because the final weights do not depend on them.
    free_on_resume: ClassVar[tuple[str, ...]] = (
        "data.max_pixels",
        "data.path",
        "data.workers",
        "parallel.sequence",
        "parallel.timeout_minutes",
        "run.attention_modules",
        "run.checkpoint_minutes",
        "run.checkpoint_steps",
        "run.device",
        "run.keep_checkpoints",
        "run.log_every",
        "run.output",
        "run.resume",
        "run.trackers",
    )

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def fixed_on_resume(self) -> set[str]:
        """Return those settings of `free_on_resume` which the weights of this run do depend on."""
        return set()


# Settings that may change if the total batch stays the same.
BATCH_SETTINGS = ("data.batch_size", "run.grad_accum_steps")


def to_plain(config: Any) -> dict[str, Any]:
    """Return a configuration as dicts, lists, numbers and strings, for YAML and JSON."""
    return asdict(
        config, dict_factory=lambda fields: {name: list(v) if isinstance(v, tuple) else v for name, v in fields}
    )


def config_from_dict(kind: type[AnyConfig], values: Any) -> AnyConfig:
    """Return a configuration with values that come out of a file, parsed as recipes and options are.

    Raises:
        ValueError: A field is unknown, or its value is not valid; the message is one sentence without the file.
    """
    _require_sections(kind, values)
    parser = _parser_of(cast(Any, kind))
    try:
        parsed = parser.instantiate(parser.parse_object(values))
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())[:300]) from error
    return kind(**vars(parsed))


@cache
def _parser_of(kind: type) -> "ArgumentParser":
    """Return a parser for the fields of a dataclass; making one takes longer than parsing."""
    # Here, because most commands that import this module parse no file.
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    return parser


def _require_sections(kind: Any, values: Any) -> None:
    """Refuse unknown fields, and other values than dicts for dataclasses.

    jsonargparse would pass over a name with an empty dict, and open a file where text stands for a dataclass.
    """
    if not isinstance(values, dict):
        raise ValueError(f"expected the fields of {kind.__name__}, but found {values!r:.100}")
    hints = typing.get_type_hints(kind)
    unknown = [name for name in values if name not in hints]
    if unknown:
        raise ValueError(f"{kind.__name__} has no {', '.join(map(str, unknown))}")
    for name, value in values.items():
        if is_dataclass(hints[name]):
            _require_sections(hints[name], value)


def flattened(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a plain configuration as a single dict: {"run.seed": 0, …}."""
    flat: dict[str, Any] = {}
    for name, value in plain.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def read_plain(file: Path) -> dict[str, Any]:
    """Read the plain configuration of a run."""
    try:
        plain = read_yaml(file)
    except (OSError, ValueError):
        plain = None
    if not isinstance(plain, dict):
        raise ValueError(
            f"{file} does not have the settings of the checkpoints beside it: restore it, name one of them with "
            "--run.resume, or start over with --run.resume never"
        )
    return plain


def check_unchanged(before: dict[str, Any], now: TrainConfig, is_same_batch: bool = False) -> None:
    """Refuse to resume a run under settings that would make it another one.

    Args:
        before: The plain configuration that it was started with.
        now: The configuration that it is to be resumed with.
        is_same_batch: Whether the settings result in the same total batch; batch size and accumulation may then change.
    """
    # Settings that did not exist when the run was started are as they are by default.
    old, new = flattened(to_plain(type(now)())) | flattened(before), flattened(to_plain(now))
    free = {*now.free_on_resume, *(BATCH_SETTINGS if is_same_batch else ())} - now.fixed_on_resume()
    changed = [
        f"{name} was {old.get(name)} and is {new.get(name)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not any(f"{name}.".startswith(f"{setting}.") for setting in free)
    ]
    require(
        not changed,
        f"{now.run.output} holds a run with other settings ({'; '.join(changed)}): choose another --run.output, "
        "or start over with --run.resume never",
    )

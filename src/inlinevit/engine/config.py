"""Configuration of a training run, whatever its task. Recipes and options on the command line are these classes."""

import typing
from argparse import ArgumentError
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

from ..utils.files import read_yaml
from ..utils.validation import Range, check_fields, check_value, require

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
            clip_grad=Range(0, inf, above_least=True),
        )


@dataclass
class ScheduleConfig:
    """Length of the training and schedule of the learning rate, in epochs, or in steps if `steps` is given."""

    name: str = "cosine"
    """Any of timm's schedules that are functions of the step: cosine, tanh, poly, step, multistep."""
    epochs: int = 300
    """Length of the schedule, without cool-down."""
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
        length = self.epochs if self.steps is None else self.steps
        require(
            self.warmup <= length,
            f"schedule.warmup is {self.warmup:g}: it should be from 0 to {length}, the length of the schedule",
        )


@dataclass
class RunConfig:
    """Where a run writes its results, and how it uses the machine."""

    output: str = "runs/latest"
    """Folder of the results: config.yaml, metrics.jsonl, checkpoints, model.safetensors."""
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
class DataOptions:
    """Data to evaluate on, where they differ from those of the training run."""

    # Fields that name other data: the rest of the run's data config does not apply to these.
    source_fields: ClassVar[tuple[str, ...]] = ()

    path: str | None = None
    """The data; null = as in the run."""
    eval_split: str | None = None
    """The split to evaluate on; null = as in the run."""
    workers: int | None = None
    """Processes that read images; null = as in the run."""

    def overrides(self) -> dict[str, Any]:
        """Return the fields of the data config that differ from those of the run."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def applied_to(self, run: Any, default: Any) -> Any:
        """Return the data config of a run, or a default if there is no run or the options name other data, with these.

        The checks of the config refuse bad values.
        """
        overrides = self.overrides()
        is_elsewhere = run is None or bool(overrides.keys() & set(self.source_fields))
        return replace(default if is_elsewhere else run, **overrides)


@dataclass(kw_only=True)
class CommandOptions:
    """Options of `eval` and `predict`."""

    checkpoint: str | None = None
    """"best" or a checkpoint of the run; null = the final weights."""
    device: str | None = None
    """Where to compute, such as cpu or cuda; null = the best device there is."""


@dataclass(kw_only=True)
class EvalOptions(CommandOptions):
    """Options of `eval`; a task adds its own."""

    data: DataOptions = field(default_factory=DataOptions)
    output: str | None = None
    """Folder for evaluation.json, per_class.csv and further files; null = only print tables."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision: no, bf16 or fp16."""


@dataclass(kw_only=True)
class ClassPredictOptions(CommandOptions):
    """Options of `predict` for tasks that predict classes of images."""

    format: Literal["table", "json", "csv"] = "table"
    """Format of the results."""
    output: str | None = None
    """File for the results; null = print them."""
    batch_size: int = 32
    """Images in a batch."""

    def __post_init__(self) -> None:
        check_value("batch_size", self.batch_size, int, Range(1, MOST_IMAGES))


@dataclass(kw_only=True)
class DrawingPredictOptions(CommandOptions):
    """Options of `predict` for tasks that draw their results."""

    output: str
    """Folder for the drawings and predictions.json."""


@dataclass
class TrainConfig:
    """Configuration of the training loop. A task adds its data and its model."""

    # Settings that may change when a run is resumed, because the final weights do not depend on them.
    free_on_resume: ClassVar[tuple[str, ...]] = (
        "data.path",
        "data.workers",
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
    old, new = flattened(before), flattened(to_plain(now))
    free = {*now.free_on_resume, *(BATCH_SETTINGS if is_same_batch else ())}
    changed = [
        f"{name} was {old.get(name)} and is {new.get(name)}"
        for name in sorted(old.keys() | new.keys())
        if name not in free and old.get(name) != new.get(name)
    ]
    require(
        not changed,
        f"{now.run.output} holds a run with other settings ({'; '.join(changed)}): choose another --run.output, "
        "or start over with --run.resume never",
    )
